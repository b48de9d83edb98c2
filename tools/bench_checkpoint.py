"""Measure loading a Hugging Face checkpoint into Megatron's shards and exporting it, beside `cp` of the same bytes.

    python tools/bench_checkpoint.py HF_DIR FOLDER [--size-gb 8] [--broadcast] [--json OUT.json] [actor.key=value ...]

HF_DIR is made with tools/make_synthetic_checkpoint.py where it does not exist. The copy and the export are written into
FOLDER and removed. Default layout: two ranks, EP2. Every measurement starts with the checkpoint out of the page cache
and includes making what was written durable (fsync), so that all move the same bytes between the same disk and memory.

Memory is VmHWM, the kernel's exact peak of the resident set, set back before each phase: everything counts, Python,
libraries and all. No weight file is ever mapped, so no page of one can hide in it or swell it. Bytes read are counted
by the reader at every system call; rchar of /proc/self/io is kept beside them. The export is compared byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GB = 1e9


def peak_memory(action: Callable[[], object]) -> dict[str, float]:
    """Seconds, and resident bytes before, at the peak of `action`, and read through system calls, of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to the present
    before, read, started = _status("VmRSS"), _rchar(), time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "before": before, "peak": _status("VmHWM"), "rchar": _rchar() - read}


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def evict(directory: Path) -> None:
    """Put a directory's files out of the page cache."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rank(job: dict[str, Any]) -> None:
    """One rank: load, export; rank 0 writes what all measured to job["found"]."""
    from megatron_rlvr.actor import platform

    platform.install()
    import torch.distributed as dist

    from megatron_rlvr.actor.weights_only import WeightsOnly
    from megatron_rlvr.config.tree import ActorConfig
    from megatron_rlvr.hf import ExportPlan, HFCheckpoint, Skeleton, WeightMap, read_model_spec
    from megatron_rlvr.refresh import export_checkpoint, load_weights

    source, config = Path(job["source"]), ActorConfig.model_validate(job["actor"])
    spec, checkpoint = read_model_spec(source), HFCheckpoint(source)
    model = WeightsOnly(spec, config)
    weight_map = WeightMap(spec, vocab_multiple=config.tensor_parallel)

    def load() -> None:
        load_weights(model, checkpoint, weight_map, broadcast=job["broadcast"])
        dist.barrier()

    def export() -> None:
        export_checkpoint(model, weight_map, ExportPlan.of(Skeleton.of(checkpoint)), Path(job["target"]))

    dist.barrier()
    mine: dict[str, Any] = {"load": peak_memory(load), "read": checkpoint.bytes_read, "shard": model.num_bytes}
    mine["export"] = peak_memory(export)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        Path(job["found"]).write_text(json.dumps(everyone))
    model.close()


def measure(source: Path, folder: Path, actor: dict[str, Any], broadcast: bool) -> dict[str, Any]:
    """Copy, load and export `source`; bytes, seconds and per-rank figures. Raises RuntimeError where a rank fails."""
    from launch.local import run_local
    from megatron_rlvr.config.tree import ActorConfig
    from megatron_rlvr.hf.staging import remove

    copy, target = folder / "copy", folder / "export"
    evict(source)
    copied = time_copy(source, copy)
    remove(copy)
    evict(source)
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        job = {
            "source": str(source),
            "target": str(target),
            "found": str(found),
            "actor": actor,
            "broadcast": broadcast,
        }
        (Path(scratch) / "job.json").write_text(json.dumps(job))
        command = [sys.executable, __file__, "--rank", f"{scratch}/job.json"]
        world_size = ActorConfig.model_validate(actor).world_size
        if run_local(command, world_size, threads=1, log_dir=Path(scratch) / "logs") != 0:
            raise RuntimeError("a rank failed; its error is above")
        ranks = json.loads(found.read_text())
    same = all(filecmp.cmp(target / file.name, file, shallow=False) for file in source.iterdir())
    remove(target)
    size = sum(file.stat().st_size for file in source.iterdir())
    return {"bytes": size, "copy": copied, "ranks": ranks, "identical": same, "actor": actor, "broadcast": broadcast}


def time_copy(source: Path, target: Path) -> dict[str, float]:
    """Seconds that `cp -r` takes, alone and with its result made durable."""
    from megatron_rlvr.hf.staging import sync_directory

    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    alone = time.perf_counter() - started
    sync_directory(target)
    return {"seconds": alone, "durable_seconds": time.perf_counter() - started}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The figures that the bounds are about: ratios to the checkpoint, to cp, and GB over the largest shard."""
    ranks, size = found["ranks"], found["bytes"]
    copy = size / found["copy"]["durable_seconds"]
    return {
        "read_ratio": sum(r["read"] for r in ranks) / size,
        "over_shard_gb": max(max(r[p]["peak"] for p in ("load", "export")) - r["shard"] for r in ranks) / GB,
        "copy_gb_s": copy / GB,
        "load_speed": size / max(r["load"]["seconds"] for r in ranks) / copy,
        "export_speed": size / max(r["export"]["seconds"] for r in ranks) / copy,
    }


def table(found: dict[str, Any]) -> str:
    """The measurements as rows of a Markdown table, and the ratios below."""
    head = "| rank | shard GB | read GB | load s | load peak GB | export s | export peak GB |"
    rows = [
        f"| {i} | {r['shard'] / GB:.2f} | {r['read'] / GB:.2f} | {r['load']['seconds']:.1f} | "
        f"{r['load']['peak'] / GB:.2f} | {r['export']['seconds']:.1f} | {r['export']['peak'] / GB:.2f} |"
        for i, r in enumerate(found["ranks"])
    ]
    s = summary(found)
    ratios = (
        f"{found['bytes'] / GB:.2f} GB, {found['actor']}; cp {found['copy']['seconds']:.1f} s, "
        f"{found['copy']['durable_seconds']:.1f} s with fsync ({s['copy_gb_s']:.2f} GB/s)\n"
        f"read {s['read_ratio']:.3f} x the checkpoint; peak {s['over_shard_gb']:.2f} GB over the shard; load "
        f"{s['load_speed']:.2f} x and export {s['export_speed']:.2f} x the speed of cp; the export is "
        f"{'identical to the source' if found['identical'] else 'NOT the source'}"
    )
    return "\n".join([head, "|" + "---|" * 7, *rows, "", ratios])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure loading and export of a checkpoint.")
    parser.add_argument("source", type=Path, help="Hugging Face directory")
    parser.add_argument("folder", type=Path, help="where the copy and the export are written for a while")
    parser.add_argument("overrides", nargs="*", metavar="actor.key=value", help="layout; default EP2 on two ranks")
    parser.add_argument("--size-gb", type=float, default=8.0, help="of a synthetic checkpoint, where source is absent")
    parser.add_argument("--broadcast", action="store_true", help="one replica reads for all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    from megatron_rlvr.config.load import parse_override

    actor = {path[-1]: value for path, value in map(parse_override, args.overrides)}
    if not args.source.exists():
        import make_synthetic_checkpoint

        make_synthetic_checkpoint.write(
            make_synthetic_checkpoint.parser().parse_args([str(args.source), "--size-gb", str(args.size_gb)])
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    layout = actor or {"expert_parallel": 2, "data_parallel": 2}
    found = measure(args.source.absolute(), args.folder.absolute(), layout, args.broadcast)
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found | summary(found), indent=1))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(json.loads(Path(sys.argv[2]).read_text()))
        sys.exit(0)
    sys.exit(main())
