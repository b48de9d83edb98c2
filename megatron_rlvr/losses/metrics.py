"""Metrics as sums that add over micro-batches and ranks, and the one place where they are divided.

A flat dict of float64 tensors; the end of a key says what it is:
    X/num, X/den                  -> X = num/den                      (left out when den is 0)
    X/mean/num, /den, /square     -> X/mean and X/std (population)
    X/ess_sum, /ess_square, /ess_count -> X = sum^2/square and X/share = X/count
    X/max, X/min                  reduced by max and min, all other keys by sum
    X/count_bins, X/..._bins      vectors [bins], expanded by `bins.py`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from megatron_rlvr.losses.bins import finalize_bins

Reduction = Literal["sum", "max", "min"]
_JOIN: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduction_of(key: str) -> Reduction:
    """How the values of this key join over micro-batches and ranks."""
    if key.endswith("/max"):
        return "max"
    return "min" if key.endswith("/min") else "sum"


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metric sums of several calls as those of one; a key that only some calls have keeps their part."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = _JOIN[reduction_of(key)](merged[key], value) if key in merged else value.clone()
    return merged


def flatten_metrics(sums: Mapping[str, Tensor]) -> dict[Reduction, Tensor]:
    """One float64 vector per reduction, so that a rank group needs three all-reduces whatever the number of keys."""
    parts: dict[Reduction, list[Tensor]] = {"sum": [], "max": [], "min": []}
    for key in sorted(sums):
        parts[reduction_of(key)].append(sums[key].double().reshape(-1))
    return {op: torch.cat(values) if values else torch.zeros(0, dtype=torch.float64) for op, values in parts.items()}


def unflatten_metrics(vectors: Mapping[Reduction, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flatten_metrics`; `like` gives keys and shapes."""
    used: dict[Reduction, int] = {"sum": 0, "max": 0, "min": 0}
    sums = {}
    for key in sorted(like):
        op, size = reduction_of(key), like[key].numel()
        sums[key] = vectors[op][used[op] : used[op] + size].reshape(like[key].shape).clone()
        used[op] += size
    return sums


def finalize_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Named numbers from fully reduced sums; one transfer from the device. Quantities of nothing are left out."""
    values = {key: list(value) for key, value in _to_lists(sums).items()}
    result = finalize_bins({key: value for key, value in values.items() if key.endswith("_bins")})
    scalars = {key: value[0] for key, value in values.items() if not key.endswith("_bins")}
    for key, value in scalars.items():
        name, _, last = key.rpartition("/")
        if last in ("max", "min") and math.isfinite(value):
            result[key] = value
        elif last == "den" and value != 0:
            result.update(_ratio(name, scalars))
        elif last == "ess_count" and value != 0:
            result.update(_effective_size(name, scalars))
    return dict(sorted(result.items()))


def _ratio(name: str, scalars: Mapping[str, float]) -> dict[str, float]:
    mean = scalars[f"{name}/num"] / scalars[f"{name}/den"]
    found = {name: mean}
    if f"{name}/square" in scalars:
        variance = scalars[f"{name}/square"] / scalars[f"{name}/den"] - mean * mean
        found[name.removesuffix("mean") + "std"] = math.sqrt(max(variance, 0.0))
    return found


def _effective_size(name: str, scalars: Mapping[str, float]) -> dict[str, float]:
    square = scalars[f"{name}/ess_square"]
    size = scalars[f"{name}/ess_sum"] ** 2 / square if square > 0 else 0.0
    return {name: size, f"{name}/share": size / scalars[f"{name}/ess_count"]}


def _to_lists(sums: Mapping[str, Tensor]) -> dict[str, list[float]]:
    if not sums:
        return {}
    flat = torch.cat([value.double().reshape(-1) for value in sums.values()]).tolist()
    lists, start = {}, 0
    for key, value in sums.items():
        lists[key] = flat[start : start + value.numel()]
        start += value.numel()
    return lists
