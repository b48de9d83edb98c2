"""Takes minutes: pipeline and tensor parallel ranks over two nodes, then an evaluation and a conversion as jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.slurm import main as launch_slurm
from megatron_rlvr.checkpoint.manifest import read_manifest
from tests.e2e.commands import read_metrics, run_python
from tests.slurm.runs import write_profile, write_run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
STAGES = {"tensor_parallel": 2, "pipeline_parallel": 2}
ONE = {"tensor_parallel": 1}
TWO = {"tensor_parallel": 2}


def _job(root: Path, name: str, *more: str, layout: dict[str, int]) -> int:
    config = write_run(root, name, actor=layout, trainer={"updates": 2, "mini_batch_size": 4, "eval_problems": 8})
    words = [config, "--cluster", write_profile(root), "--follow", "--poll", "1", *more]
    return launch_slurm([*map(str, words)])


def test_stages_on_two_nodes_compute_what_one_machine_does(root: Path) -> None:
    assert _job(root, "nodes", "--nodes", "2", layout=STAGES) == 0
    run_python("-m", "megatron_rlvr", "train", root / "nodes.yaml", f"run_dir={root}/local")
    assert read_metrics(root / "nodes") == read_metrics(root / "local")


def test_a_sweep_trains_one_run_a_task(root: Path) -> None:
    assert _job(root, "sweep", "--job", "sweep", "--sweep", "seed=0,1", "--at-once", "1", layout=ONE) == 0
    first, second = (read_metrics(root / f"sweep/seed-{seed}") for seed in range(2))
    assert [row["step"] for row in first] == [row["step"] for row in second] == [1, 2]
    assert first != second


def test_an_evaluation_is_a_job(root: Path) -> None:
    assert _job(root, "evaluated", "--job", "eval", f"data.validation={root}/data.jsonl", layout=ONE) == 0
    row = json.loads((root / "evaluated/eval/metrics.jsonl").read_text().splitlines()[0])
    assert row["step"] == 0 and any(name.startswith("val-core/") for name in row)


def test_a_conversion_is_a_job(root: Path) -> None:
    assert _job(root, "converted", "--job", "convert", "--target", str(root / "megatron"), layout=TWO) == 0
    manifest = read_manifest(root / "megatron")
    assert manifest.kind == "model" and manifest.layout["tensor_parallel"] == 2
