"""Python 3.12 with megatron-core 0.19 computes what this environment computes: one code base, two releases.

`make env312` makes the other environment; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OTHER = ROOT / ".venv312" / "bin" / "python"
REASON = "there is no .venv312 beside this environment: `make env312` makes it where a Python 3.12 is found"
VERSIONS = "import sys; from importlib.metadata import version; print(sys.version_info[1], version('megatron-core'))"

pytestmark = pytest.mark.skipif(not OTHER.exists() or sys.version_info >= (3, 12), reason=REASON)

ONE_RANK: dict[str, Any] = {}
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline": 2}

# Each compares with one rank or with transformers; equal on one rank, the releases are equal in these layouts too.
PARITY = "tests/parallel/test_layouts.py::test_every_layout_makes_the_update_of_one_rank"
REFRESH = "tests/e2e/test_refresh.py::test_engine_equals_trainer_after_each_of_three_refreshes"
CHOSEN = (f"{PARITY}[tp2_ep2]", f"{PARITY}[tp2_pp2]", f"{PARITY}[cp2]", f"{REFRESH}[one]")


def _python(python: str | Path, *arguments: str) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore", HF_HUB_OFFLINE="1")
    run = subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a small arithmetic set."""
    folder = tmp_path_factory.mktemp("task")
    _python(sys.executable, "tools/make_tiny_model.py", str(folder / "model"))
    sizes = ("--train", "64", "--heldout", "8", "--demonstrations", "128")
    _python(sys.executable, "examples/arithmetic.py", "--out", str(folder / "data"), *sizes)
    return folder


def _config(task: Path, run_dir: Path, model: Path, engine: str, actor: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "model": {"path": str(model)},
        "data": {"train": str(task / "data" / "train.jsonl"), "max_prompt_length": 16},
        "rollout": {
            "engine": engine,
            "precision": "float32",
            "group_size": 8,
            "max_response_length": 16,
            "kv_cache_gb": 0.05,
        },
        "advantages": {"normalization": "center"},
        "actor": {"dtype": "float32", "micro_batch_tokens": 512, **actor},
        "optimizer": {"lr": 1e-4, "warmup_fraction": 0.0},
        "trainer": {"updates": 4, "mini_batch_size": 8},
        # Every response is long, so the penalty gives advantages to groups that an untrained model answers all wrong.
        "rewards": {"overlong_start": 4},
        "logging": {"progress": False, "rollouts": False},
        "sft": {
            "demonstrations": str(task / "data" / "demonstrations.jsonl"),
            "updates": 6,
            "batch_size": 32,
            "output": str(run_dir / "warm"),
        },
    }


def _run(python: str | Path, command: str, config: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """The metrics of the updates of one run."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    _python(python, "-m", "megatron_rlvr", command, str(folder / "run.yaml"))
    run_dir = Path(config["run_dir"]) / ("sft" if command == "sft" else "")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/grad_norm" in row]


def _assert_equal(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs) >= 4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["actor/grad_norm"] > 0
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert other[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-7), (mine["step"], name)


def test_the_other_environment_is_another_release() -> None:
    python, megatron = _python(OTHER, "-c", VERSIONS).split()
    assert python == "12" and megatron.startswith("0.19")
    python, megatron = _python(sys.executable, "-c", VERSIONS).split()
    assert python == "11" and megatron.startswith("0.16")


def test_warm_up_and_training_on_one_rank(task: Path, tmp_path: Path) -> None:
    """Supervised warm-up, then four updates with vLLM: the same losses, and the same tokens sampled."""
    results: dict[str, Any] = {}
    for name, python in (("ours", sys.executable), ("theirs", OTHER)):
        folder = tmp_path / name
        config = _config(task, folder / "run", task / "model", "vllm", ONE_RANK)
        warm_up = _run(python, "sft", config, folder / "sft")
        config["model"]["path"] = str(folder / "run" / "warm")
        results[name] = warm_up, _run(python, "train", config, folder / "train")
    _assert_equal(results["ours"][0], results["theirs"][0])
    _assert_equal(results["ours"][1], results["theirs"][1])
    for mine, other in zip(results["ours"][1], results["theirs"][1], strict=True):
        assert other["response_length/mean"] == mine["response_length/mean"]
        assert other["actor/log_ratio_abs/max"] < 1e-4


def test_training_on_an_interleaved_pipeline(task: Path, tmp_path: Path) -> None:
    rows = {}
    for name, python in (("ours", sys.executable), ("theirs", OTHER)):
        folder = tmp_path / name
        config = _config(task, folder / "run", task / "model", "transformers", INTERLEAVED)
        rows[name] = _run(python, "train", config, folder / "train")
    _assert_equal(rows["ours"], rows["theirs"])


def test_parity_and_refresh_pass_there() -> None:
    printed = _python(OTHER, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHOSEN)
    assert f"{len(CHOSEN)} passed" in printed
