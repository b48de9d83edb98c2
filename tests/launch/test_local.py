"""Real processes: a rank that fails ends the others, its error comes first, and nothing outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.local import rank_environment, run_local

ROOT = Path(__file__).resolve().parents[2]
# a background job of a shell ignores SIGINT, and so would the launcher that a test starts there
LAUNCH = "import signal, sys; from pathlib import Path; from launch.local import run_local; \
signal.signal(signal.SIGINT, signal.default_int_handler); \
sys.exit(run_local([sys.executable, sys.argv[1]], int(sys.argv[2]), threads=1, log_dir=Path(sys.argv[3])))"


def _script(tmp_path: Path, body: str) -> Path:
    """A rank program. Every process that it makes leaves its id in tmp_path as an empty file pid.<id>."""
    path = tmp_path / "rank.py"
    head = f"""
        import os, subprocess, sys, time
        from pathlib import Path
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        here = Path({str(tmp_path)!r})
        (here / f"pid.{{os.getpid()}}").touch()
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return path


def _pids(tmp_path: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def _start(script: Path, world_size: int, log_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCH, str(script), str(world_size), str(log_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_all_ranks_meet_through_the_store(tmp_path: Path) -> None:
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([10.0 ** rank])
        dist.all_reduce(total)
        (here / f"sum{rank}").write_text(str(total.item()))
        dist.destroy_process_group()
    """
    script = _script(tmp_path, body)
    assert run_local([sys.executable, str(script)], 3, threads=1, log_dir=tmp_path / "logs") == 0
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(3)] == ["111.0"] * 3
    assert not any(_alive(pid) for pid in _pids(tmp_path))


# Rank 0 waits in a collective for a rank that died: the group's own timeout is half an hour.
HANGING = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / f"pid.{child.pid}").touch()
    dist.barrier()
    (here / f"together{rank}").touch()
    if rank == DYING:
        while len(list(here.glob("together*"))) < world:
            time.sleep(0.01)
        (here / "died").write_text(str(time.time()))
        DEATH
    dist.recv(torch.zeros(1), src=(rank + 1) % world) if rank != DYING else None
"""


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_ends_the_others_within_seconds(tmp_path: Path, dying: int) -> None:
    death = 'print("the disk is full", file=sys.stderr, flush=True); os._exit(7)'
    body = HANGING.replace("DYING", str(dying)).replace("DEATH", death)
    launcher = _start(_script(tmp_path, body), 3, tmp_path / "logs")
    _, errors = launcher.communicate(timeout=120)
    ended = time.time()
    assert launcher.returncode == 7
    assert ended - float((tmp_path / "died").read_text()) < 5
    assert "the disk is full" in errors
    assert f"rank {dying} failed first (exit code 7)" in errors
    pids = _pids(tmp_path)
    assert len(pids) == 6  # three ranks and a child of each
    assert _until(lambda: not any(_alive(pid) for pid in pids), 1), "orphans"


def test_the_error_of_a_rank_that_was_killed_names_the_signal(tmp_path: Path) -> None:
    body = HANGING.replace("DYING", "1").replace("DEATH", "os.kill(os.getpid(), 9)")
    launcher = _start(_script(tmp_path, body), 3, tmp_path / "logs")
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + 9
    assert "rank 1 failed first (signal SIGKILL)" in errors


STUBBORN = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / f"pid.{child.pid}").touch()
    (here / f"ready{rank}").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all_ranks_and_their_children(tmp_path: Path, number: signal.Signals) -> None:
    launcher = _start(_script(tmp_path, STUBBORN), 3, tmp_path / "logs")
    assert _until(lambda: len(list(tmp_path.glob("ready*"))) == 3, 60)
    pids = _pids(tmp_path)
    assert len(pids) == 6 and all(_alive(pid) for pid in pids)
    launcher.send_signal(number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert _until(lambda: not any(_alive(pid) for pid in pids), 2), "orphans"


LISTENING = """
    import signal
    from megatron_rlvr.checkpoint.stop import REQUEUE, StopRequest
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / f"ready{rank}").touch()
    while rank == 0 and not (here / "sent").exists():
        time.sleep(0.01)
    stop = StopRequest()
    stop.listen()
    while not stop.requested:
        time.sleep(0.01)
    (here / f"asked{rank}").write_text(str(child.poll()))
    sys.exit(REQUEUE)
"""


def test_sigusr1_reaches_every_rank_early_or_late_and_their_code_is_the_launchers(tmp_path: Path) -> None:
    launcher = _start(_script(tmp_path, LISTENING), 2, tmp_path / "logs")
    assert _until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60)
    launcher.send_signal(signal.SIGUSR1)
    (tmp_path / "sent").touch()  # rank 0 listens only now
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, errors
    assert "failed" not in errors
    assert [(tmp_path / f"asked{rank}").read_text() for rank in range(2)] == ["None"] * 2, "what ranks started lives on"


def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(here.name)])
        dist.all_reduce(total)
        (here / f"sum{rank}").write_text(str(total.item()))
        dist.destroy_process_group()
    """
    jobs = []
    for job in ("1", "10"):
        (tmp_path / job).mkdir()
        jobs.append(_start(_script(tmp_path / job, body), 2, tmp_path / job / "logs"))
    for job in jobs:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
    assert {(tmp_path / "1" / f"sum{rank}").read_text() for rank in range(2)} == {"2.0"}
    assert {(tmp_path / "10" / f"sum{rank}").read_text() for rank in range(2)} == {"20.0"}


def test_a_rank_knows_its_place() -> None:
    environment = rank_environment(2, 4, 12345, threads=3, cpu=True)
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "12345")
    assert environment["OMP_NUM_THREADS"] == "3" and environment["TOKENIZERS_PARALLELISM"] == "false"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    assert environment["GLOO_SOCKET_IFNAME"] == (interface or "lo")
    assert rank_environment(0, 1, 1, threads=1, cpu=False).get("GLOO_SOCKET_IFNAME") == interface
