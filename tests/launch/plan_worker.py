"""Official models with their real optimizer on chosen ranks of large layouts: bytes, without memory.

python -m tests.launch.plan_worker JOB.json OUT.json (JOB: a list of {path, actor, rank}). One process stands in for any
rank: the process groups are torch's fake ones, the tensors have no storage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlvr.actor import parallel
from megatron_rlvr.actor.model import build_chunks
from megatron_rlvr.actor.optimizer import build_optimizer, wrap_chunks
from megatron_rlvr.config.tree import ActorConfig, OptimizerConfig
from megatron_rlvr.hf import read_model_spec
from tests.launch.optimizer_bytes import optimizer_bytes
from tests.parallel.shape_worker import build_on_meta_device


def bytes_on(rank: int, path: str, config: ActorConfig) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer (after its states exist) on `rank`, and its pipeline rank."""
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    megatron_config, chunks = build_chunks(read_model_spec(path), config)
    wrapped = wrap_chunks(config, megatron_config, chunks)
    optimizer = build_optimizer(OptimizerConfig(), config, megatron_config, wrapped)
    found = {
        "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "weights": sum(p.nbytes for chunk in chunks for p in chunk.parameters()),
        "gradients": sum(p.main_grad.nbytes for chunk in chunks for p in chunk.parameters()),
        "optimizer": optimizer_bytes(optimizer, config.dtype),
    }
    parallel.shutdown()
    return found


def fake_all_groups() -> None:
    """megatron-core's optimizer wants gloo groups beside the others; there is nobody to meet in them."""
    new_group = dist.new_group
    dist.new_group = lambda *ranks, backend=None, **options: new_group(*ranks, backend="fake", **options)  # type: ignore


def call_meta_tensors_cuda_tensors() -> None:
    """The distributed optimizer looks at a tensor's type by name."""
    name_of = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *wanted: Any, **options: Any) -> Any:
        answer = name_of(tensor, *wanted, **options)
        return answer.replace(".meta", "") if isinstance(answer, str) else answer

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def main() -> None:
    build_on_meta_device()
    fake_all_groups()
    call_meta_tensors_cuda_tensors()
    cases: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    found = [bytes_on(case["rank"], case["path"], ActorConfig.model_validate(case["actor"])) for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
