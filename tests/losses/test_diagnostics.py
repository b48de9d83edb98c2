"""What a batch says about itself: each metric against its definition in plain Python, and how sums join over ranks."""

import json
import math
import statistics

import pytest
import torch

from megatron_rlvr.losses import (
    LossError,
    alarms,
    correction_variance,
    finalize_metrics,
    first_corrections,
    flatten_metrics,
    group_variances,
    merge_metrics,
    policy_loss,
    reduction_of,
    step_zero_alarms,
    token_coefficients,
    unflatten_metrics,
)

from .naive import Batch, random_batch, respo

LENGTHS = [5, 300, 0, 9, 3, 700, 12, 1]


def metrics_of(name: str, batch: Batch, **settings) -> dict[str, float]:
    return finalize_metrics(policy_loss(name, **batch.keywords(), **settings)[2])


def effective_size(weights: list[float]) -> float:
    return sum(weights) ** 2 / sum(w * w for w in weights)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(11, LENGTHS, drift=0.1)


def test_ratio_and_kl_are_token_means(batch):
    got = metrics_of("grpo", batch)
    gaps = [b - p for p, b in zip(batch.logprobs.tolist(), batch.behavior_logprobs.tolist(), strict=True)]
    to_reference = [p - r for p, r in zip(batch.logprobs.tolist(), batch.reference_logprobs.tolist(), strict=True)]
    ratios = [math.exp(-gap) for gap in gaps]
    assert got["actor/ppo_kl"] == got["kl/behavior/k1"] == pytest.approx(statistics.fmean(gaps))
    assert got["kl/behavior/k3"] == pytest.approx(statistics.fmean(r - 1 - math.log(r) for r in ratios))
    assert got["kl/reference/k1"] == pytest.approx(statistics.fmean(to_reference))
    assert got["kl/reference/k3"] == pytest.approx(statistics.fmean(math.exp(-x) - 1 + x for x in to_reference))
    assert got["actor/ratio"] == pytest.approx(statistics.fmean(ratios))
    assert (got["actor/ratio/min"], got["actor/ratio/max"]) == pytest.approx((min(ratios), max(ratios)))
    assert got["actor/log_ratio_abs/max"] == pytest.approx(max(map(abs, gaps)))
    clipped = token_coefficients("grpo", **batch.keywords()) == 0
    assert got["actor/pg_clipfrac"] == pytest.approx(float(clipped.double().mean()))


def test_log_weights_by_sign_of_the_advantage(batch):
    got = metrics_of("respo", batch)
    log_w = [(sum(p) - sum(b), a) for p, b, _, a in batch.sequences() if p]
    for sign, chosen in (("positive", [w for w, a in log_w if a > 0]), ("negative", [w for w, a in log_w if a < 0])):
        assert got[f"log_w/{sign}/mean"] == pytest.approx(statistics.fmean(chosen))
        assert got[f"log_w/{sign}/std"] == pytest.approx(statistics.pstdev(chosen))
        assert (got[f"log_w/{sign}/min"], got[f"log_w/{sign}/max"]) == pytest.approx((min(chosen), max(chosen)))


def test_effective_sizes_and_branch_means(batch):
    got = metrics_of("respo", batch)
    kernel = {i: respo(*s[:3], s[3])[0] / s[3] for i, s in enumerate(batch.sequences()) if s[0]}
    raw = [math.exp(sum(p) - sum(b)) for p, b, _, _ in batch.sequences() if p]
    assert got["ess/raw"] == pytest.approx(effective_size(raw))
    assert got["ess/kernel"] == pytest.approx(effective_size(list(kernel.values())))
    assert got["ess/kernel/share"] == pytest.approx(got["ess/kernel"] / 7)
    positive = [w for i, w in kernel.items() if batch.advantages[i] > 0]
    assert got["kernel_weight/positive"] == pytest.approx(statistics.fmean(positive))
    long = [w for i, w in kernel.items() if 256 <= LENGTHS[i] < 512]
    assert got["weight_by_length/256..512"] == pytest.approx(statistics.fmean(long))
    assert got["response/length/mean"] == pytest.approx(sum(LENGTHS) / 7)
    assert (got["response/length/min"], got["response/length/max"]) == (1, 700)


def test_token_level_losses_count_tokens(batch):
    got = metrics_of("pg", batch)
    ratios = torch.exp(batch.logprobs - batch.behavior_logprobs).tolist()
    assert got["ess/raw"] == got["ess/kernel"] == pytest.approx(effective_size(ratios))
    assert got["ess/raw/share"] == pytest.approx(effective_size(ratios) / sum(LENGTHS))


def test_tail_shares_add_to_one_and_amplification_is_their_quotient(batch):
    for name in ("respo", "grpo", "proximal_kl"):
        got = metrics_of(name, batch)
        for sign in ("positive", "negative"):
            shares = {key.rpartition("/")[2]: v for key, v in got.items() if key.startswith(f"tail/{sign}/p/")}
            masses = {key.rpartition("/")[2]: v for key, v in got.items() if key.startswith(f"tail/{sign}/m/")}
            deep, deep_mass = shares.pop("deep"), masses.pop("deep")
            assert sum(shares.values()) == pytest.approx(1) and sum(masses.values()) == pytest.approx(1)
            below = ("below_-20", "-20..-10", "-10..-5", "-5..-2", "-2..-1")
            assert deep == pytest.approx(sum(shares[label] for label in below))
            assert deep_mass == pytest.approx(sum(masses[label] for label in below))
            for label, share in shares.items():
                expected = None if share == 0 else pytest.approx(masses[label] / share)
                assert got.get(f"tail/{sign}/amplification/{label}") == expected


def test_zero_advantages_belong_to_no_branch():
    batch = random_batch(1, [4, 4])
    batch.advantages.zero_()
    got = metrics_of("respo", batch)
    assert not [key for key in got if "positive" in key or "negative" in key]
    json.dumps(got, allow_nan=False)


def test_future_cost_metrics(batch):
    settings = {"beta": 0.3, "horizon": 8, "cost_clip": 0.05}
    got = metrics_of("proximal_kl", batch, **settings)
    costs = (batch.logprobs - batch.reference_logprobs).abs()
    assert got["proximal_kl/saturated"] == pytest.approx(float((costs >= 0.05).double().mean()))
    bounds = [0.3 * 0.05 * min(8, n) for n in LENGTHS if n]
    assert got["proximal_kl/credit_bound"] == pytest.approx(statistics.fmean(bounds))
    assert 0 < got["proximal_kl/credit_abs"] <= got["proximal_kl/credit_abs/max"] <= max(bounds) + 1e-12
    assert "proximal_kl/saturated" not in metrics_of("proximal_kl", batch, cost_clip=None)


def test_reference_metrics_only_when_there_is_one(batch):
    keywords = batch.keywords() | {"reference_logprobs": None}
    assert not [key for key in policy_loss("grpo", **keywords)[2] if "reference" in key]


def test_ranks_join_through_three_vectors(batch):
    parts = [policy_loss("respo", **batch.select(order).keywords())[2] for order in ([0, 1, 2], [3, 4], [5, 6, 7])]
    vectors = [flatten_metrics(part) for part in parts]
    joined = {
        "sum": torch.stack([v["sum"] for v in vectors]).sum(0),
        "max": torch.stack([v["max"] for v in vectors]).amax(0),
        "min": torch.stack([v["min"] for v in vectors]).amin(0),
    }
    got = finalize_metrics(unflatten_metrics(joined, parts[0]))
    assert got == pytest.approx(metrics_of("respo", batch), rel=1e-9, abs=1e-12)
    assert got == pytest.approx(finalize_metrics(merge_metrics(parts)))
    assert [reduction_of(key) for key in ("a/max", "a/min", "a/num", "a_bins")] == ["max", "min", "sum", "sum"]
    assert finalize_metrics({}) == {}


def test_variance_of_the_correction_by_definition():
    lengths = [3, 8, 0, 5, 2, 9]
    batch = random_batch(2, lengths)
    first = [
        0.3 * sum(min(max(p - r, -0.05), 0.05) for p, r in list(zip(logp, ref, strict=True))[:4])
        for logp, _, ref, _ in batch.sequences()
    ]
    expected = (statistics.variance(first[:3]) + statistics.variance(first[3:])) / 2
    sums = correction_variance(batch.logprobs, batch.reference_logprobs, batch.cu_seqlens, 3, horizon=4)
    assert finalize_metrics(sums) == {"proximal_kl/variance/H=4": pytest.approx(expected)}
    with pytest.raises(LossError, match="group_size=4 does not fit 6 responses"):
        correction_variance(batch.logprobs, batch.reference_logprobs, batch.cu_seqlens, 4)


def test_variance_of_unequal_groups_whose_responses_lie_in_different_parts():
    """Three micro-batches, one of them a dummy; groups of 3, 1, 2 and 4, the single one without a variance."""
    lengths, owners = [3, 8, 5, 2, 9, 4, 6, 7, 1, 12], [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    batch = random_batch(4, lengths)
    gaps = [[p - r for p, r in zip(logp, ref, strict=True)] for logp, _, ref, _ in batch.sequences()]
    groups = [
        [0.3 * sum(min(max(x, -0.05), 0.05) for x in gaps[i][:4]) for i in part]
        for part in ([0, 1, 2], [4, 5], [6, 7, 8, 9])
    ]
    parts = []
    for order in ([7, 0, 4], [9, 1, 3, 8, 2, 5, 6], []):
        sequences = torch.tensor([0, *(len(gaps[i]) for i in order)] if order else [0, 0]).cumsum(0)
        log_ratio = torch.tensor([x for i in order for x in gaps[i]], dtype=torch.float64)
        parts.append(
            first_corrections(
                log_ratio,
                torch.zeros_like(log_ratio),
                sequences,
                horizons=[4],
                sequence_index=torch.tensor(order or [-1]),
                num_sequences=len(lengths),
            )
        )
    whole = group_variances(merge_metrics(parts), torch.tensor(owners))
    expected = statistics.fmean(statistics.variance(group) for group in groups)
    assert finalize_metrics(whole) == {"proximal_kl/variance/H=4": pytest.approx(expected)}
    alone = group_variances(merge_metrics(parts), torch.arange(len(lengths)))
    assert finalize_metrics(alone) == {}


def test_no_alarm_on_policy():
    batch = random_batch(3, [60] * 8, drift=0.0)
    for name in ("respo", "grpo", "proximal_kl"):
        got = metrics_of(name, batch, **({"beta": 3.0} if name == "proximal_kl" else {}))
        assert alarms(got) == [] and step_zero_alarms(got, tolerance=1e-3) == []


def one(sentences: list[str]) -> str:
    (sentence,) = sentences
    return sentence


def test_alarms_speak_up():
    drifted = random_batch(4, [40] * 8, drift=4.0)
    drifted.advantages.abs_()
    text = " ".join(alarms(metrics_of("respo", Batch(**vars(drifted) | {"logprobs": drifted.behavior_logprobs + 3.0}))))
    assert "training on them has all but stopped" in text and "100.0% of the tokens sit at the clip or clamp" in text
    few = random_batch(5, [30] * 40, drift=3.0)
    assert "a few samples carry the whole update" in " ".join(alarms(metrics_of("pg", few)))
    short = random_batch(6, [20] * 8, drift=0.0)
    assert "it cannot restrain the policy; raise beta" in one(alarms(metrics_of("proximal_kl", short)))
    assert alarms(metrics_of("proximal_kl", short, beta=3.0, cost_clip=0.25)) == []
    masked = random_batch(7, [20] * 8, drift=0.0)
    masked.behavior_logprobs[3] = -math.inf
    assert "have log-probability -inf" in one(alarms(metrics_of("respo", masked)))
    off = random_batch(8, [20] * 8, drift=0.5)
    alone = finalize_metrics(policy_loss("grpo", **off.keywords() | {"reference_logprobs": None})[2])
    assert len(step_zero_alarms(alone, tolerance=1e-3)) == 2
    recomputed = metrics_of("grpo", random_batch(9, [20] * 8, drift=0.0)) | {"refresh/logprob_gap/mean": 0.2}
    assert "differ by 0.2 nats" in one(step_zero_alarms(recomputed, tolerance=1e-3))
    assert "more than rounding makes" in one(alarms(recomputed))


def test_clips_around_an_older_reference_are_no_broken_law():
    fresh = random_batch(10, [20] * 8, drift=0.0)
    older = Batch(**vars(fresh) | {"reference_logprobs": fresh.logprobs.detach() - 0.4})
    clipped = metrics_of("grpo", older)
    assert clipped["actor/pg_clipfrac"] > 0.1 and step_zero_alarms(clipped, tolerance=1e-3) == []
    same = Batch(**vars(fresh) | {"reference_logprobs": fresh.logprobs.detach().clone()})
    off = metrics_of("grpo", Batch(**vars(same) | {"behavior_logprobs": fresh.logprobs.detach() - 0.4}))
    assert "differ by 0.4 nats" in one(step_zero_alarms(off, tolerance=1e-3))


@pytest.mark.parametrize("name", ["respo", "vespo", "grpo", "gspo", "pg", "cispo", "proximal_kl"])
def test_every_loss_says_when_all_its_weights_sit_at_a_clamp(name):
    far = random_batch(11, [20] * 8, drift=0.0)
    far.behavior_logprobs = far.logprobs.detach() - 30.0
    assert any("sit at the clip or clamp" in sentence for sentence in alarms(metrics_of(name, far)))


def test_the_spread_of_the_correction_has_the_losses_own_tail():
    batch = random_batch(12, [9, 4, 7, 12])
    keywords = {"horizon": 3, "cost_clip": 0.05, "beta": 0.3, "tail_decay": True}
    first = []
    for logp, _, ref, _ in batch.sequences():
        n, e = len(logp), 2  # the unit weights end at position 2
        weights = [1.0 if j <= e else (n - 1 - j) / (n - 1 - e) for j in range(n)]
        gaps = [min(max(p - r, -0.05), 0.05) for p, r in zip(logp, ref, strict=True)]
        first.append(0.3 * sum(w * gap for w, gap in zip(weights, gaps, strict=True)))
    sums = correction_variance(batch.logprobs, batch.reference_logprobs, batch.cu_seqlens, 2, **keywords)
    expected = (statistics.variance(first[:2]) + statistics.variance(first[2:])) / 2
    assert finalize_metrics(sums) == {"proximal_kl/variance/H=3": pytest.approx(expected)}


def test_one_token_routed_elsewhere_by_a_tie_does_not_stop_a_run():
    tied = random_batch(9, [60] * 8, drift=0.0)
    tied.logprobs[7] -= 0.006
    assert step_zero_alarms(metrics_of("respo", tied), tolerance=1e-4) == []
    shifted = random_batch(9, [60] * 8, drift=0.0)
    shifted.logprobs -= 0.006
    assert "differ by 0.006 nats per token" in one(step_zero_alarms(metrics_of("respo", shifted), tolerance=1e-4))
