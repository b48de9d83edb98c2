"""The GPU check, run here on the CPU as a user would run it on a GPU machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "device_check.sh"
GOLDEN = ROOT / "tools" / "device_check_golden.json"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), "--python", sys.executable, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)


def test_all_checks_pass_here_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    golden = json.loads(GOLDEN.read_text())
    started = time.monotonic()
    run = _run("--cpu")
    assert run.returncode == 0, run.stdout + run.stderr
    names = ("float32 update", "bf16 update", "rollout", "learning")
    assert [line.split(":")[0] for line in run.stdout.splitlines() if line.startswith(("PASS", "FAIL"))] == [
        f"PASS {name}" for name in names
    ]
    loss = re.search(r"PASS float32 update: loss (-?[\d.]+)", run.stdout)
    assert loss is not None and float(loss[1]) == pytest.approx(golden["loss"], rel=1e-5)
    rise = re.search(r"accuracy ([\d.]+) -> ([\d.]+) over 30 updates", run.stdout)
    assert rise is not None and float(rise[2]) > float(rise[1]) + 0.08
    assert re.search(r"^learning +PASS +[\d.]+ +[\d,]+ +[\d.]+$", run.stdout, re.MULTILINE)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp.")]
    print(f"device check on the CPU: {time.monotonic() - started:.0f} s")


def test_golden_values_are_those_of_plain_transformers(tmp_path: Path) -> None:
    """The golden file is not merely what Megatron said once: transformers gives the same log-probs and gradients."""
    program = """
import json, sys
from pathlib import Path
import torch
from device_case import mini_batch, write_model
from transformers import AutoModelForCausalLM
from megatron_rlvr.losses import policy_loss

path = Path(sys.argv[1])
write_model(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
batch, total, entropy, every = mini_batch(), 0.0, 0.0, []
for part in batch.micro_batches:
    rows = []
    for start, end in zip(part.cu_seqlens[:-1].tolist(), part.cu_seqlens[1:].tolist()):
        rows.append(model(part.token_ids[:, start:end]).logits[0].log_softmax(-1))
    rows = torch.cat(rows)[part.action_index]
    logprobs = rows.gather(-1, part.labels[:, None])[:, 0]
    every.append(logprobs.detach())
    entropy -= (rows.exp() * rows).sum().item()
    loss, _, _ = policy_loss(
        "respo", logprobs=logprobs, behavior_logprobs=part.behavior_logprobs, advantages=part.advantages,
        cu_seqlens=part.action_cu_seqlens, normalizer=batch.num_action_tokens,
    )
    loss.backward()
    total += loss.item()
norm = sum(p.grad.double().square().sum().item() for p in model.parameters()) ** 0.5
norms = {n: p.grad.double().norm().item() for n, p in model.named_parameters() if "expert" not in n}
print(json.dumps({"loss": total, "grad_norm": norm, "entropy": entropy / batch.num_action_tokens,
                  "logprob_before": torch.cat(every).double().mean().item(), "gradient_norms": norms}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / d) for d in ("", "tools", "examples"))}
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    oracle, golden = json.loads(run.stdout.splitlines()[-1]), json.loads(GOLDEN.read_text())
    for name in ("loss", "grad_norm", "entropy", "logprob_before"):
        assert oracle[name] == pytest.approx(golden[name], rel=1e-5), name
    assert len(oracle["gradient_norms"]) > 30
    for name, norm in oracle["gradient_norms"].items():
        assert norm == pytest.approx(golden["gradient_norms"][name], rel=1e-4), name


def test_wrong_gradients_and_loud_failures_are_told(tmp_path: Path) -> None:
    program = """
import json, sys
from pathlib import Path
import device_check
golden = json.loads(device_check.GOLDEN.read_text())
golden["gradient_norms"]["model.layers.2.mlp.gate.weight"] *= 1.001
device_check.GOLDEN = Path(sys.argv[1]) / "golden.json"
device_check.GOLDEN.write_text(json.dumps(golden))
def broken(settings):
    raise RuntimeError("no kernel image is available")
device_check.CHECKS = (device_check.CHECKS[0], ("broken", broken))
sys.argv = ["device_check", "--work", sys.argv[1] + "/work", "--cpu"]
sys.exit(device_check.main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / d) for d in ("", "tools", "examples"))}
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert run.returncode == 1, run.stderr
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAIL")]
    assert "model.layers.2.mlp.gate.weight is off by 1.0e-03" in failed[0]
    assert "RuntimeError: no kernel image is available" in failed[1]


def test_a_missing_gpu_or_wheel_folder_is_one_sentence(tmp_path: Path) -> None:
    without_gpu = _run()
    assert without_gpu.returncode == 2 and "no GPU that torch can use" in without_gpu.stderr
    without_wheels = _run("--cpu", "--wheels", str(tmp_path))
    assert without_wheels.returncode == 2 and "holds no wheel" in without_wheels.stderr
