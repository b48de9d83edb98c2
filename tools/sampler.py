"""A run's model as a sampler for the tools: its prompts, its engine, its verifier, in one process without Megatron."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.controller.controller import mix_seed
from megatron_rlvr.data import load_problems, load_tokenizer, tokenize_problems
from megatron_rlvr.evaluation.digests import file_digest, model_digest
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.rewards import Scorer
from megatron_rlvr.rollout import Engine, SamplingSettings, build_engine, roll_out, sampling_settings
from megatron_rlvr.types import Group, Prompt, UserError

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Sampler:
    """Scored responses from an engine; `sampling.seed` is replaced in every call."""

    engine: Engine
    decode: Decode
    scorer: Scorer
    sampling: SamplingSettings
    seed: int

    def sample(self, prompts: Sequence[Prompt], n: int, stage: int, index: int) -> list[Group]:
        """`n` responses to each prompt, scored. They follow from the seed, `stage` and `index`, not from earlier calls.

        Raises what Engine.generate raises.
        """
        sampling = replace(self.sampling, seed=mix_seed(self.seed, stage, index))
        groups = roll_out(self.engine, prompts, n, sampling, self.decode)
        self.scorer.score(groups)
        return groups


def read_prompts(config: RunConfig) -> tuple[list[Prompt], Decode]:
    """The prompts of data.train as a run makes them, and the tokenizer's way back to text. Raises UserError."""
    data = config.data
    problems = load_problems(problem_file(config), data.prompt_key, data.answer_key)
    tokenizer = load_tokenizer(config.model.path)
    prompts = tokenize_problems(problems, tokenizer, **data.prompt_options)
    return prompts, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def problem_file(config: RunConfig) -> Path:
    """data.train. Raises UserError where it is unset."""
    if config.data.train is None:
        raise UserError("data.train is unset, so there are no problems to sample; set data.train=PROBLEMS.jsonl")
    return config.data.train


@contextlib.contextmanager
def open_sampler(config: RunConfig, decode: Decode) -> Iterator[Sampler]:
    """The engine of the rollout section on this process's device. Raises UserError where it refuses to start."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    engine = build_engine(config, read_model_spec(config.model.path), device)
    try:
        with Scorer(config.rewards.name, **config.rewards.verifier_options) as scorer:
            yield Sampler(engine, decode, scorer, sampling_settings(config, 0), config.seed)
    finally:
        engine.close()


def responses_per_call(config: RunConfig, asked: int | None) -> int:
    """Responses that one engine call samples: enough that a few long ones at its end do not leave the engine idle."""
    return 4 * config.rollout.max_num_seqs if asked is None else asked


def identity(config: RunConfig) -> dict[str, Any]:
    """Everything in a config that samples depend on, the contents of model and problems included, under its own name.

    A file of more than 8 MiB is known by its size and its first, middle and last MiB: training moves all of a tensor.
    """
    data, rollout = config.data, config.rollout
    keys = ("prompt_key", "answer_key", "chat_template", "suffix")
    sampling = ("engine", "precision", "max_response_length", "temperature", "top_p", "top_k", "max_num_seqs")
    return {
        "model": model_digest(config.model.path),
        "problems": file_digest(problem_file(config)),
        **{f"data.{key}": getattr(data, key) for key in keys},
        **{f"rollout.{key}": getattr(rollout, key) for key in sampling},
        **{f"rewards.{key}": getattr(config.rewards, key) for key in ("name", "function", "guard")},
        "seed": config.seed,
    }


def run_tool(main: Callable[[], None]) -> int:
    """Exit code of a tool: 2 after a fault of the user's, told in one sentence."""
    try:
        main()
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if dist.is_initialized():  # vLLM makes groups and leaves them
            dist.destroy_process_group()
    return 0
