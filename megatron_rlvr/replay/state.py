"""A buffer as plain arrays and JSON values, and those as one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from megatron_rlvr.replay.trajectory import StoredTrajectory, integers
from megatron_rlvr.types import UserError

_JSON = "json"  # the tensor that holds the JSON values as UTF-8: a safetensors header would end at 100 MB


def pack(trajectories: Sequence[StoredTrajectory]) -> dict[str, Any]:
    """{"arrays": ..., "prompt_ids": [...], "states": {slot: [...]}}; trajectories in order, their rows end to end."""
    arrays = {
        "token_ids": _join([each.token_ids for each in trajectories], np.int32),
        "num_tokens": np.array([len(each.token_ids) for each in trajectories], dtype=np.int64),
        "prompt_length": np.array([each.prompt_length for each in trajectories], dtype=np.int64),
        "success_rate": np.array([each.success_rate for each in trajectories], dtype=np.float64),
        "reward": np.array([each.reward for each in trajectories], dtype=np.float64),
        "step": np.array([each.step for each in trajectories], dtype=np.int64),
        "expert": np.array([each.expert for each in trajectories], dtype=np.uint8),
        "positions": _join([each.positions for each in trajectories], np.int32),
        "num_positions": _sizes([each.positions for each in trajectories]),
        "fractions": _join([each.fractions for each in trajectories], np.float64),
        "num_fractions": _sizes([each.fractions for each in trajectories]),
    }
    states = {str(slot): list(each.states) for slot, each in enumerate(trajectories) if each.states is not None}
    return {"arrays": arrays, "prompt_ids": [each.prompt_id for each in trajectories], "states": states}


def unpack(state: Mapping[str, Any], stride: int) -> tuple[list[StoredTrajectory], int]:
    """Trajectories and random words taken. Raises UserError where the state does not hold together."""
    try:
        return _trajectories(state, stride), _count(state["random_words"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"the saved prefix buffer does not hold together ({type(error).__name__}: {error}); "
            "resume from an older checkpoint, or start with an empty buffer."
        ) from error


def check_settings(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises UserError where `state` was taken under other settings than `here`."""
    there = state.get("settings")
    for key, value in here.items():
        before = there.get(key) if isinstance(there, Mapping) else None
        if before != value:
            raise UserError(
                f"the saved prefix buffer has replay {key}={before} but this run has {value}; "
                "resume with the settings of the checkpoint, or start a new run."
            )


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write, sync, rename, sync: after a crash there is the old file or the new one."""
    texts = {key: value for key, value in state.items() if key != "arrays"}
    blob = np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8)
    partial = path.with_name(f".{path.name}.partial")
    save_file({**state["arrays"], _JSON: blob}, partial)
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def read(path: Path) -> dict[str, Any]:
    """The state that `write` wrote. Raises UserError where the file cannot be read or is none of that kind."""
    try:
        arrays = load_file(path)
        return {**json.loads(arrays.pop(_JSON).tobytes()), "arrays": arrays}
    except OSError as error:
        raise UserError(f"it cannot be read ({error}); name a saved prefix buffer that exists.") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"it is no saved prefix buffer ({error}); resume from an older checkpoint.") from error


def name_file(path: str | Path, load: Callable[[], None]) -> None:
    """Call `load`; what it refuses is refused with the file's name in front."""
    try:
        load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _trajectories(state: Mapping[str, Any], stride: int) -> list[StoredTrajectory]:
    arrays, ids, states = state["arrays"], [str(each) for each in state["prompt_ids"]], state["states"]
    rows = {
        "token_ids": _split(arrays["token_ids"], arrays["num_tokens"]),
        "positions": _split(arrays["positions"], arrays["num_positions"]),
        "fractions": _split(arrays["fractions"], arrays["num_fractions"]),
    }
    numbers = ("prompt_length", "success_rate", "reward", "step", "expert")
    lengths = {len(ids), *map(len, rows.values()), *(len(arrays[name]) for name in numbers)}
    if len(lengths) > 1 or len(set(ids)) < len(ids):
        raise ValueError(f"{len(ids)} prompt ids do not match the rows beside them")
    return [
        StoredTrajectory(
            prompt_id,
            integers("token_ids", rows["token_ids"][slot]),
            int(arrays["prompt_length"][slot]),
            float(arrays["success_rate"][slot]),
            float(arrays["reward"][slot]),
            int(arrays["step"][slot]),
            bool(arrays["expert"][slot]),
            stride,
            None if rows["positions"][slot] is None else integers("positions", rows["positions"][slot]),
            rows["fractions"][slot],
            tuple(states[str(slot)]) if str(slot) in states else None,
        )
        for slot, prompt_id in enumerate(ids)
    ]


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"random_words={value!r} is no count")
    return value


def _join(rows: Sequence[NDArray[Any] | None], dtype: type) -> NDArray[Any]:
    given = [row for row in rows if row is not None]
    return np.concatenate(given).astype(dtype, copy=False) if given else np.empty(0, dtype=dtype)


def _sizes(rows: Sequence[NDArray[Any] | None]) -> NDArray[np.int64]:
    """Length of each row, -1 where there is none."""
    return np.array([-1 if row is None else len(row) for row in rows], dtype=np.int64)


def _split(joined: NDArray[Any], sizes: NDArray[np.int64]) -> list[Any]:
    """Copies of the rows that `_join` put end to end, None for size -1."""
    ends = np.concatenate([[0], np.cumsum(np.maximum(sizes, 0))])
    if len(sizes) and (sizes.min() < -1 or ends[-1] != len(joined)):
        raise ValueError(f"rows of {ends[-1]} values are announced, {len(joined)} are there")
    return [
        None if size < 0 else joined[start:end].copy() for size, (start, end) in zip(sizes, pairwise(ends), strict=True)
    ]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
