"""Cross-field checks: each impossible run is one sentence with key, value and remedy; the published layouts pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rlvr.config.checks import (
    check_config,
    check_known_faults,
    check_layout,
    check_model,
    config_warnings,
    installed_version,
)
from megatron_rlvr.config.load import build_config
from megatron_rlvr.config.run_dir import RunFiles, check_run_dir, check_sft_output, for_command, open_run_dir
from megatron_rlvr.config.tree import ActorConfig, RunConfig
from megatron_rlvr.types import LogprobDistribution, ModelSpec, UserError

MOE = ModelSpec(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=97,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    qk_norm=True,
    attention_bias=False,
    eos_token_ids=(1,),
    moe_layers=(True,) * 4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
DENSE = replace(MOE, family="qwen3", moe_layers=(), num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0)


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A run whose files all exist, as nested dicts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x")
    for name in ("train", "validation", "demonstrations"):
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    return {
        "run_dir": str(tmp_path / "runs" / "a"),
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "validation": str(tmp_path / "validation.jsonl")},
        "rollout": {"engine": "transformers", "max_response_length": 1024},
        "sft": {"demonstrations": str(tmp_path / "demonstrations.jsonl"), "output": str(tmp_path / "warm")},
    }


def _with(tree: dict[str, Any], changes: dict[str, Any]) -> RunConfig:
    copy = json.loads(json.dumps(tree))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (copy.setdefault(section, {}) if section else copy)[name] = value
    return build_config(copy)


def _refusal(config: RunConfig, spec: ModelSpec | None = MOE, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_config(config, spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_run_passes_every_command(tree: dict[str, Any]) -> None:
    config = _with(tree, {})
    for command in ("train", "eval", "sft"):
        check_config(config, MOE, command=command)
        check_config(config, DENSE, command=command)


LAYOUTS = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 2, "virtual_pipeline": 2},
    {"expert_parallel": 2, "data_parallel": 2},
    {"data_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2},
    {"tensor_parallel": 2, "expert_parallel": 2},
    {"tensor_parallel": 2, "expert_parallel": 4, "data_parallel": 4, "pipeline_parallel": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_possible_layouts_pass(tree: dict[str, Any], layout: dict[str, int]) -> None:
    check_config(_with(tree, {"actor": layout}), MOE, megatron_core=(0, 16, 1))


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ({"tensor_parallel": 3}, ["actor.tensor_parallel is 3", "num_attention_heads 4", "such as 2"]),
        ({"tensor_parallel": 4}, ["actor.tensor_parallel is 4", "num_key_value_heads 2", "such as 2"]),
        ({"pipeline_parallel": 3}, ["actor.pipeline_parallel is 3", "num_hidden_layers 4", "such as 2"]),
        (
            {"virtual_pipeline": 2},
            ["actor.virtual_pipeline is 2", "actor.pipeline_parallel 1", "actor.virtual_pipeline=1"],
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 3},
            ["actor.pipeline_parallel times actor.virtual_pipeline is 6", "num_hidden_layers 4"],
        ),
        ({"expert_parallel": 2}, ["2 x 1", "1 x 1", "actor.data_parallel to a multiple of 2"]),
        (
            {"expert_parallel": 3, "data_parallel": 3},
            ["actor.data_parallel is 3", "trainer.mini_batch_size 32", "such as 2"],
        ),
        ({"expert_parallel": 16, "data_parallel": 16}, ["actor.expert_parallel is 16", "num_experts 8", "such as 8"]),
        (
            {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2, "data_parallel": 1},
            ["2 x 2", "2 x 1", "multiple of 2"],
        ),
    ],
    ids=str,
)
def test_impossible_layouts_are_refused(tree: dict[str, Any], layout: dict[str, int], parts: list[str]) -> None:
    sentence = _refusal(_with(tree, {"actor": layout}))
    assert all(part in sentence for part in parts), sentence


def test_a_layout_is_allowed_exactly_when_megatron_can_form_its_groups() -> None:
    for tp in (1, 2, 4):
        for ep in (1, 2, 3, 4):
            for etp in (1, 2, 4):
                for dp in (1, 2, 3, 4):
                    actor = ActorConfig(
                        tensor_parallel=tp,
                        expert_parallel=ep,
                        expert_tensor_parallel=etp,
                        data_parallel=dp,
                        pipeline_parallel=2,
                    )
                    possible = actor.world_size % (etp * ep * 2) == 0  # parallel_state.initialize_model_parallel
                    if possible:
                        check_layout(actor)
                    else:
                        with pytest.raises(UserError):
                            check_layout(actor)


def test_experts_of_a_dense_model_cannot_be_split(tree: dict[str, Any]) -> None:
    config = _with(tree, {"actor": {"expert_parallel": 2, "data_parallel": 2}})
    assert "the model has no experts; set it to 1" in _refusal(config, DENSE)


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        (ActorConfig(tensor_parallel=2, expert_tensor_parallel=1), "expert_tensor_parallel=2"),
        (ActorConfig(data_parallel=2, expert_tensor_parallel=2), "expert_tensor_parallel=1"),
        (ActorConfig(context_parallel=2, expert_tensor_parallel=2), "expert_tensor_parallel=1"),
    ],
)
def test_the_silent_expert_gradient_fault_is_refused_below_0_19_only(bad: ActorConfig, remedy: str) -> None:
    with pytest.raises(UserError, match=rf"megatron-core 0\.16\.1 .*{remedy} or actor\.expert_parallel above 1"):
        check_known_faults(bad, MOE, (0, 16, 1))
    check_known_faults(bad, MOE, (0, 19, 2))
    check_known_faults(bad, DENSE, (0, 16, 1))
    check_known_faults(ActorConfig(tensor_parallel=2), MOE, (0, 16, 1))
    check_known_faults(ActorConfig(tensor_parallel=2, expert_parallel=2), MOE, (0, 16, 1))
    both = ActorConfig(tensor_parallel=2, data_parallel=2, expert_parallel=2, expert_tensor_parallel=2)
    check_known_faults(both, MOE, (0, 16, 1))


def test_installed_versions_are_read_without_an_import() -> None:
    import pydantic

    assert installed_version("pydantic") == tuple(int(n) for n in pydantic.VERSION.split(".")[:3])
    assert installed_version("no-such-distribution-at-all") is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"actor.data_parallel": 5}, ["actor.data_parallel is 5", "trainer.mini_batch_size 32", "such as 4"]),
        (
            {"trainer.rollout_reuse": 4, "rollout.refresh_interval": 6},
            ["rollout.refresh_interval is 6", "trainer.rollout_reuse 4", "set it to 8"],
        ),
        (
            {"trainer.rollout_reuse": 4, "rollout.max_staleness": 2},
            ["rollout.max_staleness is 2", "every 4 updates", "rollout.max_staleness=3"],
        ),
        ({"rollout.group_size": 1}, ["rollout.group_size is 1", "grpo", "rollout.group_size=2"]),
        (
            {"rollout.max_response_length": 1500},
            ["is 2524 tokens", "max_position_embeddings 2048", "lower rollout.max_response_length by 476"],
        ),
        ({"data.max_prompt_length": 2000}, ["is 3024 tokens", "lower data.max_prompt_length by 976"]),
        ({"actor.micro_batch_tokens": 2000}, ["actor.micro_batch_tokens is 2000", "actor.micro_batch_tokens=2048"]),
        ({"rewards.overlong_start": 1024}, ["rewards.overlong_start is 1024", "max_response_length 1024"]),
        (
            {"trainer.eval_interval": 5, "data.validation": None},
            ["trainer.eval_interval is 5", "data.validation is unset"],
        ),
        ({"rollout.top_k": 0}, ["rollout.top_k is 0", "rollout.top_k=-1"]),
        (
            {"loss.logprob_temperature": 0.6},
            ["loss.logprob_temperature is 0.6", "rollout.temperature 1;", "leave loss.logprob_temperature out"],
        ),
        (
            {"loss.logprob_temperature": 1.0, "rollout.top_k": 1},
            ["rollout.top_k is 1,", "no gradient", "rollout.top_k above 1"],
        ),
        ({"optimizer.min_lr": 1.0}, ["optimizer.min_lr is 1.0", "optimizer.lr 1e-06"]),
        ({"optimizer.betas": [0.9, 1.0]}, ["optimizer.betas is [0.9, 1.0]"]),
    ],
    ids=str,
)
def test_contradictions_are_refused(tree: dict[str, Any], changes: dict[str, Any], parts: list[str]) -> None:
    sentence = _refusal(_with(tree, changes))
    assert all(part in sentence for part in parts), sentence


def test_allowed_neighbours_of_refused_settings(tree: dict[str, Any]) -> None:
    for changes in (
        {"trainer.rollout_reuse": 4, "rollout.refresh_interval": 8},
        {"trainer.rollout_reuse": 4, "rollout.max_staleness": 3},
        {"rollout.group_size": 1, "advantages.normalization": "center"},
        {"actor.micro_batch_tokens": 2048},
        {"rewards.overlong_start": 1023},
        {"loss.logprob_temperature": 0.6, "rollout.temperature": 0.6, "rollout.top_p": 0.8, "rollout.top_k": 5},
        {"rollout.top_k": 1},
    ):
        check_config(_with(tree, changes), MOE)


def test_log_probs_belong_to_what_samples_only_where_the_loss_asks(tree: dict[str, Any]) -> None:
    sampling = {"rollout.temperature": 0.6, "rollout.top_p": 0.8, "rollout.top_k": 5}
    assert _with(tree, sampling).logprob_distribution == LogprobDistribution(1.0, 1.0, -1)
    scored = _with(tree, sampling | {"loss.logprob_temperature": 0.6})
    assert scored.logprob_distribution == LogprobDistribution(0.6, 0.8, 5)
    mixed = _with(tree, sampling | {"loss.logprob_temperature": 0.7})
    assert "rollout.temperature 0.6" in _refusal(mixed) and "rollout.temperature 0.6" in _refusal(mixed, command="eval")
    check_config(_with(tree, {"loss.logprob_temperature": 1.0, "rollout.top_k": 1}), MOE, command="eval")


@pytest.mark.parametrize(
    ("rollout", "loss", "warned"),
    [
        ({}, {}, False),
        ({"temperature": 0.6}, {}, True),
        ({"top_p": 0.7}, {}, True),
        ({"top_k": 20}, {}, True),
        ({"temperature": 0.6, "top_p": 0.7}, {"logprob_temperature": 0.6}, False),
    ],
)
def test_sampling_from_another_distribution_than_is_scored_is_warned_about(
    tree: dict[str, Any], rollout: dict[str, Any], loss: dict[str, Any], warned: bool
) -> None:
    tree["rollout"] = {**tree.get("rollout", {}), **rollout}
    tree["loss"] = {**tree.get("loss", {}), **loss}
    warnings = config_warnings(RunConfig(**tree))
    assert [f"set loss.logprob_temperature={rollout.get('temperature', 1):g}" in text for text in warnings] == (
        [True] if warned else []
    )


def test_missing_files_are_named(tree: dict[str, Any], tmp_path: Path) -> None:
    assert "is not a directory" in _refusal(_with(tree, {"model.path": str(tmp_path / "none")}))
    assert "train is " in _refusal(_with(tree, {"data.train": str(tmp_path / "none")}))
    assert "not a file" in _refusal(_with(tree, {"data.validation": str(tmp_path / "none")}))
    (tmp_path / "train.jsonl").write_text("")
    assert "is empty" in _refusal(_with(tree, {}))
    assert "demonstrations" in _refusal(_with(tree, {"sft.demonstrations": str(tmp_path / "none")}), command="sft")
    assert "sft.demonstrations is unset" in _refusal(_with(tree, {"sft.demonstrations": None}), command="sft")
    assert "sft.output is unset" in _refusal(_with(tree, {"sft.output": None}), command="sft")
    assert "nothing to evaluate" in _refusal(_with(tree, {"data.validation": None}), command="eval")


def test_nothing_is_chosen_by_a_test_set(tree: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes((tmp_path / "train.jsonl").read_bytes())
    test, more = {"path": str(other), "role": "test"}, {"path": str(other)}
    held_out = {"data.held_out": {"aime": test}}
    for changes, messages in (
        ({**held_out, "trainer.best_by": "aime"}, ["best_by is aime, which is only for testing", "(validation)"]),
        ({**held_out, "trainer.best_by": "amie"}, ["trainer.best_by is amie, which is no held-out set"]),
        ({**held_out, "data.validation": None, "trainer.save_best": True}, ["nothing says which model is best"]),
        (
            {"data.held_out": {"b": more}, "trainer.save_best": True},
            ["nothing says which model is best", "trainer.best_by to one of validation, b"],
        ),
        ({"data.held_out": {"a": test, "b": more}}, ["b (validation) and a (test) are the same"]),
        ({"data.held_out": {"validation": test}}, ["also the name of data.validation"]),
        ({"data.held_out": {"a/b": test}}, ["a set 'a/b'; use letters"]),
        ({"data.held_out": {"a": {"path": "none.jsonl"}}}, ["data.held_out.a.path is", "not a file"]),
    ):
        refusal = _refusal(_with(tree, changes))
        assert all(message in refusal for message in messages), refusal
    config = _with(tree, {**held_out, "data.validation": None, "trainer.eval_interval": 4})
    assert config.best_by is None and config.held_out_sets["aime"].samples == config.trainer.eval_samples
    check_config(config)  # reported, and nothing is chosen
    config = _with(tree, {**held_out, "trainer.eval_samples": 7})
    assert config.best_by == "validation" and list(config.held_out_sets) == ["validation", "aime"]


def test_an_incomplete_checkpoint_names_the_missing_file(tree: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "model.safetensors").unlink()
    assert "lacks model.safetensors" in _refusal(_with(tree, {}))
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (model / "one.safetensors").write_bytes(b"x")
    assert "lacks two.safetensors" in _refusal(_with(tree, {}))
    index.write_text('{"weight_map": {')
    assert "not a safetensors index" in _refusal(_with(tree, {}))
    (model / "config.json").unlink()
    assert "no config.json" in _refusal(_with(tree, {}))


def test_lengths_of_a_supervised_run_are_not_those_of_rollouts(tree: dict[str, Any]) -> None:
    assert "above sft.lr 0.003" in _refusal(_with(tree, {"optimizer.min_lr": 1.0}), command="sft")
    config = _with(tree, {"rollout.max_response_length": 4000})
    check_model(config, MOE, "sft")
    with pytest.raises(UserError):
        check_model(config, MOE, "train")


# Rewards


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"name": "custom"}, "rewards.function is unset"),
        ({"function": "package.module:f"}, "rewards.name is strict_box, which does not call it"),
        ({"name": "normalized_box", "guard": True}, "rewards.guard is true, but it guards math_verify"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(tree: dict[str, Any], rewards: dict, words: str) -> None:
    assert words in _refusal(_with(tree, {"rewards": rewards}))
    assert words in _refusal(_with(tree, {"rewards": rewards}), command="eval")
    check_config(_with(tree, {"rewards": rewards}), MOE, command="sft")


def test_verifiers_with_their_options_pass(tree: dict[str, Any]) -> None:
    check_config(_with(tree, {"rewards": {"name": "custom", "function": "package.module:f"}}), MOE)
    check_config(_with(tree, {"rewards": {"name": "math_verify", "guard": True, "timeout": 5}}), MOE)


def test_folders_and_sets_on_the_hub_are_left_to_their_reader(tree: dict[str, Any], tmp_path: Path) -> None:
    config = _with(tree, {"data.train": "hub:dapo_math_17k", "data.validation": str(tmp_path)})
    check_config(config, MOE)
    assert str(config.data.train) == "hub:dapo_math_17k"


# The run directory


def test_each_command_has_its_own_directory(tree: dict[str, Any]) -> None:
    config = _with(tree, {})
    assert for_command(config, "train").run_dir == config.run_dir
    assert for_command(config, "sft").run_dir == config.run_dir / "sft"


def test_an_earlier_run_is_refused_unless_it_may_be_replaced(tree: dict[str, Any]) -> None:
    config = _with(tree, {})
    config.run_dir.mkdir(parents=True)
    check_run_dir(config, overwrite=False)
    RunFiles(config.run_dir).metrics.write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run; name another or add --overwrite"):
        check_run_dir(config, overwrite=False)
    check_run_dir(config, overwrite=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_killed_launcher_set_aside_goes_once_another_run_got_under_way(tmp_path: Path, in_place: bool) -> None:
    left = tmp_path / ".replaced-1" / "metrics.jsonl"
    left.parent.mkdir()
    left.write_text("{}\n")
    RunFiles(tmp_path).metrics.write_text("{}\n")
    with open_run_dir(tmp_path, in_place=in_place):
        pass
    assert left.exists() and RunFiles(tmp_path).metrics.exists()
    with open_run_dir(tmp_path, in_place=in_place) as directory:
        directory.keep()
    assert not list(tmp_path.glob(".replaced-*")) and RunFiles(tmp_path).metrics.exists() == in_place


def test_a_run_dir_that_cannot_be_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        check_run_dir(_with(tree, {"run_dir": str(tmp_path / "file")}), overwrite=True)
    with pytest.raises(UserError, match="not a writable directory"):
        check_run_dir(_with(tree, {"run_dir": str(tmp_path / "file" / "below")}), overwrite=True)
    with pytest.raises(UserError, match=r"cannot be made .*; name another"), open_run_dir(Path("/proc/run")):
        raise AssertionError


def test_a_run_does_not_replace_the_model_that_it_starts_from(tree: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path .* is part of the run"):
        check_run_dir(_with(tree, {"run_dir": str(tmp_path)}), overwrite=True)


def test_a_warm_up_replaces_nothing_but_an_earlier_model_that_it_may(tree: dict[str, Any], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for output, why in (
        (mine, "holds files that are no model"),
        (mine / "notes.txt", "not a writable directory"),
        (tmp_path / "model", "holds the run's model.path"),
        (tmp_path, "holds the run's model.path"),
    ):
        with pytest.raises(UserError, match=why):
            check_sft_output(_with(tree, {"sft.output": str(output)}), overwrite=True)
    (mine / "config.json").write_text("{}")
    config = _with(tree, {"sft.output": str(mine)})
    with pytest.raises(UserError, match="already holds a model; name another or add --overwrite"):
        check_sft_output(config, overwrite=False)
    check_sft_output(config, overwrite=True)
    check_sft_output(_with(tree, {}), overwrite=False)


def test_a_run_that_did_not_get_under_way_leaves_nothing(tmp_path: Path) -> None:
    with open_run_dir(tmp_path / "a" / "b") as directory:
        directory.files.metrics.write_text("")
        directory.files.logs.mkdir()
    assert not (tmp_path / "a").exists()


def test_a_run_that_did_not_get_under_way_restores_what_it_replaced(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.rollouts.mkdir(parents=True)
    (files.rollouts / "step_000001.jsonl").write_text("old")
    files.metrics.write_text("old")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RuntimeError), open_run_dir(files.root) as directory:
        assert not files.metrics.exists() and (tmp_path / "run" / "notes.txt").exists()
        directory.files.metrics.write_text("new")
        raise RuntimeError
    assert files.metrics.read_text() == "old" and (files.rollouts / "step_000001.jsonl").read_text() == "old"
    assert sorted(p.name for p in files.root.iterdir()) == ["metrics.jsonl", "notes.txt", "rollouts"]


def test_a_run_that_got_under_way_replaces_the_earlier_one(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.rollouts.mkdir(parents=True)
    files.metrics.write_text("old")
    (files.root / "notes.txt").write_text("mine")
    with open_run_dir(files.root) as directory:
        files.metrics.write_text("new")
        directory.keep()
    assert files.metrics.read_text() == "new"
    assert sorted(p.name for p in files.root.iterdir()) == ["metrics.jsonl", "notes.txt"]
