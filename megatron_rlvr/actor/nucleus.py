"""Where top-k and top-p cut each token's distribution, found over a vocab-parallel head without keeping any logits.

The convention is that of vLLM's sampler and of the logits warpers of transformers: temperature first, then top-k, then
top-p on the renormalised rest; the id with which the mass reaches top_p is the last that stays. Ids are told apart by
their logits alone, so ids that tie with the last one all stay, as they do under vLLM's top-k. vLLM's top-p keeps only
some of them, by their place in a sort that is not stable; no floor could say which.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rlvr.actor.products import exact_products, operand, room_for, tile_logits
from megatron_rlvr.types import LogprobDistribution

# How many of the likeliest ids are looked at first, and how much wider each next look is.
_WIDTH, _WIDEN = 64, 16
# Columns that are exponentiated at a time, so that no second [chunk_tokens, V/tp] is needed.
_PIECE = 4096


@torch.no_grad()
def nucleus_floor(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    distribution: LogprobDistribution,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    chunk_tokens: int = 64,
    chunk_vocab: int = 4096,
) -> torch.Tensor:
    """[A] float32: the ids whose logit / temperature is at least floor[t] are those that token t is sampled from.

    hidden        [A, h] float32 or bf16, equal on all ranks of `group`; A may be 0
    weight        [V/tp, h] of the same dtype: this rank's rows of the padded vocabulary, in rank order
    distribution  temperature, top_p and top_k
    group         tensor-parallel group, or None for a whole vocabulary
    vocab_size    real vocabulary; the rows behind it only pad and are in no support
    chunk_tokens  tokens whose logits [chunk_tokens, V/tp] are held at a time, in float32; of the vocabulary only the
                  likeliest ids' logits and one sum per token cross the group
    chunk_vocab   rows of `weight` that are multiplied at a time

    Equal on all ranks, without a gradient, -inf where nothing is cut. The floor lies halfway between the last logit
    that stays and the next lower one, so that logits which another product rounds differently fall on the same side.
    """
    floor = torch.full((len(hidden),), float("-inf"), device=hidden.device)
    rank = 0 if group is None else dist.get_rank(group)
    rows = min(max(vocab_size - rank * len(weight), 0), len(weight))
    if not distribution.truncated:
        return floor
    memory = hidden.new_empty(min(chunk_tokens, len(hidden)), rows, dtype=torch.float32)
    with exact_products(hidden):
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            z = memory[: len(hidden[part])]
            _fill_logits(z, hidden[part], weight[:rows], distribution.temperature, chunk_vocab)
            floor[part] = _chunk_floor(z, len(weight), distribution, group, vocab_size)
    return floor


def _fill_logits(
    z: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, chunk_vocab: int
) -> None:
    """Write the logits of whole rows into `z` [n, rows]."""
    chunk_vocab = max(1, min(chunk_vocab, len(weight)))
    buffer = hidden.new_empty(len(hidden) * chunk_vocab, dtype=torch.float32)
    tokens, room = operand(hidden, room_for(hidden, len(hidden))), room_for(weight, chunk_vocab)
    for start in range(0, len(weight), chunk_vocab):
        rows = operand(weight[start : start + chunk_vocab], room)
        z[:, start : start + len(rows)] = tile_logits(tokens, rows, temperature, buffer)


def _chunk_floor(
    z: torch.Tensor, share: int, distribution: LogprobDistribution, group: dist.ProcessGroup | None, vocab_size: int
) -> torch.Tensor:
    """Look at the likeliest ids, and at more of them until every token's cut lies among them."""
    width = max(_WIDTH, distribution.top_k + 1)
    while True:
        width = min(width, vocab_size)
        top, log_total = _likeliest(z, width, share, group)
        floor, found = _cut(top, log_total, distribution)
        # Every rank decides from the same gathered numbers, so all of them look again or none does.
        if width == vocab_size or bool(found.all()):
            return floor
        width *= _WIDEN


def _likeliest(
    z: torch.Tensor, width: int, share: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits of the whole vocabulary [n, width], falling, and the log of its sum of exponentials.

    A rank sends the `width` largest of its own, or its whole `share`: the whole vocabulary's are among them.
    """
    sent = min(width, share)
    mine = z.new_full((len(z), sent + 1), float("-inf"))
    count = min(sent, z.shape[1])
    if count:
        mine[:, :count] = z.topk(count, dim=1).values
        mine[:, sent] = torch.stack([piece.logsumexp(1) for piece in z.split(_PIECE, 1)]).logsumexp(0)
    if group is None:
        return mine[:, :width], mine[:, sent]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    both = torch.stack(everyone, 1)
    return both[:, :, :sent].flatten(1).topk(width, dim=1).values, both[:, :, sent].logsumexp(1)


def _cut(
    top: torch.Tensor, log_total: torch.Tensor, distribution: LogprobDistribution
) -> tuple[torch.Tensor, torch.Tensor]:
    """(floor [n], whether `top` was wide enough to know it [n]) from the falling logits [n, width]."""
    stays = torch.ones_like(top, dtype=torch.bool)
    if 0 < distribution.top_k < top.shape[1]:
        stays = top >= top[:, distribution.top_k - 1 : distribution.top_k]
        log_total = top.masked_fill(~stays, float("-inf")).logsumexp(1)
    known = torch.ones(len(top), dtype=torch.bool, device=top.device) if distribution.top_k <= 0 else ~stays[:, -1]
    if distribution.top_p < 1:
        mass = (top.double() - log_total.double().unsqueeze(1)).exp()
        stays &= mass.cumsum(1) - mass < distribution.top_p
    last = top.masked_fill(~stays, float("inf")).amin(1)
    lower = top < last.unsqueeze(1)
    following = top.masked_fill(~lower, float("-inf")).amax(1)
    return _between(following, last), known & lower.any(1)


def _between(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Halfway from `low` to `high`, above `low` even where they are neighbours; -inf where `low` is."""
    middle = (low.double() + (high.double() - low.double()) / 2).float()
    return torch.where(low == float("-inf"), low, torch.where(middle > low, middle, high))
