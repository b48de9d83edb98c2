"""The held-out values beside the repository, computed independently in float64; skipped where that folder is absent."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_rlvr.losses import correction_variance, finalize_metrics, policy_loss, token_coefficients

GOLDEN = Path(__file__).parents[2] / ".." / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no reference values at {GOLDEN}")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
# below this size A - C has cancelled, and float32 inputs no longer hold the digits of the difference
SMALLEST = {torch.float64: 1e-3, torch.float32: 1e-2}


def load(name: str) -> dict:
    return json.loads((GOLDEN / name).read_text())


def settings_of(key: str) -> tuple[str, dict] | None:
    """The call that a key of the reference file stands for."""
    if key in ("respo", "vespo", "grpo", "gspo", "cispo", "pg"):
        return key, {}
    if key == "grpo_dapo_clip_0_2_0_28":
        return "grpo", {"clip_low": 0.2, "clip_high": 0.28}
    if key in ("proximal_kl sequence", "proximal_kl none"):
        return "proximal_kl", {"weighting": key.split()[1]}
    match = re.match(r"proximal_kl H=(\w+) eps=(\S+) beta=(\S+)( tail_decay)?$", key)
    if match is None:
        return None
    horizon = "full" if match[1] == "full" else int(match[1])
    clip = None if match[2] == "None" else float(match[2])
    return "proximal_kl", {"horizon": horizon, "cost_clip": clip, "beta": float(match[3]), "tail_decay": bool(match[4])}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_coefficients_of_all_losses(dtype):
    checked = 0
    for case in load("losses.json")["token_coefficients"]:
        tensors = {k: torch.tensor(case[k], dtype=dtype) for k in case if k.endswith("logprobs")}
        advantages = torch.tensor([case["advantage"]], dtype=torch.float64)
        where = {"advantages": advantages, "cu_seqlens": torch.tensor([0, len(case["logprobs"])])}
        for key, expected in case.items():
            call = settings_of(key)
            if call is None:
                continue
            got = token_coefficients(call[0], **tensors, **where, **call[1])
            assert got.dtype == dtype
            expected = torch.tensor(expected, dtype=torch.float64)
            error = ((got.double() - expected).abs() / expected.abs().clamp_min(SMALLEST[dtype])).max()
            assert error <= TOLERANCE[dtype], (key, float(error))
            checked += 1
    assert checked > 200


def test_sequence_kernels():
    for row in load("losses.json")["sequence_kernels"]:
        for sign, branch in ((1.0, "pos"), (-1.0, "neg")):
            for loss in ("respo", "vespo"):
                assert kernel(loss, row["log_w"], sign) == pytest.approx(row[f"{loss}_{branch}"], rel=1e-6, abs=1e-300)
        general = kernel("respo", row["log_w"], 1.0, alpha_pos=1.5, beta_pos=0.3, lambda_pos=1.7)
        assert general == pytest.approx(row["respo_pos_alpha1_5"], rel=1e-6, abs=1e-300)
        general = kernel("respo", row["log_w"], 1.0, alpha_pos=3.0, beta_pos=0.6, lambda_pos=1.2)
        assert general == pytest.approx(row["respo_pos_alpha3"], rel=1e-6, abs=1e-300)


def kernel(name: str, log_w: float, sign: float, **settings) -> float:
    found = token_coefficients(
        name,
        logprobs=torch.tensor([log_w], dtype=torch.float64),
        behavior_logprobs=torch.zeros(1, dtype=torch.float64),
        advantages=torch.tensor([sign], dtype=torch.float64),
        cu_seqlens=torch.tensor([0, 1]),
        **settings,
    )
    return float(found) * sign


def test_tail_table_and_effective_sample_size():
    """Responses with a given log W: one token carries it, the others have ratio 1."""
    tail = load("statistics.json")["tail"]
    lengths = torch.tensor(tail["lengths"])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    logprobs = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    logprobs[cu_seqlens[:-1]] = torch.tensor(tail["log_w"], dtype=torch.float64)
    advantages = torch.tensor(tail["advantages"], dtype=torch.float64)
    _, _, sums = policy_loss(
        "respo",
        logprobs=logprobs,
        behavior_logprobs=torch.zeros_like(logprobs),
        advantages=advantages,
        cu_seqlens=cu_seqlens,
    )
    metrics = finalize_metrics(sums)
    assert metrics["ess/raw"] == pytest.approx(tail["ess_raw"], rel=1e-9)
    assert metrics["ess/kernel"] == pytest.approx(tail["ess_respo"], rel=1e-9)
    for row in tail["positive_bins_respo"]:
        label = (
            f"below_{row['hi']}"
            if row["lo"] is None
            else f"from_{row['lo']}"
            if row["hi"] is None
            else f"{row['lo']}..{row['hi']}"
        )
        assert metrics[f"tail/positive/p/{label}"] == pytest.approx(row["p"], rel=1e-9)
        assert metrics[f"tail/positive/m/{label}"] == pytest.approx(row["m"], rel=1e-9)
        for kind in ("amplification", "mean_length"):
            got = metrics.get(f"tail/positive/{kind}/{label}")
            assert got is None if row[kind] is None else got == pytest.approx(row[kind], rel=1e-9)


def test_correction_variance():
    given = load("statistics.json")["correction_variance"]
    responses = [torch.tensor(r, dtype=torch.float64) for group in given["log_ratios"] for r in group]
    cu_seqlens = torch.tensor([0] + [len(r) for r in responses]).cumsum(0)
    log_ratio, group_size = torch.cat(responses), len(given["log_ratios"][0])
    for key, expected in given["V"].items():
        horizon = "full" if key == "None" else int(key)
        sums = correction_variance(
            log_ratio,
            torch.zeros_like(log_ratio),
            cu_seqlens,
            group_size,
            horizon=horizon,
            beta=given["beta"],
            cost_clip=given["cost_clip"],
        )
        assert finalize_metrics(sums)[f"proximal_kl/variance/H={horizon}"] == pytest.approx(expected, rel=1e-9)
