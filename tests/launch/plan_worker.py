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
from megatron.core import parallel_state

from megatron_rlvr.actor import parallel
from megatron_rlvr.actor.model import build_chunks
from megatron_rlvr.actor.optimizer import build_optimizer, wrap_chunks
from megatron_rlvr.config.tree import ActorConfig, OptimizerConfig
from megatron_rlvr.hf import read_model_spec
from tests.launch.optimizer_bytes import optimizer_bytes
from tests.parallel.shape_worker import build_on_meta_device, join_as


def bytes_on(rank: int, path: str, config: ActorConfig) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer (after its states exist) on `rank`, and its pipeline rank."""
    join_as(rank, config)
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


def call_meta_tensors_cuda_tensors() -> None:
    """The distributed optimizer looks at a tensor's type by name."""
    name_of = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *wanted: Any, **options: Any) -> Any:
        answer = name_of(tensor, *wanted, **options)
        return answer.replace(".meta", "") if isinstance(answer, str) else answer

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]


def main() -> None:
    build_on_meta_device()
    call_meta_tensors_cuda_tensors()
    cases: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    found = [bytes_on(case["rank"], case["path"], ActorConfig.model_validate(case["actor"])) for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
