"""The state of every random generator of this rank, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_rlvr.actor import platform

_TRACKER = "megatron/"  # megatron-core's own generators, by their names


def generator_states() -> dict[str, torch.Tensor]:
    """torch (CPU, and this rank's GPU), megatron-core's tracker, numpy's and Python's global generators."""
    legacy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = legacy
    version, words, python_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy/keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy/place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy/gauss": torch.tensor([gauss], dtype=torch.float64),
        "python/words": torch.tensor([version, *words], dtype=torch.int64),
        "python/gauss": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
    }
    if not platform.on_cpu():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {_TRACKER + name: state.clone() for name, state in tracked.items()}


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Put every generator back to what `generator_states` found."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and not platform.on_cpu():
        torch.cuda.set_rng_state(states["cuda"])
    position, has_gauss = states["numpy/place"].tolist()
    keys = states["numpy/keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy/gauss"].item()))
    version, *words = states["python/words"].tolist()
    gauss = states["python/gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    tracker = get_cuda_rng_tracker()
    tracked = {name.removeprefix(_TRACKER): s for name, s in states.items() if name.startswith(_TRACKER)}
    tracker.set_states({**tracker.get_states(), **tracked})
