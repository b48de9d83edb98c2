"""V(H): how widely the first-token correction spreads among responses to one prompt (Proximal KL Eq. C.4-C.5)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_rlvr.losses.core import IMPOSSIBLE_LOG_RATIO
from megatron_rlvr.losses.errors import LossError
from megatron_rlvr.losses.segments import Segments


@torch.no_grad()
def correction_variance(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    cu_seqlens: Tensor,
    group_size: int,
    *,
    horizon: int | Literal["full"] = "full",
    beta: float = 0.30,
    cost_clip: float | None = 0.05,
) -> dict[str, Tensor]:
    """Metric sums of V(H) under the key `proximal_kl/variance/H=<horizon>`; merge over ranks, then finalize.

    logprobs, reference_logprobs [T];  cu_seqlens [S+1]; responses of one prompt stand together, `group_size` of them
    """
    groups, rest = divmod(len(cu_seqlens) - 1, group_size)
    if rest or group_size < 2:
        raise LossError(
            f"group_size={group_size} does not fit {len(cu_seqlens) - 1} responses: V(H) needs whole groups from 2."
        )
    cu_seqlens = cu_seqlens.to(logprobs.device, torch.int64)
    first = first_token_correction(logprobs - reference_logprobs, cu_seqlens, horizon, cost_clip).mul_(beta)
    variance = first.view(groups, group_size).var(dim=1, unbiased=True)
    name = f"proximal_kl/variance/H={horizon}"
    return {f"{name}/num": variance.sum(), f"{name}/den": torch.full_like(variance.sum(), groups)}


def first_token_correction(
    log_ratio: Tensor, cu_seqlens: Tensor, horizon: int | Literal["full"], cost_clip: float | None
) -> Tensor:
    """[S] float64: C_1 / beta, the clipped costs of the first min(H, T) tokens of each response."""
    segments = Segments(cu_seqlens, len(log_ratio))
    bound = IMPOSSIBLE_LOG_RATIO if cost_clip is None else cost_clip
    costs = log_ratio.double().nan_to_num(nan=0.0).clamp(-bound, bound)
    if horizon != "full":
        position = torch.arange(len(costs), device=costs.device) - segments.expand(cu_seqlens[:-1])
        costs = costs * (position < horizon)
    return segments.sum(costs)
