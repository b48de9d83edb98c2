"""YAML and overrides in, a typed tree out; every refusal names the key, its value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.config.load import dump_config, load_config, parse_yaml, save_resolved
from megatron_rlvr.config.messages import known_keys, nearest_key
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

BASE = "run_dir: runs/a\nmodel: {path: m}\ndata: {train: t.jsonl}\n"


def _load(tmp_path: Path, text: str = BASE, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def _refusal(tmp_path: Path, text: str = BASE, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        _load(tmp_path, text, *overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_overrides_are_yaml_typed_and_the_last_one_wins(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        BASE + "optimizer: {lr: 1e-5}\n",
        "rollout.group_size=4",
        "rollout.group_size=16",
        "logging.wandb=true",
        "optimizer.betas=[0.9, 0.95]",
        "trainer.eval_interval=null",
        "advantages.dynamic_sampling.enabled=true",
        "loss.hyperparameters.lambda_pos=2",
        "loss.hyperparameters.beta_pos=1e-1",
    )
    assert config.rollout.group_size == 16
    assert config.logging.wandb is True
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.optimizer.lr == 0.00001
    assert config.trainer.eval_interval is None
    assert config.advantages.dynamic_sampling.enabled is True
    assert config.loss.hyperparameters == {"lambda_pos": 2, "beta_pos": 0.1}


def test_relative_paths_belong_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = _load(tmp_path)
    assert config.model.path == tmp_path / "elsewhere" / "m"
    monkeypatch.chdir(tmp_path)
    save_resolved(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2E+3", -2000.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("off", "off"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        (".inf", float("inf")),
        ("'1e-6'", "1e-6"),
        ("1e", "1e"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    got = parse_yaml(text, "text")
    assert got == value and type(got) is type(value)


def test_routing_replay_off_is_the_word(tmp_path: Path) -> None:
    assert _load(tmp_path, BASE + "actor:\n  routing_replay: off\n").actor.routing_replay == "off"


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text("abcdef_", min_size=1, max_size=5),
        st.one_of(
            st.integers(-10, 10**12),
            st.floats(allow_nan=False),
            st.booleans(),
            st.none(),
            st.sampled_from(
                ["1e-6", "off", "true", "~", "010", "1:30", "2024-01-01", " a", "a: b", "#", "é\n", ".inf"]
            ),
            st.text(max_size=8),
        ),
        max_size=4,
    )
)
def test_the_resolved_config_loads_to_an_equal_tree(values: dict[str, object]) -> None:
    config = RunConfig.model_validate(
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "loss": {"hyperparameters": values}}
    )
    again = RunConfig.model_validate(parse_yaml(dump_config(config), "resolved"))
    assert again == config
    assert {k: type(v) for k, v in again.loss.hyperparameters.items()} == {k: type(v) for k, v in values.items()}


def test_saving_leaves_no_half_written_file(tmp_path: Path) -> None:
    save_resolved(_load(tmp_path), tmp_path / "resolved.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resolved.yaml", "run.yaml"]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("rolout", "rollout"),
        ("rollout.grop_size", "rollout.group_size"),
        ("actor.group_size", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("advantages.dynamic_sampling.max_attempt", "advantages.dynamic_sampling.max_attempts"),
        ("actor.tensor_paralel", "actor.tensor_parallel"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, key: str, near: str) -> None:
    sentence = _refusal(tmp_path, BASE, f"{key}=1")
    assert sentence.startswith(f"unknown config key {key};") and sentence.endswith(f"is {near}")


def test_an_unknown_key_like_nothing_lists_what_its_section_knows(tmp_path: Path) -> None:
    assert "loss.name, loss.aggregation, loss.hyperparameters" in _refusal(tmp_path, BASE, "loss.zzz=1")
    assert "run_dir" in _refusal(tmp_path, BASE, "zzz=1")


def test_every_known_key_is_its_own_nearest() -> None:
    assert all(nearest_key(key, RunConfig) == key for key in known_keys(RunConfig))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.group_size=0", ["rollout.group_size is 0", "greater than 0", "responses per prompt"]),
        ("rollout.group_size='8'", ["rollout.group_size is '8'", "valid integer"]),
        ("rollout.group_size=true", ["rollout.group_size is True", "valid integer"]),
        ("rollout.engine=vlm", ["rollout.engine is 'vlm'", "'vllm' or 'transformers'"]),
        ("optimizer.lr=.nan", ["optimizer.lr is", "finite"]),
        ("optimizer.lr=-1e-6", ["optimizer.lr is -1e-06", "greater than 0"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas is [0.9]", "too few"]),
        ("loss.variance_horizons=[0]", ["loss.variance_horizons.0 is 0; it must be greater than 0 or be 'full' (hor"]),
        ("seed=2147483648", ["seed is 2147483648", "less than 2147483648"]),
        ("logging.wandb=1", ["logging.wandb is 1", "valid boolean"]),
        ("rollout=3", ["rollout is 3", "a mapping with engine, precision"]),
        ("model.path=", ["model.path is None", "Hugging Face directory"]),
        ("rollout.group_size.x=3", ["rollout.group_size is {'x': 3}", "valid integer"]),
        ("run_dir.x=3", ["override run_dir.x", "run_dir, which is 'runs/a'", "set run_dir itself"]),
        ("rollout.group_size", ["'rollout.group_size'", "section.key=value"]),
        ("rollout..x=1", ["'rollout..x=1'", "section.key=value"]),
        ("rollout.group_size=[", ["'rollout.group_size=['", "not valid YAML"]),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(tmp_path: Path, override: str, parts: list[str]) -> None:
    sentence = _refusal(tmp_path, BASE, override)
    assert all(part in sentence for part in parts), sentence


def test_missing_keys_are_named_with_the_way_to_set_them(tmp_path: Path) -> None:
    sentence = _refusal(tmp_path, "run_dir: r\ndata: {train: t}\n")
    assert sentence.startswith("config key model.path") and "model.path=..." in sentence
    assert "and 2 more" in _refusal(tmp_path, "")


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    sentence = _refusal(tmp_path, BASE + "data:\n  train: u\n")
    assert "data is given twice, on lines 3 and 4" in sentence
    assert "path is given twice" in _refusal(tmp_path, "model: {path: a, path: b}")


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path)
    assert "holds a list" in _refusal(tmp_path, "- a\n")
    assert "line 2 is not valid YAML" in _refusal(tmp_path, "a: [\n")
    assert "not valid YAML" in _refusal(tmp_path, "run_dir: !!python/object/apply:os.system [ls]\n")
    assert "key 1 is not text" in _refusal(tmp_path, BASE + "1: 2\n")
