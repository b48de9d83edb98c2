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

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rlvr.actor import parallel, platform
from megatron_rlvr.actor.model import build_chunks
from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import read_model_spec


def shapes_on(rank: int, path: str, config: ActorConfig) -> dict[str, Any]:
    """What `rank` holds: its place, pipeline rank and, per model chunk, the shape of every parameter."""
    join_as(rank, config)
    _, chunks = build_chunks(read_model_spec(path), config)
    found = {
        "place": asdict(parallel.place()),
        "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "chunks": [{name: list(p.shape) for name, p in named_parameters([chunk])} for chunk in chunks],
    }
    parallel.shutdown()
    return found


def join_as(rank: int, config: ActorConfig) -> None:
    """Stand in for `rank` of the layout, in groups where nobody else is."""
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    new_group = dist.new_group

    def fake_group(*ranks: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*ranks, backend="fake", **options)  # megatron-core wants gloo groups beside the others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", fake_group)
        parallel.form_groups(config, seed=0)


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
