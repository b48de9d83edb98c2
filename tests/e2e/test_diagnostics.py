"""What a run says of itself: reference policy, old log-probs, gaps, alarms, and every name of the schema."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from megatron_rlvr.observability.metrics import SCHEMA, Schema
from tests.e2e.commands import REPOSITORY, run_python

GROUP = 4
HORIZONS = [1, 4, "full"]
FAR = {"optimizer": {"lr": 0.1}, "trainer": {"updates": 2}}  # one update carries the learner out of sight
RUNS = {
    "every_third": {"reference": {"refresh_interval": 3}},
    "each_batch": {"reference": {"refresh_interval": None}},
    "bf16": {
        "loss": {"name": "respo", "variance_horizons": [], "old_logprobs": "recompute"},
        "rollout": {"precision": "bf16"},
        "trainer": {"updates": 2},
    },
    "float32": {
        "loss": {"name": "respo", "variance_horizons": [], "old_logprobs": "recompute"},
        "trainer": {"updates": 2},
    },
    "clamped": {"loss": {"name": "respo", "variance_horizons": []}, **FAR},
    "few": {
        "loss": {"name": "pg", "variance_horizons": []},
        "optimizer": {"lr": 0.3},
        "trainer": {"updates": 4, "rollout_reuse": 4},
    },
}
BY_HAND = {
    "decoupled": {
        "loss": {"name": "grpo"},
        "reference": {"enabled": True, "refresh_interval": None},
        "rollout": {"refresh_interval": 4},
        "actor": {"batch_layout": "padded", "micro_batch_tokens": 4096},
    },
    "not_a_number": {"actor": {"micro_batch_tokens": 64}},
    "stops": {},
    "warns": {"rollout": {"precision": "bf16"}},
}
# names of the schema that none of these runs has a reason to log, and when a run does
CONDITIONS = {
    "perf/max_memory_allocated_gb": "CUDA",
    "perf/max_memory_reserved_gb": "CUDA",
    "rollout/prefix_cache_hits": "an engine with a prefix cache, and replay",
    "replay/": "replay.ratio above 0",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(rows of every run's metrics.jsonl, what the worker wrote)"""
    root = tmp_path_factory.mktemp("diagnostics")
    sizes = ("--layers", "2", "--hidden", "32", "--head-dim", "8", "--max-positions", "64")
    run_python(REPOSITORY / "tools/make_tiny_model.py", root / "init", *sizes)
    counts = ("--train", "5", "--heldout", "4", "--demonstrations", "256")
    run_python(REPOSITORY / "examples/arithmetic.py", "--out", root, *counts)
    config = {
        "run_dir": str(root),
        "model": {"path": str(root / "warm")},
        "data": {"train": str(root / "train.jsonl"), "max_prompt_length": 16},
        "rollout": {
            "engine": "transformers",
            "precision": "float32",
            "group_size": GROUP,
            "max_response_length": 24,
            "max_num_seqs": 64,
        },
        "loss": {"name": "proximal_kl", "variance_horizons": HORIZONS},
        "rewards": {"overlong_start": 4},  # lengths differ within a group, and so do rewards
        "actor": {"dtype": "float32", "micro_batch_tokens": 128},
        "optimizer": {"lr": 0.01, "warmup_fraction": 0.0},
        "trainer": {"updates": 6, "mini_batch_size": 2, "rollout_reuse": 2},
        "logging": {"progress": False},
        "sft": {
            "demonstrations": str(root / "demonstrations.jsonl"),
            "output": str(root / "warm"),
            "updates": 40,
            "batch_size": 32,
            "lr": 0.01,
        },
    }
    job = {"config": config, "folder": str(root), "runs": RUNS, "by_hand": BY_HAND}
    (root / "job.json").write_text(json.dumps(job))
    run_python("-m", "tests.e2e.diagnostics_worker", root / "job.json")
    rows = {
        name: [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("sft", *RUNS)
    }
    return rows, json.loads((root / "result.json").read_text())


@pytest.mark.parametrize(
    ("name", "versions"), [("every_third", [0, 0, 0, 3, 3, 3]), ("each_batch", [0, 0, 2, 2, 4, 4])]
)
def test_the_reference_is_refreshed_when_due_and_measured_from(said, name, versions):
    rows = said[0][name]
    assert [row["reference/version"] for row in rows] == versions
    assert [row["reference/age"] for row in rows] == [update - v for update, v in enumerate(versions)]
    for row in rows:
        measured = [row[f"proximal_kl/variance/H={horizon}"] for horizon in HORIZONS]
        if row["reference/age"] == 0:  # the learner itself: not small, but nothing
            assert row["kl/reference/k1"] == row["kl/reference/k3"] == 0
            assert row["proximal_kl/credit_abs/max"] == 0 and measured == [0, 0, 0]
        else:
            assert row["kl/reference/k3"] > 1e-3
            assert row["proximal_kl/credit_abs"] > 1e-4 and measured[-1] > 1e-6


def test_swapping_the_reference_in_leaves_the_learner_bit_equal_and_scores_the_copy(said):
    result = said[1]["decoupled"]
    assert result["weights_unchanged"]
    assert result["scored"] == result["reference"] != result["learner"]


def test_decoupled_grpo_clips_around_the_reference_and_corrects_to_it(said):
    """SPEC 3 written out on the log-probs of three different policies."""
    result = said[1]["decoupled"]
    bounds = result["cu_seqlens"]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    advantages = [a for a, n in zip(result["advantages"], lengths, strict=True) for _ in range(n)]

    def loss(reference):
        total, clipped = 0.0, 0
        for theta, k, behavior, a in zip(result["learner"], reference, result["behavior"], advantages, strict=True):
            rho = math.exp(theta - k)
            off = (a > 0 and rho > 1.2) or (a < 0 and rho < 0.8)
            clipped += off
            total += 0.0 if off else math.exp(k - behavior) * rho * a * theta
        return -total / len(advantages), clipped / len(advantages)

    expected, share = loss(result["reference"])
    metrics = result["metrics"]
    assert metrics["reference/age"] == 1 and metrics["staleness/max"] == 3
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(share)
    assert abs(loss(result["behavior"])[0] - expected) > 1e-2 * abs(expected)


def test_variance_and_padding_of_an_update_are_those_of_its_tokens(said):
    result = said[1]["decoupled"]
    gaps = [t - k for t, k in zip(result["learner"], result["reference"], strict=True)]
    bounds = list(itertools.pairwise(result["cu_seqlens"]))
    for horizon in HORIZONS:
        window = 10**6 if horizon == "full" else horizon
        first = [0.3 * sum(min(max(x, -0.05), 0.05) for x in gaps[a:b][:window]) for a, b in bounds]
        groups = [first[i : i + GROUP] for i in range(0, len(first), GROUP)]
        expected = statistics.fmean(statistics.variance(group) for group in groups)
        assert result["metrics"][f"proximal_kl/variance/H={horizon}"] == pytest.approx(expected, rel=1e-4)
    fed = result["fed"]
    assert result["metrics"]["actor/padding"] == pytest.approx(1 - sum(fed) / (len(fed) * max(fed)))
    assert result["metrics"]["actor/padding"] > 0.01


def test_recomputed_old_logprobs_hide_the_engines_gap_from_the_ratio_but_not_from_the_log(said):
    first, second = said[0]["bf16"]
    assert 1e-4 < first["rollout/logprob_gap"] < 0.1 < 10 * first["rollout/logprob_gap/max"]
    assert first["actor/ratio"] == 1 and first["actor/ppo_kl"] == 0 and first["actor/log_ratio_abs/max"] == 0
    assert second["actor/log_ratio_abs/mean"] > 1e-3  # the ratio of an update to the learner that began the batch
    for row in said[0]["float32"]:
        assert row["rollout/logprob_gap/max"] < 1e-5
    assert said[0]["float32"][0]["actor/ratio"] == 1


def test_every_refresh_is_followed_by_the_gap_it_left(said):
    for name, rows in said[0].items():
        for row in rows:
            measured = row.get("rollout/logprob_gap", row.get("actor/log_ratio_abs/mean"))
            assert row.get("refresh/logprob_gap/mean") == (measured if row.get("staleness/max") == 0 else None), name


def test_a_nan_names_its_response_and_stops_the_update(said):
    result = said[1]["not_a_number"]
    index = GROUP + 2
    assert result["message"].startswith(f"NonFiniteLogprobError: response {index} of the mini-batch: behavior_logprobs")
    assert result["weights_unchanged"] and result["version"] == 0


def test_alarms_reach_the_terminal_of_the_run_that_causes_them(said):
    stderr = said[1]["stderr"]
    row = said[0]["every_third"][0]
    bound, length = row["proximal_kl/credit_bound"], row["response/length/mean"]
    assert bound == pytest.approx(0.3 * 0.05 * length)
    beside = f"mean length {length:.0f} tokens) beside advantages of size {row['actor/advantage_abs']:.3g}"
    assert f"alarm at update 1: The KL credit can reach {bound:.3g} at most" in stderr["every_third"]
    assert f"{beside}: it cannot restrain the policy" in stderr["every_third"]
    assert stderr["every_third"].count("it cannot restrain the policy") == 1  # said once, however often it is true
    assert "alarm at update 2: 100.0% of the tokens sit at the clip or clamp of the loss" in stderr["clamped"]
    assert ": The effective sample size after the kernel is" in stderr["few"]
    assert "alarm at update 1" not in stderr["float32"]


def test_a_broken_step_zero_law_stops_a_float32_run_and_is_said_in_a_mixed_one(said):
    assert said[1]["stops"].startswith("RuntimeError: Right after a refresh the trainer and the sampler differ by")
    assert "alarm at update 1: Right after a refresh the trainer and the sampler differ by" in said[1]["warns"]


def test_speeds_memory_and_epochs_are_what_they_say(said):
    rows = said[0]["every_third"]
    assert [row["training/epoch"] for row in rows] == [0, 0, 1, 1, 2, 2]  # 5 problems, 4 of them a batch
    sampled = 0
    for row in rows:
        trained = row["perf/update_throughput"] * row["timing_s/update_actor"]
        assert trained == pytest.approx(row["actor/action_tokens"])
        assert row["perf/time_per_step"] == row["timing_s/step"]
        assert 0.1 < row["perf/cpu_memory_used_gb"] < 20
        assert ("rollout/throughput" in row) == ("timing_s/gen" in row) == (row["staleness/max"] == 0)
        if "timing_s/gen" in row:
            sampled += row["rollout/throughput"] * row["timing_s/gen"]
            assert sampled == pytest.approx(row["rollout/total_tokens"])
        assert row["rollout/attempts"] == 1 and row["rollout/dropped_groups"] == 0


def test_every_name_of_the_schema_is_logged_by_some_run(said):
    logged = {name for rows in said[0].values() for row in rows for name in row} - {"step"}
    Schema().check(logged)
    silent = {name for metric in SCHEMA if not metric.is_family for name in metric.names} - logged
    assert {name for name in silent if not name.startswith(tuple(CONDITIONS))} == set()
    assert all(any(name.startswith(condition) for name in silent) for condition in CONDITIONS)
