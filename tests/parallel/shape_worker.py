"""Official models as megatron-core builds them on chosen ranks of large layouts: names and shapes, no memory.

python -m tests.parallel.shape_worker JOB.json OUT.json (JOB: a list of {path, actor, ranks}). One process stands in
for any rank: the process groups are torch's fake ones and the tensors have no storage.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlvr.actor import parallel, platform
from megatron_rlvr.actor.model import build_chunks
from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import read_model_spec


def shapes_on(rank: int, path: str, config: ActorConfig) -> dict[str, Any]:
    """What `rank` holds: its place, pipeline rank and, per model chunk, the shape of every parameter."""
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    _, chunks = build_chunks(read_model_spec(path), config)
    found = {
        "place": asdict(parallel.place()),
        "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "chunks": [{name: list(p.shape) for name, p in named_parameters([chunk])} for chunk in chunks],
    }
    parallel.shutdown()
    return found


def build_on_meta_device() -> None:
    """megatron-core allocates parameters on the device that torch.cuda calls current."""
    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment,return-value]
    platform.device = lambda: meta


def main() -> None:
    build_on_meta_device()
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = [
        [shapes_on(rank, case["path"], ActorConfig.model_validate(case["actor"])) for rank in case["ranks"]]
        for case in cases
    ]
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
