"""What the tool prints of checkpoints, from their manifests alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import inspect_checkpoint

from tests.checkpoint.made import make_checkpoint, run_config


def test_tensors_sizes_layout_and_versions_are_listed(tmp_path, capsys):
    make_checkpoint(tmp_path / "checkpoints", 10, run_config(tmp_path))
    assert inspect_checkpoint.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "step_000010: training checkpoint after update 10" in printed
    assert "tensor_parallel 2" in printed and "megatron-core" in printed
    assert "decoder.weight  bfloat16   4x8" in printed and "64 bytes in 2 pieces" in printed


def test_differences_and_damage_are_named(tmp_path, capsys):
    one = make_checkpoint(tmp_path / "a", 2, run_config(tmp_path))
    other = make_checkpoint(tmp_path / "b", 4, run_config(tmp_path, optimizer={"lr": 0.5}))
    assert inspect_checkpoint.main([str(one), "--against", str(other)]) == 0
    assert "config optimizer.lr: 1e-06 here, 0.5 there" in capsys.readouterr().out
    (one / "tensors/__0_0.distcp").unlink()
    assert inspect_checkpoint.main([str(one)]) == 2
    assert "__0_0.distcp is missing" in capsys.readouterr().err
