"""Checks over several keys, the model and the disk, made before any process starts; each refusal is one sentence."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megatron_rlvr.config.tree import HUB, ActorConfig, RewardConfig, RunConfig
from megatron_rlvr.types import ModelSpec, UserError

Command = Literal["train", "eval", "sft"]


def installed_version(distribution: str) -> tuple[int, ...] | None:
    """(0, 16, 1) of an installed distribution, read without importing it; None where it is absent."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def check_config(
    config: RunConfig,
    spec: ModelSpec | None = None,
    *,
    command: Command = "train",
    megatron_core: tuple[int, ...] | None = None,
) -> None:
    """Refuse a run that cannot work.

    spec            the model's sizes; None leaves out the checks that need them
    megatron_core   version of the megatron-core that will run; default: the one installed
    Raises UserError: one sentence with the key, its value and the remedy.
    """
    check_paths(config, command)
    check_layout(config.actor)
    if command == "sft":
        _check_sft(config)
    else:
        _check_rollout(config)
        _check_sampling(config)
        _check_rewards(config.rewards)
    if command == "train":
        check_schedule(config)
        _check_learning(config)
        check_profile(config)
        _check_replay(config)
        _check_allocation(config)
    if spec is not None:
        check_model(config, spec, command)
        check_known_faults(config.actor, spec, megatron_core or installed_version("megatron-core"))


def config_warnings(config: RunConfig) -> list[str]:
    """Sentences about settings that are allowed but rarely meant."""
    rollout = config.rollout
    raw = rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k < 1
    if raw or config.loss.logprob_temperature is not None:
        return []
    return [
        f"rollout.temperature={rollout.temperature:g}, rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k} "
        "change what is sampled, but learner and engine score tokens under the raw softmax, so importance ratios are "
        f"not those of the sampler; set loss.logprob_temperature={rollout.temperature:g} to score what sampled"
    ]


def _divides(small: tuple[str, int], large: tuple[str, int]) -> None:
    """Refuse when `small` does not divide `large`; both as (name, value)."""
    if large[1] % small[1]:
        divisors = [d for d in range(1, large[1] + 1) if large[1] % d == 0]
        nearest = max((d for d in divisors if d <= small[1]), default=1)
        raise UserError(
            f"{small[0]} is {small[1]}, which does not divide {large[0]} {large[1]}; "
            f"set {small[0]} to a divisor such as {nearest}"
        )


# Disk


def check_paths(config: RunConfig, command: Command = "train") -> None:
    """Refuse a missing or empty file that the command needs: the checkpoint's files, problems, demonstrations."""
    _check_checkpoint(config.model.path)
    if command == "train" and config.data.train is None:
        raise UserError("data.train is unset, so there is nothing to train on; set data.train=PROBLEMS.jsonl")
    if command == "train" and config.data.train is not None:
        _check_problems("data.train", config.data.train)
    if command != "sft":
        _check_held_out(config)
    if command == "eval" and not config.held_out_sets:
        raise UserError("data.validation is unset, so there is nothing to evaluate; set data.validation=PROBLEMS.jsonl")
    if command == "sft" and config.sft.demonstrations is not None:
        _check_file("sft.demonstrations", config.sft.demonstrations)


def _check_held_out(config: RunConfig) -> None:
    """Files, names, and that nothing is chosen by a set that is only for testing."""
    data, sets = config.data, config.held_out_sets
    if data.validation is not None:
        _check_problems("data.validation", data.validation)
        if data.validation.stem.removeprefix(HUB) in data.held_out:
            raise UserError(
                f"data.held_out has a set {data.validation.stem}, which is also the name of data.validation; rename it"
            )
    for name, held_out in data.held_out.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise UserError(f"data.held_out has a set {name!r}; use letters, digits, dots, dashes and underscores")
        _check_problems(f"data.held_out.{name}.path", held_out.path)
    for name, held_out in sets.items():
        twin = next((n for n, other in sets.items() if other.path == held_out.path and other.role == "test"), None)
        if held_out.role == "validation" and twin is not None:
            raise UserError(
                f"held-out sets {name} (validation) and {twin} (test) are the same {held_out.path}, so the best model "
                "would be chosen on the test set; give one of them other problems"
            )
    _check_best(config)


def _check_best(config: RunConfig) -> None:
    sets, chosen = config.held_out_sets, config.trainer.best_by
    validation = [name for name, held_out in sets.items() if held_out.role == "validation"]
    if chosen is not None and chosen not in validation:
        fault = "is only for testing" if chosen in sets else "is no held-out set"
        names = ", ".join(validation) or "none: give one role validation"
        raise UserError(f"trainer.best_by is {chosen}, which {fault}; name a validation set ({names})")
    if config.trainer.save_best and config.best_by is None:
        remedy = f"set trainer.best_by to one of {', '.join(validation)}" if validation else "set data.validation"
        raise UserError(f"trainer.save_best is true, but nothing says which model is best; {remedy}")


def _check_problems(key: str, path: Path) -> None:
    """As `_check_file`, but folders and sets on the hub pass: reading them says more than could be said here."""
    if not str(path).startswith(HUB) and not path.is_dir():
        _check_file(key, path)


def _check_file(key: str, path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{key} is {path}, which is not a file; set {key} to an existing JSONL file")
    if path.stat().st_size == 0:
        raise UserError(f"{key} is {path}, which is empty; set {key} to a JSONL file with one problem a line")


def _check_checkpoint(path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"model.path is {path}, which is not a directory; set it to a Hugging Face checkpoint directory"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path is {path}, which has no config.json; set it to a Hugging Face checkpoint directory"
        )
    index = path / "model.safetensors.index.json"
    needed = _shards(index) if index.is_file() else {"model.safetensors"}
    missing = sorted(name for name in needed if not (path / name).is_file())
    if missing:
        raise UserError(f"model.path is {path}, which lacks {missing[0]}; copy the whole checkpoint directory again")


def _shards(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{index} is not a safetensors index; copy the checkpoint directory again") from None
    if not names:
        raise UserError(f"{index} lists no weights; copy the checkpoint directory again")
    return names


# Layout


def check_layout(actor: ActorConfig) -> None:
    """Refuse sizes that no model could be laid out with, as megatron.core.parallel_state forms its groups."""
    if actor.virtual_pipeline > 1 and actor.pipeline_parallel == 1:
        raise UserError(
            f"actor.virtual_pipeline is {actor.virtual_pipeline} with actor.pipeline_parallel 1; "
            "set actor.pipeline_parallel above 1 or actor.virtual_pipeline=1"
        )
    expert_ranks = actor.expert_parallel * actor.expert_tensor
    dense_ranks = actor.tensor_parallel * actor.context_parallel * actor.data_parallel
    if dense_ranks % expert_ranks:
        raise UserError(
            f"actor.expert_parallel times actor.expert_tensor_parallel is {actor.expert_parallel} x "
            f"{actor.expert_tensor}, which does not divide actor.tensor_parallel times actor.context_parallel times "
            f"actor.data_parallel, {actor.tensor_parallel} x {actor.context_parallel} x {actor.data_parallel}; lower "
            "actor.expert_parallel or set actor.data_parallel to a multiple of "
            f"{_lacking(expert_ranks, actor.tensor_parallel * actor.context_parallel)}"
        )


def _lacking(expert_ranks: int, model_ranks: int) -> int:
    """The smallest data-parallel size with which tensor x context x data is a multiple of expert_ranks."""
    return next(d for d in range(1, expert_ranks + 1) if (d * model_ranks) % expert_ranks == 0)


def check_model(config: RunConfig, spec: ModelSpec, command: Command = "train") -> None:
    """Refuse a layout or a length that this model does not allow."""
    for part, whole in _divisions(config.actor, spec):
        _divides(part, whole)
    if config.actor.expert_parallel > 1 and not spec.num_experts:
        size = config.actor.expert_parallel
        raise UserError(f"actor.expert_parallel is {size}, but the model has no experts; set it to 1")
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if command != "sft" and longest > spec.max_position_embeddings:
        raise UserError(
            f"data.max_prompt_length plus rollout.max_response_length is {longest} tokens, more than the model's "
            f"max_position_embeddings {spec.max_position_embeddings}; lower {_longer(config)} by "
            f"{longest - spec.max_position_embeddings}"
        )


def _longer(config: RunConfig) -> str:
    """The longer of the two lengths that share the context: the one that can be lowered."""
    prompt_is_longer = config.data.max_prompt_length > config.rollout.max_response_length
    return "data.max_prompt_length" if prompt_is_longer else "rollout.max_response_length"


def _divisions(actor: ActorConfig, spec: ModelSpec) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    tensor = ("actor.tensor_parallel", actor.tensor_parallel)
    yield tensor, ("the model's num_attention_heads", spec.num_attention_heads)
    yield tensor, ("the model's num_key_value_heads", spec.num_key_value_heads)
    yield tensor, ("the model's hidden_size", spec.hidden_size)
    if not spec.moe_layers or not all(spec.moe_layers):
        yield tensor, ("the model's intermediate_size", spec.intermediate_size)
    if spec.num_experts:
        expert_tensor = ("actor.expert_tensor_parallel", actor.expert_tensor)
        yield ("actor.expert_parallel", actor.expert_parallel), ("the model's num_experts", spec.num_experts)
        yield expert_tensor, ("the model's moe_intermediate_size", spec.moe_intermediate_size)
    if actor.virtual_pipeline == 1:
        yield ("actor.pipeline_parallel", actor.pipeline_parallel), ("the model's num_hidden_layers", spec.num_layers)
    else:
        chunks = actor.pipeline_parallel * actor.virtual_pipeline
        stages = ("actor.pipeline_parallel times actor.virtual_pipeline", chunks)
        yield stages, ("the model's num_hidden_layers", spec.num_layers)


def check_known_faults(actor: ActorConfig, spec: ModelSpec, megatron_core: tuple[int, ...] | None) -> None:
    """Refuse layouts that this megatron-core is known to compute wrongly without saying so."""
    # with expert_parallel 1 it reduces the experts' gradients over the dense data-parallel group
    broken = actor.expert_parallel == 1 and actor.expert_tensor != actor.tensor_parallel
    if spec.num_experts and broken and megatron_core is not None and megatron_core < (0, 19):
        version = ".".join(str(n) for n in megatron_core)
        raise UserError(
            f"actor.expert_tensor_parallel is {actor.expert_tensor} with actor.tensor_parallel {actor.tensor_parallel} "
            f"and actor.expert_parallel 1, for which megatron-core {version} computes wrong expert gradients; set "
            f"actor.expert_tensor_parallel={actor.tensor_parallel} or actor.expert_parallel above 1"
        )


# Work


def _check_sft(config: RunConfig) -> None:
    if config.sft.demonstrations is None:
        raise UserError("sft.demonstrations is unset; set sft.demonstrations=DEMONSTRATIONS.jsonl")
    if config.sft.output is None:
        raise UserError("sft.output is unset; set sft.output to the directory that the trained model is written to")
    _divides(("actor.data_parallel", config.actor.data_parallel), ("sft.batch_size", config.sft.batch_size))
    _check_optimizer(config, "sft.lr", config.sft.lr)


def _check_rollout(config: RunConfig) -> None:
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.engine is vllm, which is not installed; install it or set rollout.engine=transformers")
    if config.rollout.top_k == 0:
        raise UserError("rollout.top_k is 0, which leaves no token to sample; set rollout.top_k=-1 for no cut-off")


def _check_sampling(config: RunConfig) -> None:
    scored, rollout = config.loss.logprob_temperature, config.rollout
    if scored is not None and scored != rollout.temperature:
        raise UserError(
            f"loss.logprob_temperature is {scored:g}, but tokens are sampled at rollout.temperature "
            f"{rollout.temperature:g}; set both to the same value or leave loss.logprob_temperature out"
        )


def _check_rewards(rewards: RewardConfig) -> None:
    if rewards.name == "custom" and rewards.function is None:
        raise UserError(
            "rewards.name is custom, but rewards.function is unset; set rewards.function=package.module:function"
        )
    if rewards.name != "custom" and rewards.function is not None:
        raise UserError(
            f"rewards.function is {rewards.function}, but rewards.name is {rewards.name}, which does not call it; set "
            "rewards.name=custom or leave rewards.function out"
        )
    if rewards.guard and rewards.name != "math_verify":
        raise UserError(
            f"rewards.guard is true, but it guards math_verify and rewards.name is {rewards.name}; leave it out or set "
            "rewards.name=math_verify"
        )


def check_schedule(config: RunConfig) -> None:
    """Refuse mini-batches, refreshes, staleness or micro-batches that do not go together."""
    trainer, rollout = config.trainer, config.rollout
    _divides(("actor.data_parallel", config.actor.data_parallel), ("trainer.mini_batch_size", trainer.mini_batch_size))
    interval, reuse = config.refresh_interval, trainer.rollout_reuse
    if interval % reuse:
        raise UserError(
            f"rollout.refresh_interval is {interval}, which is no multiple of trainer.rollout_reuse {reuse}; "
            f"set it to {-(-interval // reuse) * reuse}"
        )
    if config.max_staleness < interval - 1:
        raise UserError(
            f"rollout.max_staleness is {config.max_staleness}, but with a refresh every {interval} updates tokens get "
            f"{interval - 1} updates old; set rollout.max_staleness={interval - 1} or lower rollout.refresh_interval"
        )
    longest = config.data.max_prompt_length + rollout.max_response_length
    if longest > config.actor.micro_batch_tokens:
        raise UserError(
            f"actor.micro_batch_tokens is {config.actor.micro_batch_tokens}, too few for a prompt with its response, "
            f"up to {longest} tokens; set actor.micro_batch_tokens={longest} or more"
        )


def check_profile(config: RunConfig) -> None:
    """Refuse a profile of updates or ranks that the run does not have."""
    profile, world = config.profile, config.actor.world_size
    if profile.tool == "none" and not profile.memory:
        return
    first, last = profile.steps
    if first > last or first > config.trainer.updates:
        raise UserError(
            f"profile.steps is {list(profile.steps)}, which names no update of the {config.trainer.updates}; set it to "
            "[first, last]"
        )
    if max(profile.ranks) >= world:
        raise UserError(f"profile.ranks is {profile.ranks}, but the layout has ranks 0 to {world - 1}; choose of those")


def _check_learning(config: RunConfig) -> None:
    if config.rollout.group_size == 1 and config.advantages.normalization == "grpo":
        raise UserError(
            "rollout.group_size is 1, for which advantages.normalization grpo has no deviation to divide by; "
            "set rollout.group_size=2 or more"
        )
    if config.loss.logprob_temperature is not None and config.rollout.top_k == 1:
        raise UserError(
            "rollout.top_k is 1, under which every sampled token has probability 1 and no gradient once "
            f"loss.logprob_temperature is set (here {config.loss.logprob_temperature:g}); set rollout.top_k above 1 or "
            "leave loss.logprob_temperature out"
        )
    start, cap = config.rewards.overlong_start, config.rollout.max_response_length
    if start is not None and start >= cap:
        raise UserError(
            f"rewards.overlong_start is {start}, not below rollout.max_response_length {cap}, so the penalty never "
            "applies; lower it or leave it unset"
        )
    if config.trainer.eval_interval is not None:
        _check_evaluation(config, config.trainer.eval_interval)
    _check_optimizer(config, "optimizer.lr", config.optimizer.lr)


def _check_replay(config: RunConfig) -> None:
    replay = config.replay
    if replay.ratio == 0:
        return
    for key, path in (("replay.experts", replay.experts), ("replay.buffer", replay.buffer)):
        if path is not None:
            _check_file(key, path)
    if replay.static and replay.experts is None and replay.buffer is None:
        raise UserError(
            "replay.static is true, but there is nothing that the buffer starts with; set "
            "replay.experts=TRAJECTORIES.jsonl or replay.buffer, or replay.static=false"
        )
    if replay.experts is not None and replay.buffer is not None:
        raise UserError("replay.experts and replay.buffer both fill the buffer at the start; leave one of them out")
    if config.rollout.max_response_length == 1:
        raise UserError("rollout.max_response_length is 1, so that no prefix leaves room; set it to 2 or more")


def _check_allocation(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.allocation == "fixed":
        return
    low, high = rollout.allocation_range
    if not low <= rollout.group_size <= high:
        raise UserError(
            f"rollout.group_size is {rollout.group_size}, outside rollout.allocation_range {[low, high]}, so the "
            "budget cannot be shared out; set group_size to a value in the range"
        )
    if low == 1 and config.advantages.normalization == "grpo":
        raise UserError(
            "rollout.allocation_range starts at 1, for which advantages.normalization grpo has no deviation to divide "
            "by; start it at 2 or more"
        )
    if config.replay.ratio > 0 or config.advantages.dynamic_sampling.enabled:
        raise UserError(
            "rollout.allocation is adaptive, which is a control without replay or dynamic sampling; set replay.ratio=0 "
            "and advantages.dynamic_sampling.enabled=false, or rollout.allocation=fixed"
        )


def _check_optimizer(config: RunConfig, key: str, lr: float) -> None:
    """`lr` is the learning rate that `key` sets for this command."""
    optimizer = config.optimizer
    if optimizer.min_lr > lr:
        raise UserError(f"optimizer.min_lr is {optimizer.min_lr}, above {key} {lr}; lower it")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise UserError(f"optimizer.betas is {list(optimizer.betas)}; set both values to at least 0 and below 1")


def _check_evaluation(config: RunConfig, interval: int) -> None:
    if not config.held_out_sets:
        raise UserError(
            f"trainer.eval_interval is {interval}, but data.validation is unset; set data.validation or leave "
            "trainer.eval_interval out"
        )
    if interval % config.refresh_interval:  # an evaluation pushes weights, which would change what training samples
        raise UserError(
            f"trainer.eval_interval is {interval}, no multiple of rollout.refresh_interval {config.refresh_interval}; "
            f"set it to {-(-interval // config.refresh_interval) * config.refresh_interval}"
        )
