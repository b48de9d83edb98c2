"""Who may import whom, and that the checkers of `make lint` find nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def _run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(cwd)}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)


def test_the_import_contracts_are_kept() -> None:
    done = _run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_import_contracts_can_be_broken(tmp_path: Path) -> None:
    for name in ("megatron_rlvr", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / "megatron_rlvr" / "losses" / "core.py", "a") as file:
        file.write("\nimport vllm\nimport megatron.core\nfrom megatron_rlvr.data import balancing\n")
    done = _run(BIN / "lint-imports", "--no-cache", cwd=tmp_path)
    assert done.returncode == 1
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert {line.split()[0] for line in broken} == {"Nothing", "Only", "The"} and len(broken) == 4, done.stdout


def test_ruff_finds_nothing() -> None:
    done = _run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    assert done.returncode == 0, done.stdout


def test_mypy_finds_nothing() -> None:
    done = _run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "types config.load config.checks config.run_dir",
        "losses advantages rewards replay data",
        "observability.reporter observability.report",
        "cli doctor hf.spec",
    ],
)
def test_what_must_load_anywhere_loads_neither_megatron_nor_vllm(modules: str) -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {modules.split()!r}: importlib.import_module('megatron_rlvr.' + name)\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules} & {'megatron', 'vllm', 'transformers', 'wandb'}))"
    )
    done = _run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert loaded <= ({"transformers"} if "data" in modules else set())
