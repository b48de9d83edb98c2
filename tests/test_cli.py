"""The command line as a user meets it: a fault is one sentence on stderr, exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_rlvr.cli import main
from megatron_rlvr.observability.series import read_metrics
from tools.phase_table import read_table

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = ["data.held_out={other: {path: train.jsonl, role: test, samples: 2, problems: 3}}", "trainer.save_best=true"]
CONFIG = """
run_dir: runs/a
model: {path: model}
data: {train: train.jsonl, validation: heldout.jsonl, max_prompt_length: 16}
rollout: {engine: transformers, precision: float32, group_size: 2, max_response_length: 16, max_num_seqs: 16}
actor: {dtype: float32, micro_batch_tokens: 256}
optimizer: {lr: 1e-4}
trainer: {updates: 1, mini_batch_size: 2, eval_samples: 1, eval_problems: 2}
logging: {progress: false}
sft: {demonstrations: demonstrations.jsonl, output: warm, updates: 2, batch_size: 4, lr: 1e-3}
"""


def _python(*arguments: str | Path, cwd: Path, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def _cli(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return _python("-m", "megatron_rlvr", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, problems and demonstrations."""
    directory = tmp_path_factory.mktemp("made")
    sizes = ["--layers", "2", "--hidden", "32", "--head-dim", "8", "--max-positions", "64"]
    model = _python(ROOT / "tools" / "make_tiny_model.py", "model", *sizes, cwd=directory)
    assert model.returncode == 0, model.stderr
    counts = ["--train", "16", "--heldout", "4", "--demonstrations", "32"]
    data = _python(ROOT / "examples" / "arithmetic.py", "--out", ".", *counts, cwd=directory)
    assert data.returncode == 0, data.stderr
    (directory / "run.yaml").write_text(CONFIG)
    return directory


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may damage, and that must come out without a run directory unless the test makes one."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    yield tmp_path


def _assert_refused(done: subprocess.CompletedProcess[str], place: Path, *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("train", ["RUN.yaml", "--help"]),
        ("frobnicate run.yaml", ["frobnicate", "train"]),
        ("train nowhere.yaml", ["nowhere.yaml does not exist"]),
        ("train run.yaml --overwrit", ["--overwrit"]),
        ("train run.yaml actor.tensor_paralel=2", ["actor.tensor_paralel", "actor.tensor_parallel"]),
        (
            "train run.yaml actor.tensor_parallel=4",
            ["actor.tensor_parallel is 4", "num_key_value_heads 2", "such as 2"],
        ),
        ("train run.yaml model.path=none", ["model.path", "none", "not a directory"]),
        ("train run.yaml data.train=none.jsonl", ["data.train", "none.jsonl"]),
        ("train run.yaml data.train=null", ["data.train is unset", "set data.train=PROBLEMS.jsonl"]),
        ("train run.yaml loss.variance_horizons=[4]", ["loss.variance_horizons is [4]", "reference.enabled=true"]),
        ("train run.yaml loss.name=proximal_kl reference.enabled=false", ["reference.enabled is false", "proximal_kl"]),
        ("train run.yaml loss.name=respi", ["'respi' is unknown", "respo"]),
        ("train run.yaml loss.hyperparameters.lambda_poss=2", ["lambda_poss", "lambda_pos"]),
        ("train run.yaml rollout.max_response_length=49", ["is 65 tokens", "max_position_embeddings 64"]),
        ("eval run.yaml data.validation=null", ["data.validation is unset"]),
        ("sft run.yaml sft.output=null", ["sft.output is unset"]),
        ("plot model", ["model holds no metrics.jsonl"]),
    ],
)
def test_faults_are_refused_before_any_process_starts(place: Path, arguments: str, parts: list[str]) -> None:
    _assert_refused(_cli(place, *arguments.split()), place, *parts)


def test_a_missing_shard_is_refused(place: Path) -> None:
    (place / "model" / "model.safetensors").unlink()
    _assert_refused(_cli(place, "train", "run.yaml"), place, "lacks model.safetensors", "copy")


def test_an_earlier_run_is_refused_and_left_alone(place: Path) -> None:
    (place / "runs" / "a").mkdir(parents=True)
    (place / "runs" / "a" / "metrics.jsonl").write_text('{"step": 1}\n')
    done = _cli(place, "train", "run.yaml")
    assert done.returncode == 2 and "already holds a run" in done.stderr and "--overwrite" in done.stderr
    assert [p.name for p in (place / "runs" / "a").iterdir()] == ["metrics.jsonl"]


def test_a_lambda_that_breaks_a_tail_condition_is_warned_of(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (place / "runs" / "a").mkdir(parents=True)
    (place / "runs" / "a" / "metrics.jsonl").write_text('{"step": 1}\n')  # so that the command ends behind its checks
    assert main(["train", "run.yaml", "loss.hyperparameters.lambda_pos=3"]) == 2
    warning, refusal = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: lambda_pos=3 breaks the positive tail condition") and "lambda_pos=2" in warning
    assert "already holds a run" in refusal


# Faults that only the ranks can see


def test_a_truncated_checkpoint_is_refused(place: Path) -> None:
    weights = place / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _assert_refused(_cli(place, "train", "run.yaml"), place, "model.safetensors")


def test_a_problem_without_an_answer_is_refused_by_two_ranks_at_once(place: Path) -> None:
    with open(place / "train.jsonl", "a") as file:
        file.write('{"problem": "1+1="}\n')
    _assert_refused(_cli(place, "train", "run.yaml", "actor.data_parallel=2"), place, "train.jsonl", "17", "answer")


def test_a_prompt_beyond_the_context_is_refused_and_the_earlier_run_comes_back(place: Path) -> None:
    run_dir = place / "runs" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with open(place / "train.jsonl", "a") as file:
        file.write(json.dumps({"problem": "+".join("1" * 40) + "=", "answer": "40"}) + "\n")
    done = _cli(place, "train", "run.yaml", "--overwrite", "trainer.updates=1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "max_prompt_length" in done.stderr and "16" in done.stderr
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n' and len(list(run_dir.iterdir())) == 1


def test_a_crash_keeps_its_traceback_and_its_run_directory(place: Path) -> None:
    arguments = ["actor.data_parallel=2", "trainer.step_zero_tolerance=1e-30", "data.validation=null"]
    done = _cli(place, "train", "run.yaml", *arguments)
    assert done.returncode == 1, done.stderr
    assert "failed first (exit code 1):\nTraceback" in done.stderr and done.stderr.count("Traceback") == 1
    assert (place / "runs" / "a" / "config.yaml").exists()


# Runs


def test_warm_up_then_training_then_evaluation(place: Path) -> None:
    for command in (
        ["sft", "run.yaml", "actor.dtype=bf16"],
        ["train", "run.yaml", "model.path=warm", "profile.tool=torch", "profile.steps=[1,1]", *HELD_OUT],
        ["eval", "run.yaml", "model.path=warm", "data.train=null"],
    ):
        done = _cli(place, *command)
        assert done.returncode == 0, done.stderr
    run_dir = place / "runs" / "a"
    for model, dtype in ((place / "warm", "bfloat16"), (run_dir / "model", "float32")):
        assert json.loads((model / "config.json").read_text())["dtype"] == dtype
        assert {str(weight.dtype) for weight in load_file(model / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert [row["step"] for row in read_metrics(run_dir / "sft")] == [1, 2]
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["training/global_step"] == 1
    assert [row["step"] for row in read_metrics(run_dir / "eval")] == [0]
    assert {"config.yaml", "metrics.jsonl", "tensorboard", "rollouts", "report.md", "plots", "model"} <= {
        path.name for path in run_dir.iterdir()
    }
    _assert_named_sets_and_the_best_model(run_dir, rows)
    _assert_a_trace_of_all_phases(run_dir / "profile" / "rank0_steps1-1.json")
    plotted = _cli(place, "plot", "runs/a", "runs/a/sft", "--output", "both")
    assert plotted.returncode == 0 and (place / "both" / "grad_norm.png").exists(), plotted.stderr


def _assert_named_sets_and_the_best_model(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Every set is logged at every evaluation; the validation set alone decides which model is best."""
    kept = json.loads((run_dir / "evaluations.json").read_text())
    assert (kept["best_by"], kept["roles"]) == ("heldout", {"heldout": "validation", "other": "test"})
    accuracies = [row["val-core/heldout/acc/mean@1"] for row in rows]
    best = accuracies.index(max(accuracies))
    assert (kept["best"][0], kept["last"][0]) == (best, 1)
    assert [row["val-aux/heldout/best"] for row in rows] == [accuracies[0], max(accuracies)]
    assert kept["last"][1]["other"]["accuracy"] == rows[1]["val-core/other/acc/mean@2"]
    assert kept["last"][1]["other"]["problems"] == 3 and not any("other/best" in name for name in rows[1])
    source = (run_dir.parents[1] / "warm", run_dir / "model")[best] / "model.safetensors"
    wanted = {name: weight.float() for name, weight in load_file(source).items()}
    found = load_file(run_dir / "best" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(bool((found[name] == wanted[name]).all()) for name in wanted)


def _assert_a_trace_of_all_phases(trace: Path) -> None:
    """Phases of the loop and, inside the update, of Megatron: one forward and one backward for each micro-batch."""
    table = read_table(trace)
    phases = table.phases
    assert {"propose", "gen", "reward", "adv", "pack", "update_actor", "optimizer", "refresh"} <= set(phases)
    forward, backward = phases["forward-compute"], phases["backward-compute"]
    assert len(forward) == len(backward) >= 1
    assert 0 < sum(forward + backward + phases["optimizer"]) <= sum(phases["update_actor"])
    assert 0 <= table.idle["outside all ranges"] < 1


def test_the_doctor_reports_and_survives_a_broken_package(tmp_path: Path) -> None:
    broken = tmp_path / "transformer_engine"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('libcudart.so.13 is not what it was')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "WANDB_API_KEY": "secret-key"}
    command = [sys.executable, "-m", "megatron_rlvr", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = {line[2:].split("  ")[0]: line for line in done.stdout.splitlines() if line[:2] in ("+ ", "- ")}
    assert lines["Transformer Engine"].startswith("- ") and "libcudart.so.13" in lines["Transformer Engine"]
    assert lines["megatron-core"].startswith("+ ") and lines["WANDB_API_KEY"].startswith("+ ")
    assert "secret-key" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("This machine can train on ")
