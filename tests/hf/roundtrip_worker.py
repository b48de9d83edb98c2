"""Two ranks: load, export and convert checkpoints in many layouts; leaves the directories and each rank's bytes.

python -m tests.hf.roundtrip_worker JOB.json   (JOB: root, cases, conversions; see test_round_trip.py)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rlvr.actor import platform
from megatron_rlvr.config.load import build_config
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


def convert(source: Path, checkpoint: Path, actor: dict[str, Any], back: dict[str, dict[str, Any]]) -> None:
    """`source` to a distributed checkpoint in one layout, and that to a Hugging Face directory in others."""
    from megatron_rlvr.convert import HF_FOLDER, Job, hf_to_megatron, megatron_to_hf

    def job(model: Path, start: Path, target: Path, layout: dict[str, Any], direction: Any) -> Job:
        tree = {"run_dir": str(target), "model": {"path": str(model)}, "data": {}, "actor": layout}
        return Job(direction=direction, source=start, target=target, config=build_config(tree))

    hf_to_megatron(job(source, source, checkpoint, actor, "hf-to-megatron"), keep_process_group=True)
    for name, layout in back.items():
        target = checkpoint.with_name(f"{checkpoint.name}.{name}")
        megatron_to_hf(
            job(checkpoint / HF_FOLDER, checkpoint, target, layout, "megatron-to-hf"), keep_process_group=True
        )


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
    for conversion in job["conversions"]:
        convert(Path(conversion["source"]), root / conversion["name"], conversion["actor"], conversion["back"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
