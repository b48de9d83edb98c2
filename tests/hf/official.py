"""The official configurations, and the tensors that transformers gives a model of each: built on the meta device."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "configs"
NAMES = sorted(path.name for path in FOLDER.iterdir())

# As the Hugging Face Hub counts the tensors of the published files, a tied head once.
PUBLISHED_PARAMETERS = {
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-8B-Base": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-30B-A3B-Base": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def config(name: str) -> dict:
    """config.json of `name`."""
    return json.loads((FOLDER / name / "config.json").read_text())


@functools.cache
def transformers_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint with one tensor per expert; a tied head is left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER / name))
    shapes: dict[str, tuple[int, ...]] = {}
    for key, weight in model.named_parameters():
        shape = tuple(weight.shape)
        prefix, _, fused = key.rpartition(".")
        if fused == "gate_up_proj":
            experts, both, hidden = shape
            names = [f"{prefix}.{e}.{x}_proj.weight" for e in range(experts) for x in ("gate", "up")]
            shapes |= dict.fromkeys(names, (both // 2, hidden))
        elif fused == "down_proj":
            shapes |= {f"{prefix}.{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
        else:
            shapes[key] = shape
    return shapes
