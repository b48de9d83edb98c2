"""The pool against functions that sleep, crash, fill memory and hang up, and against hostile responses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rlvr.rewards import VerifierPool
from megatron_rlvr.rewards.judges import math_verify_judge
from megatron_rlvr.types import UserError
from tests.rewards.hostile import KINDS, hostile

OBEDIENT = "tests.rewards.functions:obedient"
SHARED_DATA = Path(__file__).resolve().parents[2] / "../shared/data"
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(2, timeout=1.5, memory_gb=0.25, function=OBEDIENT) as pool:
        yield pool


@pytest.fixture(scope="module")
def math_pool() -> Iterator[VerifierPool]:
    with VerifierPool(2, memory_gb=0.5) as pool:
        yield pool


def processes() -> list[psutil.Process]:
    """The fork servers and workers that this test process has started."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if any("megatron_rlvr.rewards.worker" in word for word in p.cmdline())]


def ended(pids: list[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_every_way_to_misbehave_costs_its_own_pair_alone(pool: VerifierPool) -> None:
    before = dict(pool.counts)
    bad = {
        "sleep 60": ("timeout", "took more than 1.5 s"),
        "exit 3": ("crashed", "exited with code 3"),
        "exit 0": ("crashed", "exited with code 0"),
        f"signal {signal.SIGSEGV}": ("killed", f"was ended by signal {signal.SIGSEGV}"),
        f"signal {signal.SIGTERM}": ("killed", f"was ended by signal {signal.SIGTERM}"),
        "hang-up now": ("killed", f"was ended by signal {signal.SIGKILL}"),
        "raise something": ("crashed", "ZeroDivisionError: something"),
        "leave 4": ("crashed", "SystemExit: 4"),
        f"allocate {512 * MIB}": ("killed", "ran into its memory limit"),
    }
    pairs = []
    for number, text in enumerate(bad):
        pairs += [(f"right {number}", f"right {number}"), (text, ""), (f"wrong {number}", "")]
    verdicts = pool.verify(pairs)
    assert [v.outcome for v in verdicts[::3]] == ["correct"] * len(bad)
    assert [v.outcome for v in verdicts[2::3]] == ["wrong"] * len(bad)
    assert {text: (v.outcome, v.detail) for text, v in zip(bad, verdicts[1::3], strict=True)} == bad
    assert {v.score for v in verdicts} == {1.0, -1.0} and [v.score for v in verdicts[1::3]] == [-1.0] * len(bad)
    counted = {outcome: pool.counts[outcome] - before[outcome] for outcome in pool.counts}
    assert counted == {"correct": 9, "wrong": 9, "unparsable": 0, "timeout": 1, "killed": 4, "crashed": 4}


def test_memory_within_the_limit_is_given_and_a_worker_that_grew_is_replaced(pool: VerifierPool) -> None:
    assert pool.verify([(f"allocate {100 * MIB}", "")])[0].score == 100 * MIB


def test_parts_come_back_beside_correctness(pool: VerifierPool) -> None:
    (verdict,) = pool.verify([("parts please", "")])
    assert (verdict.outcome, verdict.score, verdict.parts) == ("correct", 1.0, {"brevity": -0.25, "language": 0.5})


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("text five", "returned 'correctness': 'five', not a finite number; write it as def"),
        ("infinite", "returned 'correctness': inf, not"),
        ("nothing", "returned a dict without 'correctness'"),
    ],
)
def test_a_function_that_returns_no_reward_stops_the_run(pool: VerifierPool, response: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pool.verify([("a", "a"), (response, ""), ("b", "b")] * 20)
    assert [v.outcome for v in pool.verify([("a", "a"), ("b", "c")] * 3)] == ["correct", "wrong"] * 3


def test_order_is_kept_whatever_takes_long(pool: VerifierPool) -> None:
    pairs = [(f"sleep {0.2 if n % 7 == 0 else 0}", "") if n % 2 else (f"r{n}", f"r{n}") for n in range(60)]
    assert [v.outcome for v in pool.verify(pairs)] == ["wrong" if n % 2 else "correct" for n in range(60)]
    assert pool.verify([]) == []


def test_deadlines_are_for_one_pair_not_for_a_message(pool: VerifierPool) -> None:
    """Sixteen pairs of 0.15 s share two messages: together past the deadline, each far below."""
    assert {v.outcome for v in pool.verify([("sleep 0.15", "")] * 32)} == {"wrong"}


def test_workers_and_server_that_die_while_idle_are_replaced(pool: VerifierPool) -> None:
    pool.verify([("a", "a")] * 64)
    server, *workers = processes()
    workers[0].kill()
    assert ended([workers[0].pid])
    assert {v.outcome for v in pool.verify([("a", "a")] * 64)} == {"correct"}
    server, *workers = processes()
    server.kill()
    assert ended([server.pid, *(w.pid for w in workers)])
    assert {v.outcome for v in pool.verify([("a", "a")] * 64)} == {"correct"}
    assert len(processes()) == 3


def test_threads_and_event_loops_take_turns(pool: VerifierPool) -> None:
    results: dict[str, list[str]] = {}

    def judge(name: str) -> None:
        results[name] = [v.outcome for v in pool.verify([(name, "left"), (name, "right")] * 10)]

    async def both() -> list[list[str]]:
        verdicts = await asyncio.gather(pool.verify_async([("x", "x")] * 5), pool.verify_async([("x", "y")] * 5))
        return [[v.outcome for v in part] for part in verdicts]

    threads = [threading.Thread(target=judge, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    assert asyncio.run(both()) == [["correct"] * 5, ["wrong"] * 5]
    for thread in threads:
        thread.join()
    assert results == {"left": ["correct", "wrong"] * 10, "right": ["wrong", "correct"] * 10}


def test_signals_of_the_caller_stay_as_they_were(math_pool: VerifierPool) -> None:
    """math-verify alone would clear this alarm and handler."""
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, 500)
        assert math_pool.verify([(r"$\boxed{\sqrt{8}}$", r"2\sqrt{2}")])[0].outcome == "correct"
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 400 and signal.getsignal(signal.SIGALRM) is mine
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_a_forked_child_and_a_closed_pool_are_refused(pool: VerifierPool) -> None:
    child = os.fork()
    if child == 0:
        try:
            pool.verify([("a", "a")])
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    closed = VerifierPool(1)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        closed.verify([("a", "a")])
    with pytest.raises(RuntimeError, match="closed"):
        closed.start()
    with pytest.raises(ValueError, match="workers"):
        VerifierPool(0)


def test_a_function_that_cannot_be_imported_is_named_at_the_start() -> None:
    with VerifierPool(1, function="tests.rewards.functions:absent") as pool, pytest.raises(UserError) as error:
        pool.start()
    assert str(error.value).startswith("rewards.function=tests.rewards.functions:absent cannot be imported")


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    """A trainer that is killed while a worker hangs leaves no process behind."""
    program = tmp_path / "trainer.py"  # without a main guard: workers must not run it again
    program.write_text(
        "import json, sys, threading, time, psutil\n"
        "from megatron_rlvr.rewards import VerifierPool\n"
        f"pool = VerifierPool(1, function={OBEDIENT!r})\n"
        "threading.Thread(target=pool.verify, args=([('sleep 100', '')],), daemon=True).start()\n"
        "deadline = time.monotonic() + 60\n"
        "while len(found := psutil.Process().children(recursive=True)) < 2 and time.monotonic() < deadline:\n"
        "    time.sleep(0.02)\n"
        "print(json.dumps([p.pid for p in found]), flush=True)\n"
        "time.sleep(100)\n"
    )
    root = Path(__file__).resolve().parents[2]
    trainer = subprocess.Popen(
        [sys.executable, program], cwd=root, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert trainer.stdout is not None
    pids = json.loads(trainer.stdout.readline())
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    trainer.kill()
    trainer.wait()
    assert ended(pids)
    trainer.stdout.close()


def test_verdicts_are_those_of_math_verify(math_pool: VerifierPool) -> None:
    path = SHARED_DATA / "math500.jsonl"
    if not path.exists():
        pytest.skip("the shared problem sets are not here")
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()[::20]]
    pairs = [(f"We get $\\boxed{{{said}}}$.", answer) for n in (0, 1) for said, answer in zip(answers[n:], answers)]  # noqa: B905
    judge = math_verify_judge()
    verdicts = [v.outcome for v in math_pool.verify(pairs)]
    assert verdicts == [judge(*pair).outcome for pair in pairs]
    assert verdicts.count("correct") >= 24 and verdicts.count("wrong") >= 18


def _survives(count: int, seconds: float) -> None:
    with VerifierPool(2, timeout=seconds, memory_gb=0.5) as pool:
        pool.start()
        start = time.monotonic()
        verdicts = pool.verify([(response, "43") for response in hostile(count)])
        assert time.monotonic() - start < count * (seconds + 1.0)
        assert len(verdicts) == count and "correct" not in {v.outcome for v in verdicts}
        assert sum(p.memory_info().rss for p in processes()) < 2 * 700 * MIB
        pool.timeout = 60
        pairs = [(r"$\boxed{\frac{86}{2}}$", "43.0"), ("?", "43")]
        assert [v.outcome for v in pool.verify(pairs)] == ["correct", "unparsable"]


def test_hostile_responses_cost_bounded_time_and_memory() -> None:
    _survives(len(KINDS), 0.1)


@pytest.mark.nightly
def test_a_thousand_hostile_responses_cost_bounded_time_and_memory() -> None:
    _survives(1000, 1.0)
