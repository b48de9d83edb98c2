"""Nsight Systems goes around the chosen ranks, with the flags that cost no time, and takes nothing from the run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from launch.local import run_local
from launch.nsys import nsys_command, rank_wrapper
from megatron_rlvr.config.checks import check_profile
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

HERE = Path(__file__).parent


def _config(run_dir: Path, data_parallel: int = 3, **profile) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": "model"},
            "data": {},
            "actor": {"data_parallel": data_parallel},
            "profile": profile,
        }
    )


@pytest.fixture
def nsys_on_path(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(HERE / "fake_nsys", folder / "nsys")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.usefixtures("nsys_on_path")
def test_chosen_ranks_run_under_nsys_and_the_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; sys.exit(3 if os.environ['RANK'] == '2' else 0)")
    command = [sys.executable, "-S", str(script)]
    config = _config(tmp_path / "run", tool="nsys", ranks=[0, 2], steps=[1, 2])
    code = run_local(command, 3, threads=1, log_dir=tmp_path / "logs", wrap=rank_wrapper(config))
    assert code == 3  # the rank's own exit code comes through
    name = f"4711_{socket.gethostname()}_rank"
    reports = {path.name: json.loads(path.read_text()) for path in (tmp_path / "run/profile").iterdir()}
    assert sorted(reports) == [f"{name}0.nsys-rep", f"{name}2.nsys-rep"]
    for rank in (0, 2):
        report = reports[f"{name}{rank}.nsys-rep"]
        assert report["command"] == command and report["rank"] == str(rank)
        options = report["options"]
        assert options.pop("--output").endswith(f"{name}{rank}")
        assert options == {
            "--trace": "cuda,nvtx",
            "--sample": "none",
            "--cpuctxsw": "none",
            "--capture-range": "cudaProfilerApi",
            "--capture-range-end": "stop",
            "--kill": "none",
            "--force-overwrite": "true",
        }


def test_names_may_be_left_to_nsys(tmp_path):
    words = nsys_command(["python"], tmp_path, "%q{SLURM_PROCID}", job="%q{SLURM_JOB_ID}", node="%h")
    assert f"--output={tmp_path}/%q{{SLURM_JOB_ID}}_%h_rank%q{{SLURM_PROCID}}" in words
    assert words[:2] == ["nsys", "profile"] and words[-1] == "python"


def test_a_missing_nsys_is_refused_where_it_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rank_wrapper(_config(tmp_path, tool="torch")) is None
    with pytest.raises(UserError, match=r"profile\.tool is nsys, but nsys is not on PATH; .*profile\.tool=torch"):
        rank_wrapper(_config(tmp_path, tool="nsys"))


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"tool": "torch", "steps": [5, 3]}, r"profile\.steps is \[5, 3\]"),
        ({"tool": "nsys", "steps": [2000, 2001]}, r"names no update of the 1024"),
        ({"memory": True, "ranks": [0, 3]}, r"profile\.ranks is \[0, 3\], but the layout has ranks 0 to 2"),
    ],
)
def test_a_window_that_the_run_does_not_have_is_refused(tmp_path, profile, words):
    with pytest.raises(UserError, match=words):
        check_profile(_config(tmp_path, **profile))
    check_profile(_config(tmp_path, tool="torch", ranks=[0, 2]))
