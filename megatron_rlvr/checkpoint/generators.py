"""The random generators of all ranks in one file."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rlvr.actor.generators import generator_states, restore_generators

_FILE = "generators.safetensors"


def save_generators(directory: Path) -> None:
    """Write every rank's generators into `directory`; a collective."""
    everyone: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, generator_states())
    if dist.get_rank() == 0:
        named = {f"{rank}/{name}": state for rank, states in enumerate(everyone) for name, state in states.items()}
        save_file(named, directory / _FILE)


def load_generators(directory: Path) -> None:
    """Put this rank's generators back to where the rank of the same number had them."""
    mine = f"{dist.get_rank()}/"
    stored = load_file(directory / _FILE)
    restore_generators({name.removeprefix(mine): state for name, state in stored.items() if name.startswith(mine)})
