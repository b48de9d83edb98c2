"""The learner with its checkpoint and names: what RL and supervised warm-up both start from and end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.actor.model import DTYPES
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import ExportPlan, HFCheckpoint, Skeleton, WeightMap, read_model_spec
from megatron_rlvr.observability.progress import byte_bar
from megatron_rlvr.refresh import export_checkpoint, load_weights


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
        with self._bar("load", self.actor.num_bytes) as bar:
            load_weights(
                self.actor,
                self.source,
                self.weight_map,
                broadcast=config.model.broadcast_load,
                progress=bar.update,
            )

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
        dtype = DTYPES[self.config.actor.dtype]  # which need not be the source's
        plan = ExportPlan.of(Skeleton.of(self.source), dtype)
        with self._bar("export", self.actor.num_bytes) as bar:
            export_checkpoint(self.actor, self.weight_map, plan, target, overwrite=True, progress=bar.update)

    def _bar(self, what: str, num_bytes: int) -> Any:
        return byte_bar(num_bytes, what, shown=self.config.logging.progress and dist.get_rank() == 0)

    def close(self) -> None:
        self.actor.close()
