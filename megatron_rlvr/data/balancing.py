"""Which sequences share a micro-batch, and which data-parallel rank runs it.

All ranks together need bins of at most so many tokens, as many on every rank, as few as possible, and as even as
possible, most of all those that run at the same time: expert parallelism makes ranks wait for each other in every
layer of every micro-batch. So bins are made for all ranks at once and dealt out in order of size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np

from megatron_rlvr.types import UserError

Layout = Literal["packed", "padded"]
Bins = list[list[int]]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    data_parallel_size: int,
    micro_batch_tokens: int,
    layout: Layout,
    pad_to_multiple: int = 1,
    micro_batch_multiple: int = 1,
) -> list[Bins]:
    """Sequence indices of each micro-batch, as [data-parallel rank][micro-batch][sequence]; an empty one is a dummy.

    Every rank has the same number of micro-batches, a multiple of `micro_batch_multiple`. Padding included, one has at
    most `micro_batch_tokens` tokens: packed, the sum of its lengths, padded, rows times the longest, either rounded up
    to `pad_to_multiple`. That number is the least possible for `padded`; for `packed` (bin packing, where the least is
    not cheaply known) the least that an even spread or first-fit decreasing attains.
    Raises UserError for a sequence that no micro-batch can hold.
    """
    _check_fit(max(lengths, default=1), pad_to_multiple, micro_batch_tokens)
    step = data_parallel_size * micro_batch_multiple
    if layout == "packed":
        limit = micro_batch_tokens // pad_to_multiple * pad_to_multiple
        bins = _packed_bins(lengths, limit, step)
        sizes = [sum(lengths[i] for i in indices) for indices in bins]
    else:
        rows = [round_up(length, pad_to_multiple) for length in lengths]
        bins = _padded_bins(rows, micro_batch_tokens, step)
        sizes = [len(indices) * max((rows[i] for i in indices), default=0) for indices in bins]
    return _deal(bins, sizes, data_parallel_size)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _check_fit(longest: int, pad_to_multiple: int, limit: int) -> None:
    needed = round_up(longest, pad_to_multiple)
    if needed > limit:
        raise UserError(
            f"a sequence of {longest} tokens needs a micro-batch of {needed}, more than "
            f"actor.micro_batch_tokens={limit}; raise actor.micro_batch_tokens to at least {needed}."
        )


def _packed_bins(lengths: Sequence[int], limit: int, step: int) -> Bins:
    """At least one bin and a multiple of `step`, each with lengths that sum to at most `limit`."""
    order = _longest_first(lengths)
    tight = _first_fit(lengths, order, limit)
    least, most = round_up(max(-(-sum(lengths) // limit), 1), step), round_up(max(len(tight), 1), step)
    for count in range(least, most + 1, step):
        even = _spread(lengths, order, count)
        if max(sum(lengths[i] for i in indices) for indices in even) <= limit:
            return even
    return _fill_up(tight, most)


def _padded_bins(rows: Sequence[int], limit: int, step: int) -> Bins:
    """At least one bin and a multiple of `step`, each with at most `limit` tokens; even by lowering that limit."""
    order = _longest_first(rows)
    count = round_up(max(len(_shelves(rows, order, limit)), 1), step)
    low, high = max(rows, default=1), limit
    while low < high:
        middle = (low + high) // 2
        if len(_shelves(rows, order, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill_up(_shelves(rows, order, high), count)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _first_fit(lengths: Sequence[int], order: Sequence[int], limit: int) -> Bins:
    """First-fit decreasing: few bins, the first ones full."""
    room = np.full(len(lengths), limit)
    bins: Bins = []
    for i in order:
        place = int(np.argmax(room >= lengths[i]))
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def _spread(lengths: Sequence[int], order: Sequence[int], count: int) -> Bins:
    """Longest first into the emptiest bin: even bins, with no bound on their size."""
    bins: Bins = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]
    for i in order:
        load, place = loads[0]
        bins[place].append(i)
        heapq.heapreplace(loads, (load + lengths[i], place))
    return bins


def _shelves(rows: Sequence[int], order: Sequence[int], limit: int) -> Bins:
    """Neighbours in length together, as many as `limit` allows: the fewest bins when each costs rows times longest."""
    bins: Bins = []
    capacity = 0
    for i in order:
        if not bins or len(bins[-1]) == capacity:
            bins.append([])
            capacity = limit // rows[i]
        bins[-1].append(i)
    return bins


def _fill_up(bins: Bins, count: int) -> Bins:
    return bins + [[] for _ in range(count - len(bins))]


def _deal(bins: Bins, sizes: Sequence[int], num_ranks: int) -> list[Bins]:
    """Bins of like size to all ranks at a time, in turning order, so that no rank always gets the largest."""
    order = _longest_first(sizes)
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    for turn, start in enumerate(range(0, len(order), num_ranks)):
        hand = order[start : start + num_ranks]
        for rank, place in zip(ranks, hand if turn % 2 == 0 else hand[::-1], strict=True):
            rank.append(sorted(bins[place]))
    return ranks
