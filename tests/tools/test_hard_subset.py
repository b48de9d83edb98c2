"""Which problems are kept, and that a killed job ends as one that ran through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "tools")]

import hard_subset  # noqa: E402
from markov_model import ANSWER, success_probability, write_job  # noqa: E402
from sampler import Sampler, model_digest  # noqa: E402

from megatron_rlvr.evaluation.journal import Journal  # noqa: E402
from megatron_rlvr.rewards import Scorer  # noqa: E402
from megatron_rlvr.rollout import Completion, SamplingSettings  # noqa: E402
from megatron_rlvr.types import Prompt, UserError  # noqa: E402

LIMIT = 24


class Scripted:
    """Problem p is right in its first `right[p]` samples, in 3 tokens; wrong in 1."""

    version = 0

    def __init__(self, right):
        self.right, self.calls = right, []

    def generate(self, contexts, n, sampling):
        self.calls.append(([ids[0] for ids in contexts], sampling.seed))
        return [[self._completion(sample < self.right[ids[0]]) for sample in range(n)] for ids in contexts]

    def _completion(self, right):
        tokens = np.array([1, 1, 1] if right else [0], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def sampler_of(engine):
    decode = lambda ids: "\\boxed{yes}" if ids[0] else "\\boxed{no}"  # noqa: E731
    return Sampler(engine, decode, Scorer("strict_box"), SamplingSettings(8), seed=5)


def test_successes_are_counted_per_problem_and_finished_calls_are_not_sampled_again(tmp_path):
    right = [0, 1, 2, 4, 1, 0, 3]
    prompts = [Prompt(f"file:{p + 1}", (p,), "yes") for p in range(7)]
    engine = Scripted(right)
    with Journal(tmp_path / "all", {}) as journal:
        hard_subset.sample_successes(sampler_of(engine), prompts, 4, 2, journal, progress=False)
        rows = journal.rows
    assert hard_subset.successes_of(rows) == right
    assert [problems for problems, _ in engine.calls] == [[0, 1], [2, 3], [4, 5], [6]]
    again = Scripted(right)
    with Journal(tmp_path / "part", {}) as journal:
        for row in (rows[2], rows[0]):
            journal.append(row)
        hard_subset.sample_successes(sampler_of(again), prompts, 4, 2, journal, progress=False)
        assert hard_subset.successes_of(journal.rows) == right
    assert again.calls == [engine.calls[1], engine.calls[3]]  # problems and seeds
    assert len({seed for _, seed in engine.calls}) == 4

    summary = hard_subset.summarise(rows, samples=4, most=1)
    assert summary["histogram"] == [2, 2, 1, 1, 1] and (summary["kept"], summary["share_kept"]) == (4, 4 / 7)
    assert summary["mean_success"] == pytest.approx(11 / 28)
    assert summary["mean_response_length"] == pytest.approx((3 * 11 + 1 * 17) / 28)
    assert "kept 4 of 7 problems (57.1%) with at most 1 successes in 4 samples" in hard_subset.show(summary)


def test_kept_lines_are_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [b'{"problem":  "a", "answer": 1.0}\r\n', b"\n", '{"answer": "é", "problem": "b"}\n'.encode(), b'{"x":1}']
    path.write_bytes(b"".join(lines))
    prompts = [Prompt(f"problems:{line}", (1,), "") for line in (1, 3, 4)]
    assert hard_subset.kept_lines(path, prompts, [1, 2, 0], most=1) == lines[0] + lines[3]
    assert hard_subset.kept_lines(path, prompts, [2, 1, 3], most=1) == lines[2]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A config for the transformers engine, with problems that are never, seldom and often solved."""
    root = tmp_path_factory.mktemp("hard")
    rows = [{"problem": f"{n}{'=:;'[n % 3]}", "answer": ANSWER if n % 4 else "2"} for n in range(36)]
    write_job(root, rows, LIMIT)
    return root, rows


def arguments(root, out, *more):
    return [
        str(root / "run.yaml"),
        *("--out", str(out), "--samples", "48", "--most", "12", "--responses-per-call", "48"),
        *more,
    ]


def outputs(out):
    return [out.with_suffix(suffix).read_bytes() for suffix in (".jsonl", ".summary.json", ".state.jsonl")]


def test_a_job_killed_midway_ends_as_one_that_ran_through(job, capsys):
    root, rows = job
    hard_subset.main(arguments(root, root / "through.jsonl"))
    assert "kept" in capsys.readouterr().out

    command = [sys.executable, str(ROOT / "tools" / "hard_subset.py"), *arguments(root, root / "killed.jsonl")]
    state = root / "killed.state.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if state.exists() and state.read_bytes().count(b"\n") > 4:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    left = state.read_bytes()
    assert 4 < left.count(b"\n") < 1 + len(rows) and not (root / "killed.jsonl").exists()

    hard_subset.main(arguments(root, root / "killed.jsonl"))
    assert state.read_bytes().startswith(left[: left.rindex(b"\n") + 1])
    assert outputs(root / "killed.jsonl") == outputs(root / "through.jsonl")

    with pytest.raises(UserError, match=r"rollout.temperature 1.0, but it is now 0.5; go on with the same settings"):
        hard_subset.main(arguments(root, root / "killed.jsonl", "rollout.temperature=0.5"))
    before = outputs(root / "killed.jsonl")[2]
    hard_subset.main(arguments(root, root / "killed.jsonl", "--most", "0"))  # filters what is there
    assert outputs(root / "killed.jsonl")[2] == before
    kept = [json.loads(line) for line in (root / "killed.jsonl").read_text().splitlines()]
    assert set(map(str, rows[::4])) <= set(map(str, kept))


def test_successes_are_those_of_the_chain(job):
    """Successes over the problems of each beginning against the chain's own probability."""
    root, rows = job
    out = root / "chain.jsonl"
    hard_subset.main([*arguments(root, out), "--responses-per-call", "960"])
    state = [json.loads(line) for line in out.with_suffix(".state.jsonl").read_text().splitlines()][1:]
    successes = hard_subset.successes_of(state)
    assert [row["first"] for row in state] == [0, 20]
    for start in "=:;":
        right = [
            s for s, row in zip(successes, rows, strict=True) if row["problem"].endswith(start) and row["answer"] == "1"
        ]
        p = success_probability(start, LIMIT)
        error = (p * (1 - p) / (48 * len(right))) ** 0.5
        assert sum(right) / (48 * len(right)) == pytest.approx(p, abs=4 * error) and 0.05 < p < 0.95
    assert all(s == 0 for s, row in zip(successes, rows, strict=True) if row["answer"] == "2")
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert kept == [row for row, s in zip(rows, successes, strict=True) if s <= 12]


def test_faults_are_one_sentence_and_leave_nothing(job, tmp_path):
    root, _ = job
    out = tmp_path / "x.jsonl"
    for more, message in (
        (["--most", "48"], "--most is 48"),
        (["data.train=null"], "data.train is unset"),
        (["rollout.max_response_length=4000"], "max_position_embeddings"),
    ):
        with pytest.raises(UserError, match=message):
            hard_subset.main(arguments(root, out, *more))
        assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    with pytest.raises(UserError, match="exists and was not written by this tool"):
        hard_subset.main(arguments(root, out))
    assert out.read_text() == "mine"
    digest = model_digest(root / "model")
    config = root / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert model_digest(root / "model") != digest
