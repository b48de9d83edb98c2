"""Replay in real runs (Megatron and vLLM): ratio 0 is the base algorithm bit for bit; what a run with prefixes does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_rlvr.replay import PrefixBuffer
from tests.e2e.commands import REPOSITORY, run_python
from tests.e2e.test_golden_run import prepare, train

sys.path.insert(0, str(REPOSITORY / "examples/vsr_hard"))

import study

SHORT = ("trainer.updates=4", "trainer.eval_problems=8")
REPLAY = ("replay.ratio=0.5", "loss.name=grpo")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A warmed-up model, and a right response to every training problem."""
    root = tmp_path_factory.mktemp("vsr")
    prepare(root)
    problems = [json.loads(line) for line in (root / "data/train.jsonl").read_text().splitlines()]
    experts = [{"problem": row["problem"], "response": worked(row["problem"])} for row in problems]
    (root / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in experts))
    return root


def worked(problem: str) -> str:
    terms = [int(term) for term in problem.rstrip("=").split("+")]
    totals = [sum(terms[: i + 1]) for i in range(len(terms))]
    return f"{','.join(map(str, totals))} \\boxed{{{totals[-1]}}}"


def run(place: Path, name: str, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Metrics and rollout records of a short run."""
    rows = train(place / "golden.yaml", place / name, *SHORT, *overrides)
    files = sorted((place / name / "rollouts").glob("*.jsonl"))
    return rows, [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def replayed(place):
    experts = f"replay.experts={place}/experts.jsonl"
    return run(place, "vsr", *REPLAY, experts, "trainer.save_interval=2")


@pytest.fixture(scope="module")
def base(place):
    return run(place, "grpo", "loss.name=grpo", *study.METHODS["grpo"].overrides)


@pytest.fixture(scope="module")
def uniform(place):
    experts = f"replay.experts={place}/experts.jsonl"
    return run(place, "uniform", *REPLAY, experts, *study.METHODS["uniform"].overrides)


def updates(rows):
    return [row for row in rows if "actor/pg_loss" in row]


def test_ratio_zero_is_the_base_algorithm_bit_for_bit(place, base):
    zero = run(
        place, "zero", "loss.name=grpo", "replay.ratio=0", "replay.stride=3", "replay.recency_window=2",
        "replay.sampling=uniform", "replay.static=true", f"replay.experts={place}/experts.jsonl",
    )  # fmt: skip
    assert zero == base and len(base[1]) == 4 * 8 * 8
    assert not any(name.startswith("replay/") for row in zero[0] for name in row)


def test_half_of_every_update_starts_from_experts_prefixes_that_are_never_trained_on(place, replayed):
    rows, records = replayed
    tokenizer = AutoTokenizer.from_pretrained(place / "init")
    first = [r for r in records if r["step"] == records[0]["step"] and r["replayed"]]
    assert len(first) == 8 * 8
    for record in first:
        prefix = tokenizer.encode(worked(record["prompt"]), add_special_tokens=False)[: record["prefix_length"]]
        assert record["response"].startswith(tokenizer.decode(prefix))
        assert record["response_length"] + record["prefix_length"] <= 48
    assert len({r["prefix_length"] for r in first}) > 2
    for row in updates(rows):
        assert (row["replay/groups/fresh"], row["replay/groups/replayed"]) == (4, 4)
    sampled = sum(record["response_length"] for record in records)
    assert sum(row["actor/action_tokens"] for row in updates(rows)) == sampled
    assert updates(rows)[-1]["rollout/total_tokens"] == sampled
    assert sum(row["rollout/generated_tokens"] for row in updates(rows)) == sampled


def test_metrics_tell_of_buffer_cache_and_both_kinds_of_groups(replayed):
    rows, records = replayed
    last = updates(rows)[-1]
    assert last["replay/drawn"] == 8 and last["replay/shortfall"] == 0
    assert last["replay/trajectories"] == 1024 and 0 < last["replay/score/mean"] < 0.5
    assert 0 <= last["rollout/prefix_cache_hits"] < 1  # contexts of less than a cache block of 32 tokens find nothing
    newest = max(record["step"] for record in records)
    for origin, flag in (("fresh", False), ("replayed", True)):
        verdicts = [r["score"] > 0 for r in records if r["step"] == newest and r["replayed"] is flag]
        found = [row[f"replay/accuracy/{origin}"] for row in updates(rows)[-2:]]
        assert sum(found) / 2 == pytest.approx(sum(verdicts) / len(verdicts))


def test_replay_of_either_kind_samples_fewer_tokens_than_grpo(place, base, replayed, uniform):
    """One seed of examples/vsr_hard's study, a few updates of each method, with curves read as the study reads them."""
    curves = {name: study.read_curve(place / name) for name in ("grpo", "uniform", "vsr")}
    for name, (rows, records) in (("grpo", base), ("uniform", uniform), ("vsr", replayed)):
        prefixes = [record["prefix_length"] for record in records if record["replayed"]]
        assert len(prefixes) == (0 if name == "grpo" else len(records) / 2) and len(records) == 4 * 8 * 8
        assert curves[name].tokens == sum(record["response_length"] for record in records) / 4
        if name != "grpo":
            assert sum(prefixes) > 4 * len(prefixes) and all(row["replay/drawn"] == 8 for row in updates(rows))
            assert curves[name].tokens < 0.85 * curves["grpo"].tokens
    assert all(row["replay/expert_share"] == 1 for row in updates(uniform[0]))


def test_successes_enter_the_buffer_which_a_later_run_on_two_ranks_goes_on_with(place, replayed):
    rows, _ = replayed
    saved = place / "vsr/checkpoints/update_000004/replay.safetensors"
    buffer = PrefixBuffer(window=None, seed=7)
    buffer.load(saved)
    stored = buffer.statistics(2)
    assert stored["replay/size"] == updates(rows)[-1]["replay/size"]
    assert stored["replay/expert_share"] < 1  # a fresh success took an expert's place
    again, records = run(place, "again", *REPLAY, f"replay.buffer={saved}", "actor.data_parallel=2")
    assert updates(again)[0]["replay/groups/replayed"] == 4
    first = [r for r in records if r["step"] == records[0]["step"] and r["replayed"]]
    drawn = [(p.prompt_id, p.position) for p in buffer.draw(8)]
    assert [(r["prompt_id"], r["prefix_length"]) for r in first[::8]] == drawn


def test_an_expert_file_with_a_foreign_problem_is_refused_before_training(place):
    (place / "foreign.jsonl").write_text(json.dumps({"problem": "1+1+1=", "response": "3"}) + "\n")
    done = run_python(
        "-m", "megatron_rlvr", "train", place / "golden.yaml", f"model.path={place}/warm", f"run_dir={place}/foreign",
        *REPLAY, f"replay.experts={place}/foreign.jsonl", check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "is not in data.train" in done.stderr + done.stdout
