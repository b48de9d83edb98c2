"""From the trajectories of one optimizer mini-batch to the micro-batches of one data-parallel rank.

A trajectory of N tokens is fed as its first N-1: nothing is predicted from the last. The logits at position t-1
predict token t, and the action tokens among those are what `action_index` and `labels` name; a trajectory may have
several spans of them. Trajectories without an action token teach nothing: they are neither fed nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_rlvr.data.balancing import Layout, plan_micro_batches, round_up
from megatron_rlvr.types import Group, MiniBatch, PackedBatch, Trajectory


def build_mini_batch(
    trajectories: Sequence[Trajectory],
    *,
    data_parallel_size: int,
    data_parallel_rank: int,
    micro_batch_tokens: int,
    layout: Layout,
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
    micro_batch_multiple: int = 1,
    pad_token_id: int = 0,
    group_index: Sequence[int] | None = None,
) -> MiniBatch:
    """This rank's share of a mini-batch; all ranks call it with the same trajectories and get disjoint shares.

    micro_batch_tokens    most tokens in a micro-batch, padding included
    layout                "packed": one row of sequences end to end; "padded": one row a sequence
    pad_to_multiple       the columns are a multiple of it (sequence parallelism splits them)
    sequence_multiple     every packed sequence is padded to a multiple of it (context parallelism splits each); it
                          divides pad_to_multiple
    micro_batch_multiple  the number of micro-batches is a multiple of it (interleaved pipelines need their size)
    group_index           the group of each trajectory, from 0, where they form groups

    The counts in the result are over all ranks. A rank with too few sequences gets dummy micro-batches: one sequence of
    padding with no action token and advantage 0. How sequences are shared out: `plan_micro_batches`.
    Raises UserError for a sequence longer than a micro-batch, ValueError for trajectories that are not consistent, for
    an action token with nothing before it, for an unknown advantage, and where there is no action token at all.
    """
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data_parallel_rank={data_parallel_rank} is not in [0, {data_parallel_size})")
    for index, trajectory in enumerate(trajectories):
        _check(trajectory, index)
    kept = [index for index, trajectory in enumerate(trajectories) if trajectory.action_mask.any()]
    trained = [trajectories[index] for index in kept]
    if not trained:
        raise ValueError(f"none of the {len(trajectories)} trajectories of this mini-batch has an action token")
    if pad_to_multiple % sequence_multiple:
        raise ValueError(f"sequence_multiple={sequence_multiple} does not divide pad_to_multiple={pad_to_multiple}")
    plan = plan_micro_batches(
        [round_up(trajectory.num_tokens - 1, sequence_multiple) for trajectory in trained],
        data_parallel_size=data_parallel_size,
        micro_batch_tokens=micro_batch_tokens,
        layout=layout,
        pad_to_multiple=pad_to_multiple,
        micro_batch_multiple=micro_batch_multiple,
    )
    micro_batches = []
    for indices in plan[data_parallel_rank]:
        part = [trained[i] for i in indices]
        if layout == "packed":
            micro_batch = build_packed(part, pad_to_multiple, pad_token_id, sequence_multiple)
        else:
            micro_batch = build_padded(part, pad_to_multiple, pad_token_id)
        micro_batches.append(replace(micro_batch, sequence_index=torch.tensor(indices or [-1])))
    return MiniBatch(
        micro_batches,
        num_action_tokens=sum(trajectory.response_length for trajectory in trained),
        num_sequences=len(trained),
        group_index=None if group_index is None else torch.tensor([group_index[index] for index in kept]),
    )


def build_packed(
    trajectories: Sequence[Trajectory], pad_to_multiple: int = 1, pad_token_id: int = 0, sequence_multiple: int = 1
) -> PackedBatch:
    """One row with the sequences end to end, each padded to `sequence_multiple` behind its last token, where causal
    attention keeps the padding out of its sight; what the row still lacks is one more segment of its own at the end.
    """
    lengths = [round_up(trajectory.num_tokens - 1, sequence_multiple) for trajectory in trajectories]
    columns = round_up(max(sum(lengths), 1), pad_to_multiple)
    padding = columns - sum(lengths)
    segments = [*lengths, padding] if padding else lengths
    boundaries = np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)
    return _build(
        trajectories,
        starts=boundaries[: len(lengths)],
        position_ids=_counting(segments)[None],
        cu_seqlens=torch.from_numpy(boundaries),
        max_seqlen=max(segments),
        pad_token_id=pad_token_id,
    )


def build_padded(trajectories: Sequence[Trajectory], pad_to_multiple: int = 1, pad_token_id: int = 0) -> PackedBatch:
    """One row for each sequence, padded on the right."""
    longest = max((trajectory.num_tokens - 1 for trajectory in trajectories), default=1)
    rows, columns = max(len(trajectories), 1), round_up(longest, pad_to_multiple)
    return _build(
        trajectories,
        starts=np.arange(len(trajectories)) * columns,
        position_ids=np.tile(np.arange(columns), (rows, 1)),
        cu_seqlens=None,
        max_seqlen=longest,
        pad_token_id=pad_token_id,
    )


def split_mini_batches(groups: Sequence[Group], mini_batch_size: int) -> list[list[Group]]:
    """A rollout batch of N*M groups as N consecutive mini-batches of M = `mini_batch_size` groups each.

    Raises ValueError where the groups do not come out even.
    """
    if not groups or len(groups) % mini_batch_size:
        raise ValueError(f"{len(groups)} groups do not split into mini-batches of {mini_batch_size}")
    return [list(groups[start : start + mini_batch_size]) for start in range(0, len(groups), mini_batch_size)]


def _check(trajectory: Trajectory, index: int) -> None:
    fields = (trajectory.token_ids, trajectory.action_mask, trajectory.behavior_logprobs, trajectory.versions)
    shapes = [field.shape for field in fields]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1 or trajectory.num_tokens == 0:
        raise ValueError(
            f"trajectory {index}: token_ids, action_mask, behavior_logprobs, versions have shapes {shapes}"
        )
    if trajectory.action_mask[0]:
        raise ValueError(f"trajectory {index}: token 0 is an action token, with nothing before it to predict it from")
    if not np.isfinite(trajectory.advantage):
        raise ValueError(f"trajectory {index}: its advantage is {trajectory.advantage}, fill it before packing")


def _build(
    trajectories: Sequence[Trajectory],
    *,
    starts: np.ndarray,
    position_ids: np.ndarray,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    pad_token_id: int,
) -> PackedBatch:
    """Place sequence i at flat positions `starts[i]`, ... of a batch in the shape of `position_ids`."""
    lengths = [trajectory.num_tokens - 1 for trajectory in trajectories]
    places = np.repeat(starts, lengths) + _counting(lengths)
    predicts_action = _concatenate([trajectory.action_mask[1:] for trajectory in trajectories], bool)
    token_ids = np.full(position_ids.size, pad_token_id, dtype=np.int64)
    padding = np.ones(position_ids.size, dtype=bool)
    padding[places] = False
    token_ids[places] = _concatenate([trajectory.token_ids[:-1] for trajectory in trajectories], np.int64)

    def of_actions(field: str, dtype: type) -> torch.Tensor:
        values = _concatenate([getattr(trajectory, field)[1:] for trajectory in trajectories], dtype)
        return torch.from_numpy(values[predicts_action])

    counts = [trajectory.response_length for trajectory in trajectories] or [0]
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids.reshape(position_ids.shape)),
        position_ids=torch.from_numpy(position_ids),
        padding_mask=torch.from_numpy(padding.reshape(position_ids.shape)),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        action_index=torch.from_numpy(places[predicts_action]),
        labels=of_actions("token_ids", np.int64),
        action_cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        behavior_logprobs=of_actions("behavior_logprobs", np.float32),
        versions=of_actions("versions", np.int64),
        advantages=torch.tensor([t.advantage for t in trajectories] or [0.0], dtype=torch.float32),
        num_tokens=sum(lengths),
    )


def _counting(lengths: Sequence[int]) -> np.ndarray:
    """0, 1, ... over each length in turn."""
    return _concatenate([np.arange(length) for length in lengths], np.int64)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """`np.concatenate` that also takes no arrays at all."""
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
