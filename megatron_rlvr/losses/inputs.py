"""From a caller's tensors to `PackedTokens`: shapes, dtypes and numbers checked at the door."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rlvr.losses.core import PackedTokens, PolicyLoss
from megatron_rlvr.losses.errors import LossError, NonFiniteLogprobError
from megatron_rlvr.losses.segments import Segments


def pack(
    loss: PolicyLoss,
    logprobs: Tensor,
    behavior_logprobs: Tensor | None,
    reference_logprobs: Tensor | None,
    advantages: Tensor,
    cu_seqlens: Tensor,
) -> PackedTokens:
    """Detach, check and promote: half inputs to float32, float64 kept. One wait for the device, for the checks."""
    if not loss.uses_behavior:
        behavior_logprobs = logprobs
    if behavior_logprobs is None:
        raise LossError(f"loss {loss.name!r} needs behavior_logprobs, got None: pass the sampler's log-probs.")
    if reference_logprobs is None:
        if loss.reference == "required":
            raise LossError(
                f"loss {loss.name!r} needs reference_logprobs, got None: pass the proximal reference's log-probs."
            )
        reference_logprobs = behavior_logprobs
    named = {"logprobs": logprobs, "behavior_logprobs": behavior_logprobs, "reference_logprobs": reference_logprobs}
    _check_kinds({**named, "advantages": advantages, "cu_seqlens": cu_seqlens})
    dtype = compute_dtype(*named.values())
    named = {name: value.detach().to(logprobs.device, dtype) for name, value in named.items()}
    advantages = advantages.detach().to(logprobs.device, torch.float64)
    cu_seqlens = cu_seqlens.to(logprobs.device, torch.int64)
    _check_shapes(named, advantages, cu_seqlens)
    all_finite = _check_numbers(named, advantages, cu_seqlens)
    segments = Segments(cu_seqlens, len(named["logprobs"]))
    return PackedTokens(**named, advantages=advantages, segments=segments, all_finite=all_finite)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is float64, else float32: the dtype of coefficients and loss."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise LossError(f"log-probs of dtype {tensor.dtype} are refused: pass a floating-point tensor.")
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _check_kinds(named: dict[str, Tensor]) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() != 1:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise LossError(f"{name} has {found}: pass a one-dimensional tensor.")
    kind = named["cu_seqlens"].dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise LossError(f"cu_seqlens of dtype {kind} are refused: pass integers, they are counts of tokens.")


def _check_shapes(named: dict[str, Tensor], advantages: Tensor, cu_seqlens: Tensor) -> None:
    shape = named["logprobs"].shape
    for name, value in named.items():
        if value.shape != shape:
            raise LossError(
                f"{name} has shape {tuple(value.shape)}: all log-probs are packed [T], here [{len(named['logprobs'])}]."
            )
    if len(cu_seqlens) < 1:
        raise LossError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: pass the S+1 boundaries of the S sequences.")
    if len(advantages) != len(cu_seqlens) - 1:
        raise LossError(
            f"advantages has shape {tuple(advantages.shape)}: pass one per sequence, here [{len(cu_seqlens) - 1}]."
        )


def _check_numbers(named: dict[str, Tensor], advantages: Tensor, cu_seqlens: Tensor) -> bool:
    """Refuse boundaries out of order, NaN and +inf; True if nothing is infinite. A NaN or infinity shows in the sum."""
    num_tokens = len(named["logprobs"])
    ordered = (cu_seqlens[1:] >= cu_seqlens[:-1]).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens)
    finite = torch.isfinite(torch.stack([value.sum().double() for value in (*named.values(), advantages)])).all()
    is_ordered, is_finite = torch.stack([ordered, finite]).tolist()
    if not is_ordered:
        raise LossError(
            f"cu_seqlens {_short(cu_seqlens)} is refused: it has to rise from 0 to the {num_tokens} packed tokens."
        )
    if is_finite:
        return True
    one_each = torch.arange(len(advantages) + 1, device=advantages.device)
    _refuse("advantages", advantages, one_each, ~torch.isfinite(advantages))
    for name, value in named.items():
        _refuse(name, value, cu_seqlens, torch.isnan(value) | torch.isposinf(value))
    return False


def _refuse(name: str, values: Tensor, cu_seqlens: Tensor, bad: Tensor) -> None:
    """Raise at the first bad element; -inf log-probs of masked tokens are no error."""
    if not bool(bad.any()):
        return
    where = int(bad.nonzero()[0])
    sequence = int((cu_seqlens.cpu() <= where).sum()) - 1
    offset = where - int(cu_seqlens[sequence])
    place = "" if name == "advantages" else f" at its token {offset} (packed position {where})"
    raise NonFiniteLogprobError(
        f"{name} of sequence {sequence} is {float(values[where])}{place}: the update is stopped; look for non-finite "
        "weights or inputs in the pass that produced it.",
        sequence,
    )


def _short(values: Tensor) -> str:
    listed = values.tolist()
    return str(listed if len(listed) <= 8 else [*listed[:4], "...", *listed[-3:]])
