"""The learner with its checkpoint and names: what RL and supervised warm-up both start from and end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.actor.model import DTYPES
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import HFCheckpoint, WeightMap, read_model_spec, write_checkpoint
from megatron_rlvr.refresh import exported_weights, load_weights


class Learner:
    """An Actor loaded from `model.path`, which can be written back as a Hugging Face directory."""

    def __init__(self, config: RunConfig, updates: int) -> None:
        self.config = config
        self.source = HFCheckpoint(config.model.path)
        self.spec = read_model_spec(config.model.path)
        self.weight_map = WeightMap(self.spec, vocab_multiple=config.actor.tensor_parallel)
        self.source.check_complete(self.spec)
        self.actor = Actor(
            self.spec,
            config.actor,
            config.optimizer,
            updates=updates,
            seed=config.seed,
            distribution=config.logprob_distribution,
        )
        load_weights(self.actor, self.source, self.weight_map)

    def batch_options(self) -> dict[str, Any]:
        """How `build_mini_batch` cuts a mini-batch for this rank."""
        actor = self.config.actor
        return dict(
            data_parallel_size=actor.data_parallel,
            data_parallel_rank=self.actor.data_parallel_rank,
            micro_batch_tokens=actor.micro_batch_tokens,
            layout=actor.batch_layout,
            pad_to_multiple=actor.tensor_parallel * actor.sequence_multiple,
            sequence_multiple=actor.sequence_multiple,
            micro_batch_multiple=actor.pipeline_parallel if actor.virtual_pipeline > 1 else 1,
        )

    def save(self, target: Path) -> None:
        """Write the model as a Hugging Face directory, whole or not at all; a collective over all ranks."""
        tensors = exported_weights(self.actor, self.weight_map)
        if dist.get_rank() == 0:
            dtype = DTYPES[self.config.actor.dtype]  # which need not be the source's
            write_checkpoint(target, self.config.model.path, tensors, dtype, overwrite=True)
        else:
            for _ in tensors:
                continue
        dist.barrier()

    def close(self) -> None:
        self.actor.close()
