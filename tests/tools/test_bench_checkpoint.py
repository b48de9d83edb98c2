"""Loading and export of a small synthetic checkpoint, measured: bytes, memory, and that the export is exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_rlvr.hf import HFCheckpoint, read_model_spec
from megatron_rlvr.types import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench_checkpoint
import make_synthetic_checkpoint

SIZES = {"layers": 2, "hidden": 256, "experts": 32, "heads": 8, "kv-heads": 2, "head-dim": 32, "vocab": 4096}
MB = 1_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of 80 MB in files of at most 30 MB."""
    root = tmp_path_factory.mktemp("bench")
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    words = [str(root / "model"), "--size-gb", "0.08", "--max-shard-gb", "0.03", *sizes]
    make_synthetic_checkpoint.write(make_synthetic_checkpoint.parser().parse_args(words))
    return root


def test_the_synthetic_model_has_the_asked_size_and_is_sound(made: Path) -> None:
    checkpoint = HFCheckpoint(made / "model")
    checkpoint.check_complete(read_model_spec(made / "model"))
    assert abs(checkpoint.tensor_bytes() - 80 * MB) < 4 * MB and len(checkpoint.files()) == 3
    assert max(file.stat().st_size for file in checkpoint.files()) < 31 * MB
    experts = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (0, 1)]
    assert not checkpoint.read(experts[0]).equal(checkpoint.read(experts[1]))


def test_load_and_export_stay_within_their_bounds(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found_file = made / "found.json"
    assert bench_checkpoint.main([str(made / "model"), str(made / "scratch"), "--json", str(found_file)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(found_file.read_text())
    assert found["identical"] and "x the checkpoint" in printed and "| 1 |" in printed
    assert 1.0 <= found["read_ratio"] < 1.1
    for rank in found["ranks"]:
        assert rank["shard"] < 0.55 * found["bytes"] and rank["read"] == rank["shard"]
        assert rank["read"] <= rank["load"]["rchar"] < rank["read"] + MB  # the reader counts what the kernel counts
        load, export = rank["load"], rank["export"]
        assert load["peak"] - load["before"] < rank["shard"] + 20 * MB  # the shard, one tensor, and torch's buffers
        assert export["peak"] - export["before"] < 10 * MB and export["rchar"] < MB
    assert not list((made / "scratch").iterdir())


def test_a_size_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    args = make_synthetic_checkpoint.parser().parse_args([str(tmp_path / "model"), "--size-gb", "0.1"])
    with pytest.raises(UserError, match=r"--size-gb is 0.1, but the model has \S+ GB without its experts' width"):
        make_synthetic_checkpoint.write(args)
    assert not list(tmp_path.iterdir())
