"""Jobs on a real SLURM cluster: rendered, submitted, stopped, requeued and finished as a user's are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.attempts import last_update, read_history
from launch.jobs import Request, prepare
from launch.slurm import main as launch_slurm
from launch.slurm import submit_rendered
from launch.submission import SubmissionFiles, job_states
from megatron_rlvr.config.load import load_config
from tests.e2e.commands import REPOSITORY, read_metrics
from tests.slurm.mini import GPUS, MiniSlurm
from tests.slurm.runs import LOST, PREEMPTED, UPDATES, make_profile, write_profile, write_run

RANK = REPOSITORY / "tests/slurm/rank.py"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


def _submit_trivial(
    root: Path, name: str, behaviour: str, *, kind="train", nodes=2, chain=1, sections=None, **profile
) -> tuple[str, ...]:
    """Jobs whose ranks do what rank.py says; their ids."""
    request = Request(
        kind,
        load_config(write_run(root, name, **(sections or {}))),
        make_profile(root, **profile),
        nodes=nodes,
        rollout_tensor_parallel=4,
        rank_arguments=f"{RANK} {behaviour}",
        server_arguments=f"{RANK} serve",
        sweep=("seed=3,4", "loss.name=grpo,respo") if kind == "sweep" else (),
    )
    prepare(request)
    return submit_rendered(root / name, chain)


def _words(root: Path, name: str, *more: str, **profile) -> list[str]:
    """Arguments of `python -m launch.slurm` for a run on two nodes."""
    return [str(write_run(root, name)), "--cluster", str(write_profile(root, **profile)), "--nodes", "2", *more]


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> tuple[Path, str]:
    """A training over two nodes that nothing happens to: its directory and job."""
    assert launch_slurm([*_words(root, "undisturbed", "--submit"), "checkpoint.interval=null"]) == 0
    return root / "undisturbed", SubmissionFiles(root / "undisturbed").read_job().ids[0]


@pytest.fixture(scope="module")
def jobs(root: Path, undisturbed: tuple[Path, str]) -> dict[str, str]:
    """Jobs without training, all waiting or running at once; name -> id."""
    short = {"time": "00:01:00", "signal_seconds": 58, "requeue": False, "environment": {"PATH": f"{root}/bin:$PATH"}}
    recorded = {"profile": {"tool": "nsys", "ranks": [0]}}
    (root / "bin").mkdir()
    (root / "bin/nsys").symlink_to(REPOSITORY / "tests/launch/fake_nsys")
    only = {"nodes": 1, "sbatch": [f"--nodelist={PREEMPTED}"]}
    chain = _submit_trivial(root, "chain", "finish-once-stopped", chain=2, sections=recorded, **short)
    return {
        "roles": _submit_trivial(root, "roles", "finish-after-servers", kind="disaggregated")[0],
        "sweep": _submit_trivial(root, "sweep", "finish", kind="sweep")[0],
        "crashes": _submit_trivial(root, "crashes", "crash-of-rank-1", max_crashes=2)[0],
        "terminated": _submit_trivial(root, "terminated", "wait", kind="disaggregated", max_crashes=1)[0],
        "preempted": _submit_trivial(root, "preempted", "finish-at-second-start", **only)[0],
        "chain1": chain[0],
        "chain2": chain[1],
    }


def _until(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _show(root: Path, name: str) -> str:
    """All that a job left, for a failed assertion."""
    paths = [*(root / name).glob("slurm/*.out"), *(root / name).glob("logs/*/*"), *(root / name).glob("slurm/*.json")]
    return "".join(f"== {path}\n{path.read_text()[-3000:]}\n" for path in sorted(paths))


def _log(root: Path, name: str, role: str, rank: int) -> list[str]:
    return (root / name / f"logs/{role}/rank{rank}.log").read_text().splitlines()


def _place(root: Path, name: str, role: str, rank: int) -> dict[str, Any]:
    return json.loads(next(line for line in _log(root, name, role, rank) if line.startswith("{")))


def test_every_rank_of_every_role_knows_its_place(root: Path, jobs: dict[str, str], cluster: MiniSlurm) -> None:
    assert cluster.wait_for(jobs["roles"], *ENDED) == "COMPLETED", _show(root, "roles")
    ranks = [_place(root, "roles", "trainer", rank) for rank in range(2)]
    servers = [_place(root, "roles", "rollout", rank) for rank in range(2)]
    assert [(p["RANK"], p["WORLD_SIZE"], p["LOCAL_RANK"], p["LOCAL_WORLD_SIZE"]) for p in ranks] == [
        ("0", "2", "0", "1"),
        ("1", "2", "0", "1"),
    ]
    assert [p["LOCAL_RANK"] for p in servers] == ["0", "1"]
    assert [p["CUDA_VISIBLE_DEVICES"] for p in servers] == ["0,1,2,3", "4,5,6,7"]
    nodes = [p["node"] for p in (*ranks, *servers)]
    assert len(set(nodes)) == 3 and nodes[2] == nodes[3]
    assert {p["MASTER_ADDR"] for p in (*ranks, *servers)} == {nodes[0]}
    port = 20000 + int(jobs["roles"]) % 12000
    assert {p["MASTER_PORT"] for p in (*ranks, *servers)} == {str(port)}
    addresses = (root / "roles/slurm/servers.txt").read_text().split("\n")
    assert addresses[:2] == [f"{nodes[2]} {port + 1}", f"{nodes[2]} {port + 2}"]


def test_servers_are_ended_cleanly_when_the_trainer_is_done(
    root: Path, jobs: dict[str, str], cluster: MiniSlurm
) -> None:
    assert cluster.wait_for(jobs["roles"], *ENDED) == "COMPLETED"
    assert all("ended by SIGTERM" in _log(root, "roles", "rollout", rank) for rank in range(2))


def test_sigterm_to_one_rank_ends_the_other_roles_and_is_the_job_s_exit_code(
    root: Path, jobs: dict[str, str], cluster: MiniSlurm
) -> None:
    _until(lambda: all((root / f"terminated/logs/{role}/rank1.log").exists() for role in ("trainer", "rollout")))
    _until(lambda: len(_log(root, "terminated", "trainer", 1)) > 0 and len(_log(root, "terminated", "rollout", 1)) > 0)
    os.kill(_place(root, "terminated", "trainer", 1)["pid"], signal.SIGTERM)
    assert cluster.wait_for(jobs["terminated"], *ENDED) == "FAILED"
    assert cluster.show(jobs["terminated"], "ExitCode") == "143:0", _show(root, "terminated")
    assert "ended by SIGTERM" in _log(root, "terminated", "rollout", 0)
    assert "rank 1 failed first (signal SIGTERM)" in read_history(root / "terminated").attempts[-1].reason


def test_a_run_that_crashes_again_at_the_same_place_is_given_up(
    root: Path, jobs: dict[str, str], cluster: MiniSlurm
) -> None:
    assert cluster.wait_for(jobs["crashes"], *ENDED) == "FAILED"
    assert cluster.show(jobs["crashes"], "ExitCode") == "7:0", _show(root, "crashes")
    history = read_history(root / "crashes")
    assert [(a.outcome, a.code, a.restart) for a in history.attempts] == [("crashed", 7, 0), ("crashed", 7, 1)]
    assert history.gave_up is not None
    assert "it crashed 2 times without getting further, the last time before its first update" in history.gave_up
    assert "rank 1 failed first (exit code 7)" in history.gave_up and "the disk is full" in history.gave_up


def test_an_array_starts_one_run_a_task(root: Path, jobs: dict[str, str], cluster: MiniSlurm) -> None:
    runs = [root / f"sweep/seed-{seed}_name-{name}" for seed in (3, 4) for name in ("grpo", "respo")]
    for task, run_dir in enumerate(runs):
        job = f"{jobs['sweep']}_{task}"
        assert cluster.wait_for(job, *ENDED) == "COMPLETED", _show(root, f"sweep/{run_dir.name}")
        assert [(a.job, a.outcome) for a in read_history(run_dir).attempts] == [(job, "finished")]
        config = load_config(run_dir / "config.yaml")
        assert (f"seed-{config.seed}_name-{config.loss.name}", config.run_dir) == (run_dir.name, run_dir)
    ports = {_place(root, f"sweep/{run_dir.name}", "train", 0)["MASTER_PORT"] for run_dir in runs}
    assert len(ports) == 4  # of jobs that may share a node


def test_a_chain_goes_on_where_the_time_limit_stopped_it(root: Path, jobs: dict[str, str], cluster: MiniSlurm) -> None:
    assert cluster.wait_for(jobs["chain2"], *ENDED) == "COMPLETED", _show(root, "chain")
    attempts = read_history(root / "chain").attempts
    assert [(a.job, a.outcome, a.code) for a in attempts] == [
        (jobs["chain1"], "stopped", 75),
        (jobs["chain2"], "finished", 0),
    ]
    assert attempts[0].ended is not None and attempts[0].ended < attempts[1].began


def test_a_preempted_job_goes_back_into_the_queue_and_is_finished(
    root: Path, jobs: dict[str, str], cluster: MiniSlurm
) -> None:
    _until(lambda: (root / "preempted/logs/train/rank1.log").exists())
    node = (f"--nodelist={PREEMPTED}", f"--gpus-per-node={GPUS}", "--wrap=sleep 1")
    urgent = cluster.run("sbatch", "--parsable", "--partition=urgent", "--output=/dev/null", *node).stdout.strip()
    assert cluster.wait_for(urgent, *ENDED) == "COMPLETED"
    assert cluster.wait_for(jobs["preempted"], *ENDED) == "COMPLETED", _show(root, "preempted")
    attempts = read_history(root / "preempted").attempts
    assert [(a.restart, a.outcome) for a in attempts] == [(0, "running"), (1, "finished")]


def test_nsight_systems_records_the_chosen_ranks_alone(root: Path, jobs: dict[str, str], cluster: MiniSlurm) -> None:
    cluster.wait_for(jobs["chain2"], *ENDED)
    reports = {path.name: json.loads(path.read_text()) for path in (root / "chain/profile").iterdir()}
    nodes = [_place(root, "chain", "train", 0)["node"], *(cluster.show(jobs["chain2"], "BatchHost"),)]
    assert set(reports) == {f"{jobs[f'chain{i + 1}']}_{nodes[i]}_rank0.nsys-rep" for i in range(2)}
    assert [reports[name]["code"] for name in sorted(reports)] == [75, 0]  # it heard SIGUSR1 through the profiler
    assert all("--capture-range" in report["options"] for report in reports.values())


# One run: stopped by SIGUSR1 and requeued, then a node of it loses its power, then it is finished.


def _rank_pid(run_dir: Path) -> int:
    """The process of rank 0, the child of its task."""
    task = int(SubmissionFiles(run_dir).root.joinpath("rank0.pid").read_text())
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return next(pid for pid, parent in parents.items() if parent == task)


@contextlib.contextmanager
def _held_after(run_dir: Path, update: int) -> Iterator[None]:
    """Rank 0 stands still once `update` is reported, so that what the test does comes before the run's end."""
    _until(lambda: (last_update(run_dir / "metrics.jsonl") or 0) >= update)
    pid = _rank_pid(run_dir)
    os.kill(pid, signal.SIGSTOP)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def disturbed(
    root: Path, undisturbed: tuple[Path, str], cluster: MiniSlurm
) -> tuple[Path, subprocess.CompletedProcess[str], list[str]]:
    """The same run again: its directory, what --follow said, the nodes of its first and last attempt."""
    run_dir, nodes = root / "disturbed", []
    words = _words(root, "disturbed", "--follow", "--poll", "0.5", sbatch=[f"--exclude={PREEMPTED}"])
    follow = subprocess.Popen(
        [sys.executable, "-m", "launch.slurm", *words],
        cwd=REPOSITORY,
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _until(lambda: (run_dir / "metrics.jsonl").exists() or follow.poll() is not None)
    assert follow.poll() is None, follow.communicate()[0]
    job = SubmissionFiles(run_dir).read_job().ids[0]
    with _held_after(run_dir, 2):
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        _until(lambda: "SIGUSR1" in (run_dir / f"slurm/job-{job}.out").read_text())
    _until(lambda: len(read_history(run_dir).attempts) == 2)
    with _held_after(run_dir, 5):
        nodes.append(cluster.show(job, "NodeList"))
        cluster.kill_node(int(LOST[-1]))
    _until(lambda: follow.poll() is not None)
    said, _ = follow.communicate()
    nodes.append(cluster.show(job, "NodeList"))
    return run_dir, subprocess.CompletedProcess(follow.args, follow.returncode, said), nodes


@pytest.mark.timeout(600)
def test_a_run_that_is_requeued_and_loses_a_node_has_the_bits_of_an_undisturbed_one(
    root, disturbed, undisturbed, cluster
) -> None:
    run_dir, followed, nodes = disturbed
    assert followed.returncode == 0, followed.stdout + _show(root, "disturbed")
    attempts = read_history(run_dir).attempts
    assert [a.restart for a in attempts] == [0, 1, 2], attempts
    assert (attempts[0].outcome, attempts[0].code) == ("stopped", 75)
    assert attempts[1].outcome in ("running", "crashed")  # nobody was left to say so, or the other node noticed first
    assert attempts[2].outcome == "finished"
    assert LOST[-1] in nodes[0] and LOST[-1] not in nodes[1]
    other, job = undisturbed
    assert cluster.wait_for(job, *ENDED) == "COMPLETED", _show(root, "undisturbed")
    assert [row["step"] for row in read_metrics(other)] == list(range(1, UPDATES + 1))
    assert read_metrics(run_dir) == read_metrics(other)
    assert (run_dir / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()


def test_following_shows_states_and_the_run_s_output(disturbed) -> None:
    said = disturbed[1].stdout
    assert "RUNNING" in said and "PENDING" in said and said.rstrip().endswith("COMPLETED")
    assert "starting from the beginning" in said and "going on from" in said


# The command line


def test_a_dry_run_asks_slurm_and_submits_nothing(root: Path, cluster: MiniSlurm, capsys) -> None:
    before = cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout
    assert launch_slurm(_words(root, "dry")) == 0
    said = capsys.readouterr().out
    assert "sbatch --test-only: sbatch: Job" in said and "nothing was submitted" in said
    assert {"job.sbatch", "config.yaml", "git.json", "cluster.yaml", "plan.txt"} <= {
        path.name for path in (root / "dry/slurm").iterdir()
    }
    assert not (root / "dry/metrics.jsonl").exists()
    assert cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout == before


def test_what_slurm_would_refuse_is_refused_before(root: Path, cluster: MiniSlurm, capsys) -> None:
    words = [
        write_run(root, "nowhere"),
        "--cluster",
        write_profile(root, partition="absent"),
        "--nodes",
        "2",
        "--submit",
    ]
    assert launch_slurm(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert "sbatch --test-only refused the job" in error and "invalid partition" in error
    assert error.count("\n") == 1


def test_a_run_directory_of_a_waiting_job_is_refused(root: Path, cluster: MiniSlurm, capsys) -> None:
    words = [
        write_run(root, "waiting"),
        "--cluster",
        write_profile(root, sbatch=["--hold"]),
        "--nodes",
        "2",
        "--submit",
    ]
    arguments = list(map(str, words))
    assert launch_slurm(arguments) == 0
    assert launch_slurm(arguments) == 2
    assert "which is PENDING; watch it with --follow" in capsys.readouterr().err
    job = SubmissionFiles(root / "waiting").read_job().ids[0]
    cluster.run("scancel", job)
    assert [state.state for state in job_states(job)] == ["CANCELLED"]
    shutil.rmtree(root / "waiting")
