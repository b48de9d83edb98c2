"""Log-probs and entropies straight from hidden states over a vocab-parallel head, without keeping any logits.

The logits [A, V/tp] are made and consumed tile by tile. The forward keeps three running numbers per token (peak, sum of
exponentials, sum of exponentials times logits) and saves one, the log-sum-exp; the backward makes every tile a second
time, turns it into the logits' gradient and multiplies that into both results at once. Four matrix products in all, and
extra memory that depends on neither A nor V: two tiles [chunk_tokens, chunk_vocab], in bf16 also three operand tiles.

The vocabulary is the outer loop, so a tile of the weight's gradient is finished (in float32, whatever the weight's
dtype) before the next begins, and no float32 copy of the whole gradient is needed.

Why no library kernel runs here, CUDA included. The loss needs each token's own log-prob with its upstream gradient, its
entropy, and a vocabulary split over the tensor-parallel group. megatron-core 0.16.1 and 0.19.2 have cross entropies
of finished logits only (`vocab_parallel_cross_entropy`, the fused one, Transformer Engine's), so logits would exist.
`torch.nn.functional.linear_cross_entropy` (2.13) and Liger's fused linear cross entropy see one rank's vocabulary and
give neither a log-sum-exp that ranks could combine nor an entropy. CUDA therefore runs the same tiles on its own matrix
products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlvr.actor.products import exact_products, operand, product, room_for, tile_logits

# exp(_VANISHED) is 0 in float32; -inf in its place would make 0 * -inf of a tile or rank that has seen nothing yet.
_VANISHED = -1e4


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    floor: torch.Tensor | None = None,
    chunk_tokens: int = 1024,
    chunk_vocab: int = 4096,
    want_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden @ weight.T / temperature)[label] and the entropy of that distribution, per token.

    hidden        [A, h] float32 or bf16, equal on all ranks of `group`; A may be 0
    weight        [V/tp, h] of the same dtype: this rank's rows of the padded vocabulary, in rank order
    labels        [A] int64 vocabulary ids; an id outside [0, vocab_size) has log-prob -inf
    group         tensor-parallel group, or None for a whole vocabulary; two all-reduces in the forward, whatever A is,
                  and none in the backward
    vocab_size    real vocabulary; the rows behind it only pad and get probability and gradient 0
    temperature   divides the logits, so the answer belongs to the tempered distribution
    floor         [A] float32, equal on all ranks, or None: token t's support are its label and the ids whose logit
                  (after the temperature) is at least floor[t]; see `nucleus.nucleus_floor`
    chunk_tokens, chunk_vocab    largest tile of logits held at a time, in tokens and in rows of `weight`
    want_entropy  False saves two passes over every tile and returns None in the entropy's place

    Returns (log-probs [A] float32, entropy [A] float32), in nats, equal on all ranks; the entropy has no gradient.
    The gradient of `hidden` is this rank's share: sum it over `group` (Megatron's copy and gather regions do). The
    gradient of `weight` covers its own rows, summed in float32 and returned in its dtype for Megatron's hooks to add to
    main_grad. Raises ValueError for shapes, dtypes or a temperature that cannot be meant.

    With a floor, log-prob and entropy are those of the softmax over the support, the one that top-k and top-p sampling
    draws from; every other id has probability and gradient 0. The label always belongs to the support: a learner that
    has moved a sampled token out of its own nucleus gives it a small, finite log-prob with a gradient that can bring it
    back, where the bare truncation would give -inf. The floor counts as a constant; which ids are in the support is
    piecewise constant in the weights, so this is the exact gradient wherever there is one.
    """
    _check(hidden, weight, labels, temperature, floor)
    ranks = 1 if group is None else dist.get_world_size(group)
    _check_sizes(vocab_size, ranks * len(weight), chunk_tokens, chunk_vocab)
    rank = 0 if group is None else dist.get_rank(group)
    first = rank * len(weight)
    tiles = _Tiles(
        first=first,
        rows=min(max(vocab_size - first, 0), len(weight)),
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=max(1, min(chunk_tokens, len(hidden))),
        chunk_vocab=min(chunk_vocab, len(weight)),
    )
    return _LinearLogprob.apply(hidden, weight, labels, floor, group, tiles, want_entropy)


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, floor: torch.Tensor | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        shapes = [list(x.shape) for x in (hidden, weight, labels)]
        raise ValueError(f"hidden, weight and labels have shapes {shapes}; they must be [A, h], [V, h] and [A]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}; give both the same dtype")
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden is {hidden.dtype}; give float32 or bfloat16")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; use a positive one")
    if floor is not None and (floor.shape != labels.shape or floor.dtype != torch.float32):
        raise ValueError(f"floor is {floor.dtype} {list(floor.shape)}; it must be float32 {list(labels.shape)}")


def _check_sizes(vocab_size: int, rows: int, chunk_tokens: int, chunk_vocab: int) -> None:
    if not 1 <= vocab_size <= rows:
        raise ValueError(f"vocab_size is {vocab_size}; it must lie between 1 and the {rows} rows of all ranks' weights")
    if chunk_tokens < 1 or chunk_vocab < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens} and chunk_vocab {chunk_vocab}; both must be at least 1")


@dataclass(frozen=True)
class _Tiles:
    """How [A, V/tp] is cut. `first` is the vocabulary id of this rank's first row, `rows` how many are not padding."""

    first: int
    rows: int
    vocab_size: int
    temperature: float
    chunk_tokens: int
    chunk_vocab: int

    def vocab(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.rows, self.chunk_vocab):
            yield start, min(start + self.chunk_vocab, self.rows)

    def tokens(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, count))

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.chunk_tokens * self.chunk_vocab, dtype=torch.float32, device=like.device)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        floor: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        tiles: _Tiles,
        want_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with exact_products(hidden):
            statistics = _scan(hidden, weight, labels, floor, tiles, want_entropy)
        label_logit, total, weighted, peak = _combine(*statistics, group)
        label_logit.masked_fill_((labels < 0) | (labels >= tiles.vocab_size), float("-inf"))
        log_total = total.log()
        ctx.save_for_backward(hidden, weight, labels, floor, peak + log_total)
        ctx.tiles = tiles
        logprobs = label_logit - peak - log_total
        if not want_entropy:
            return logprobs, None
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, floor, lse = ctx.saved_tensors
        with exact_products(hidden):
            grads = _gradients(hidden, weight, labels, floor, lse, grad, ctx.tiles, ctx.needs_input_grad)
        return (*grads, None, None, None, None, None)


def _scan(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    floor: torch.Tensor | None,
    tiles: _Tiles,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's (label's logit, sum of e^(z - peak), sum of e^(z - peak) (z - peak), peak), [A] float32 each."""
    label_logit, total, weighted = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
    peak = torch.full_like(total, float("-inf"))
    logits_buffer = tiles.buffer(hidden)
    exp_buffer = tiles.buffer(hidden) if want_entropy else logits_buffer
    room, token_room = room_for(weight, tiles.chunk_vocab), room_for(hidden, tiles.chunk_tokens)
    for start, end in tiles.vocab():
        rows = operand(weight[start:end], room)
        for part in tiles.tokens(len(hidden)):
            z = tile_logits(operand(hidden[part], token_room), rows, tiles.temperature, logits_buffer)
            column, here = _own_column(labels[part], tiles.first + start, end - start)
            outside = None if floor is None else _outside(z, floor[part], column, here)
            label_logit[part] += torch.where(here, z.gather(1, column).squeeze(1), 0.0)
            old, new = peak[part], torch.maximum(peak[part], z.amax(1))
            scaled, shifted = _reweight(total[part], weighted[part], old - new)
            exp = torch.exp(z.sub_(new.unsqueeze(1)), out=exp_buffer[: z.numel()].view_as(z))
            if outside is not None:
                exp.masked_fill_(outside, 0.0)
            total[part] = scaled + exp.sum(1)
            if want_entropy:
                weighted[part] = shifted + z.mul_(exp).sum(1)
            peak[part] = new
    return label_logit, total, weighted, peak


def _combine(
    label_logit: torch.Tensor,
    total: torch.Tensor,
    weighted: torch.Tensor,
    peak: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same four over the whole vocabulary: one MAX and one SUM all-reduce for all tokens together."""
    if group is None:
        return label_logit, total, weighted, peak
    highest = peak.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([label_logit, *_reweight(total, weighted, peak - highest)])
    dist.all_reduce(sums, group=group)
    return sums[0], sums[1], sums[2], highest


def _reweight(total: torch.Tensor, weighted: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sums seen from a peak that is `-shift` higher."""
    shift = shift.clamp(min=_VANISHED)
    factor = shift.exp()
    return total * factor, (weighted + total * shift) * factor


def _gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    floor: torch.Tensor | None,
    lse: torch.Tensor,
    grad: torch.Tensor,
    tiles: _Tiles,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `hidden` (this rank's share) and of `weight`; d log p(label) / d logit_j = [j == label] - p_j."""
    scale = (grad.float() / tiles.temperature).unsqueeze(1)
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
    grad_weight = torch.empty_like(weight) if needed[1] else None
    sums = None
    if grad_weight is not None:
        grad_weight[tiles.rows if len(hidden) else 0 :].zero_()
        if grad_weight.dtype != torch.float32:
            sums = torch.empty(tiles.chunk_vocab, weight.shape[1], dtype=torch.float32, device=weight.device)
    buffer = tiles.buffer(hidden)
    room, token_room = room_for(weight, tiles.chunk_vocab), room_for(hidden, tiles.chunk_tokens)
    for start, end in tiles.vocab():
        rows = operand(weight[start:end], room)
        finished = None if grad_weight is None else grad_weight[start:end]
        grad_rows = finished if sums is None else sums[: end - start]
        for part in tiles.tokens(len(hidden)):
            tokens = operand(hidden[part], token_room)
            z = tile_logits(tokens, rows, tiles.temperature, buffer)
            column, here = _own_column(labels[part], tiles.first + start, end - start)
            outside = None if floor is None else _outside(z, floor[part], column, here)
            grad_z = z.sub_(lse[part].unsqueeze(1)).exp_().mul_(-scale[part])
            if outside is not None:
                grad_z.masked_fill_(outside, 0.0)
            grad_z.scatter_add_(1, column, torch.where(here.unsqueeze(1), scale[part], 0.0))
            grad_z = grad_z.to(rows.dtype)
            if grad_hidden is not None:
                product(grad_z, rows, grad_hidden[part], add=True)
            if grad_rows is not None:
                product(grad_z.t(), tokens, grad_rows, add=part.start > 0)
        if finished is not None and sums is not None and len(hidden):
            finished.copy_(sums[: end - start])
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def _own_column(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column [n, 1] of each label in a tile that begins at id `first` (clamped), and whether the label is in it [n]."""
    column = labels - first
    return column.clamp(0, width - 1).unsqueeze(1), (column >= 0) & (column < width)


def _outside(z: torch.Tensor, floor: torch.Tensor, column: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """[n, width] bool: the ids of this tile that are below their token's floor, but no label.

    Their exponentials are zeroed, not their logits lowered: a CPU takes 20 times longer over one that underflows.
    """
    outside = z < floor.unsqueeze(1)
    return outside.scatter_(1, column, outside.gather(1, column) & ~here.unsqueeze(1))
