"""`python -m megatron_rlvr convert`: what is refused, and one conversion there and back through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rlvr.checkpoint.manifest import Manifest, StoredTensor, write_manifest
from megatron_rlvr.cli import main
from tests.hf.checkpoints import BASE, MOE, random_tensors, write_directory

CONFIG = BASE | MOE | {"num_hidden_layers": 2}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", CONFIG, random_tensors(CONFIG), shards=2)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one sentence with which the command ends."""
    assert main(["convert", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and not captured.out
    return captured.err


def spoil_index(model: Path) -> None:
    file = model / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors"
    file.write_text(json.dumps(index))


def mix_dtypes(model: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    write_directory(model, CONFIG, tensors, shards=2)


FAULTS = {
    "missing": (lambda m: (m / "model-00002-of-00002.safetensors").unlink(), ["model-00002-of-00002.safetensors"]),
    "truncated": (
        lambda m: (m / "model-00001-of-00002.safetensors").write_bytes(
            (m / "model-00001-of-00002.safetensors").read_bytes()[:-10]
        ),
        ["model-00001-of-00002.safetensors", "damaged"],
    ),
    "index": (spoil_index, ["model-00009-of-00009.safetensors", "model.norm.weight"]),
    "dtype": (mix_dtypes, ["model.norm.weight is float32"]),
    "family": (
        lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"})),
        ["model_type 'gpt2'"],
    ),
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json does not exist"]),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_broken_source_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    spoil, parts = FAULTS[fault]
    spoil(model)
    message = refused(capsys, "hf-to-megatron", model, tmp_path / "out")
    assert all(part in message for part in parts), message
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["hf-to-megatron", "nowhere", "out"], ["nowhere"]),
        (["megatron-to-hf", "model", "out"], ["model", "manifest.json"]),
        (["hf-to-megatron", "model", "model/inside"], ["model/inside", "stays as it is"]),
        (["hf-to-megatron", "model", "full"], ["full", "not empty"]),
        (["hf-to-megatron", "model", "out", "actor.tensor_parallel=3"], ["actor.tensor_parallel is 3"]),
        (["hf-to-megatron", "model", "out", "actor.tensor_paralel=2"], ["actor.tensor_paralel", "tensor_parallel"]),
        (["hf-to-megatron", "model", "out", "trainer.updates=2"], ["trainer.updates plays no part"]),
        (["hf-to-megatron", "model", "out", "model.path=full"], ["model.path plays no part"]),
        (["hf-to-megatron", "model", "out", "actor.expert_parallel=2"], ["actor.data_parallel"]),
        (["megatron-to-hf", "model", "out", "--max-shard-gb", "0"], ["--max-shard-gb is 0"]),
        (["frobnicate", "model", "out"], ["frobnicate"]),
    ],
)
def test_wrong_arguments_are_refused(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    message = refused(capsys, *words)
    assert all(part in message for part in parts), message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "model"]


def test_a_checkpoint_of_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = -(-CONFIG["vocab_size"] // 2) * 2  # as tensor parallelism 2 pads it
    shape = (rows + 2, CONFIG["hidden_size"])
    tensors = {"embedding.word_embeddings.weight": StoredTensor(shape, "bfloat16", 2 * shape[0] * shape[1], 2)}
    layout = {"tensor_parallel": 2, "dtype": "bf16"}
    write_manifest(tmp_path, Manifest("model", 0, layout, {}, {}, tensors))
    message = refused(capsys, "megatron-to-hf", tmp_path, tmp_path.parent / "out", f"model.path={model}")
    assert f"embedding.word_embeddings.weight {list(shape)}" in message and f"[{rows}, {shape[1]}]" in message


@pytest.mark.nightly
def test_there_and_back_through_the_command_line(model: Path, tmp_path: Path) -> None:
    """tests/hf/test_round_trip.py holds the same conversions, in more layouts, without the command line."""
    there = ["hf-to-megatron", model, tmp_path / "checkpoint", "actor.expert_parallel=2", "actor.data_parallel=2"]
    assert main(["convert", *map(str, there), "logging.progress=false"]) == 0
    back = ["megatron-to-hf", tmp_path / "checkpoint", tmp_path / "back", "--overwrite"]
    assert main(["convert", *map(str, back)]) == 0
    names = sorted(file.name for file in model.iterdir())
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "checkpoint", "model"]
