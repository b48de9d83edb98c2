"""Two ranks: load and export checkpoints in many layouts; leaves the directories and what was read and written.

python -m tests.hf.roundtrip_worker JOB.json   (JOB: {root, cases: [{name, source, actor, broadcast, dtype, shard}]})
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlvr.actor import platform
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import ExportPlan, HFCheckpoint, Skeleton, WeightMap, read_model_spec
from megatron_rlvr.refresh import export_checkpoint, load_weights


def run_case(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One load and export; this rank's bytes."""
    from megatron_rlvr.actor.weights_only import WeightsOnly

    source, config = Path(case["source"]), ActorConfig.model_validate(case["actor"])
    spec, checkpoint = read_model_spec(source), HFCheckpoint(source)
    model = WeightsOnly(spec, config)
    weight_map = WeightMap(spec, vocab_multiple=config.tensor_parallel)
    filled: list[int] = []
    load_weights(model, checkpoint, weight_map, broadcast=case.get("broadcast", False), progress=filled.append)
    dtype = getattr(torch, case["dtype"]) if "dtype" in case else None
    plan = ExportPlan.of(Skeleton.of(checkpoint), dtype, case.get("max_shard_bytes"))
    written = export_checkpoint(model, weight_map, plan, root / case["name"])
    model.close(keep_process_group=True)
    return {"read": checkpoint.bytes_read, "written": written, "held": model.num_bytes, "filled": sum(filled)}


def main() -> None:
    platform.install()
    job = json.loads(Path(sys.argv[1]).read_text())
    root = Path(job["root"])
    for case in job["cases"]:
        everyone: list[Any] = [None] * 2
        found = run_case(root, case)
        dist.all_gather_object(everyone, found)
        if dist.get_rank() == 0:
            (root / f"{case['name']}.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
