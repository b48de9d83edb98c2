"""Histograms over responses: by log W for each sign of the advantage (ReSPO Tables 5-7), and by response length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

LOG_W_EDGES = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
DEEP_TAIL = -1.0  # log W below this is the deep tail of ReSPO Table 5
LENGTH_EDGES = (256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def bin_sums(keys: Tensor, edges: Sequence[float], values: Tensor) -> Tensor:
    """[len(edges)+1] float64: sums of `values` [S] over bins [lo, hi) of `keys` [S]; open at both ends."""
    bins = torch.bucketize(keys, torch.tensor(edges, dtype=keys.dtype, device=keys.device), right=True)
    member = bins[:, None] == torch.arange(len(edges) + 1, device=keys.device)  # no atomics: the same on every run
    return (member * values.double()[:, None]).sum(0)


def tail_sums(log_w: Tensor, advantages: Tensor, mass: Tensor, lengths: Tensor, positive: bool) -> dict[str, Tensor]:
    """Per bin of log W: responses, coefficient mass and tokens of the responses with A > 0 (or A < 0).

    log_w [S] before the clamp; mass [S] is |A| phi, for token-level losses the mean |c_t| of the response; lengths [S]
    """
    sign = "positive" if positive else "negative"
    chosen = ((advantages > 0) if positive else (advantages < 0)) & (lengths > 0)
    return {
        f"tail/{sign}/count_bins": bin_sums(log_w, LOG_W_EDGES, chosen),
        f"tail/{sign}/mass_bins": bin_sums(log_w, LOG_W_EDGES, mass * chosen),
        f"tail/{sign}/length_bins": bin_sums(log_w, LOG_W_EDGES, lengths * chosen),
    }


def weight_by_length_sums(weights: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Per bin of response length: responses and their mean kernel weights [S]; shows starvation of long responses."""
    keys, chosen = lengths.double(), lengths > 0
    return {
        "weight_by_length/count_bins": bin_sums(keys, LENGTH_EDGES, chosen),
        "weight_by_length/weight_bins": bin_sums(keys, LENGTH_EDGES, weights * chosen),
    }


def finalize_bins(vectors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Shares p, m, amplification m/p, mean length per bin of log W and over its deep tail, and the responses in all of
    them; mean weight by length."""
    found: dict[str, float] = {}
    for sign in ("positive", "negative"):
        name = f"tail/{sign}"
        if f"{name}/count_bins" in vectors:
            columns = (vectors[f"{name}/{kind}_bins"] for kind in ("count", "mass", "length"))
            found.update(_finalize_tail(name, *columns))
    if "weight_by_length/count_bins" in vectors:
        pairs = zip(vectors["weight_by_length/count_bins"], vectors["weight_by_length/weight_bins"], strict=True)
        for label, (count, weight) in zip(bin_labels(LENGTH_EDGES), pairs, strict=True):
            if count:
                found[f"weight_by_length/{label}"] = weight / count
    return found


def _finalize_tail(
    name: str, counts: Sequence[float], masses: Sequence[float], lengths: Sequence[float]
) -> dict[str, float]:
    found: dict[str, float] = {}
    total, total_mass = sum(counts), sum(masses)
    deep = LOG_W_EDGES.index(DEEP_TAIL) + 1
    rows = [*zip(bin_labels(LOG_W_EDGES), counts, masses, lengths, strict=True)]
    rows.append(("deep", sum(counts[:deep]), sum(masses[:deep]), sum(lengths[:deep])))
    if total:
        found[f"{name}/n"] = total
    for label, count, mass, length in rows:
        if total:
            found[f"{name}/p/{label}"] = count / total
        if total_mass:
            found[f"{name}/m/{label}"] = mass / total_mass
        if count:
            found[f"{name}/mean_length/{label}"] = length / count
        if count and total_mass:
            found[f"{name}/amplification/{label}"] = (mass / total_mass) / (count / total)
    return found


def bin_labels(edges: Sequence[float]) -> list[str]:
    """Names of the bins: `below_-20`, `-20..-10`, ..., `from_20`; safe as TensorBoard tags."""
    inner = [f"{low:g}..{high:g}" for low, high in pairwise(edges)]
    return [f"below_{edges[0]:g}", *inner, f"from_{edges[-1]:g}"]
