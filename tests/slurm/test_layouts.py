"""Takes minutes: pipeline and tensor parallel ranks over two nodes, then an evaluation and a conversion as jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm import main as launch_slurm
from megatron_rlvr.checkpoint.manifest import read_manifest
from tests.e2e.commands import read_metrics, run_python
from tests.slurm.mini import MiniSlurm
from tests.slurm.runs import make_inputs, write_profile, write_run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
LAYOUT = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 1}


@pytest.fixture(scope="module")
def root(cluster: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("layouts")
    make_inputs(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environment[name])
        yield path


def _job(root: Path, name: str, *more: str) -> int:
    data = {"train": str(root / "data.jsonl"), "validation": str(root / "data.jsonl"), "max_prompt_length": 24}
    trainer = {"updates": 2, "mini_batch_size": 4, "eval_problems": 8}
    config = write_run(root, name, actor=LAYOUT, data=data, trainer=trainer)
    words = [config, "--cluster", write_profile(root), "--follow", "--poll", "1", *more]
    return launch_slurm([*map(str, words)])


def test_stages_on_two_nodes_compute_what_one_machine_does(root: Path) -> None:
    assert _job(root, "nodes", "--nodes", "2") == 0
    run_python("-m", "megatron_rlvr", "train", root / "nodes.yaml", f"run_dir={root}/local")
    assert read_metrics(root / "nodes") == read_metrics(root / "local")


def test_an_evaluation_is_a_job(root: Path) -> None:
    assert _job(root, "evaluated", "--job", "eval") == 0
    row = json.loads((root / "evaluated/eval/metrics.jsonl").read_text().splitlines()[0])
    assert row["step"] == 0 and any(name.startswith("val-core/") for name in row)


def test_a_conversion_is_a_job(root: Path) -> None:
    assert _job(root, "converted", "--job", "convert", "--target", str(root / "megatron")) == 0
    manifest = read_manifest(root / "megatron")
    assert manifest.kind == "model" and manifest.layout["pipeline_parallel"] == 2
