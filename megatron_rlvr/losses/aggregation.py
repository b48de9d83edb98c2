"""How token terms become one loss: the weight of each token and the count that the sum is divided by (SPEC 0).

The count is the one of the whole optimizer mini-batch, over all micro-batches and ranks: the mean of micro-batch means
is not the mean.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rlvr.losses.errors import unknown_name

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def check_aggregation(aggregation: str) -> None:
    """Refuse an unknown aggregation with the nearest known one."""
    if aggregation not in AGGREGATIONS:
        raise unknown_name("aggregation", str(aggregation), AGGREGATIONS)


def response_weights(aggregation: str, lengths: Tensor) -> Tensor | None:
    """[S] float64 or None (all ones): 1/length for `seq-mean-token-mean`; `lengths` [S] of whole responses."""
    check_aggregation(aggregation)
    return 1.0 / lengths.clamp(min=1).double() if aggregation == "seq-mean-token-mean" else None


def aggregation_count(aggregation: str, cu_seqlens: Tensor) -> Tensor:
    """[] int64: this batch's share of the normalizer: action tokens, or responses that have any token."""
    check_aggregation(aggregation)
    if aggregation == "token-mean":
        return cu_seqlens[-1].long()
    return (cu_seqlens[1:] > cu_seqlens[:-1]).sum()
