"""Every recipe loads, fits its model, and passes all checks but those of files that only a cluster has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rlvr.config.checks import check_config
from megatron_rlvr.config.load import load_config
from megatron_rlvr.hf import read_model_spec

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
CONFIGS = ROOT / "tests/hf/configs"
PUBLISHED = {  # SPEC 7: states a step, G, lr, prompt, response, updates
    "vsr_math_qwen2.5_7b": (128, 8, 1e-6, 2048, 4096, 720),
    "vsr_math_llama3.2_3b": (128, 8, 1e-6, 2048, 4096, 720),
    "respo_qwen3_1.7b": (32 * 16, 8, 1e-6, 1024, 15360, 1024),
    "respo_qwen3_30b_a3b": (32 * 16, 8, 1e-6, 1024, 8192, 1024),
    "proximal_kl_qwen3_1.7b": (32, 8, 1e-6, 1024, 16384, 1024),
}


def loaded(recipe: Path, place: Path, *overrides: str):
    """The recipe with a model directory of the published configuration and with one-line data files."""
    model = place / "model"
    model.mkdir(exist_ok=True)
    name = load_config(recipe).model.path.name
    (model / "config.json").write_bytes((CONFIGS / name / "config.json").read_bytes())
    (model / "model.safetensors").write_bytes(b"weights are not read here")
    (place / "data.jsonl").write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + "\n")
    files = [f"model.path={model}", f"data.train={place}/data.jsonl"]
    if load_config(recipe).replay.experts is not None:
        files.append(f"replay.experts={place}/data.jsonl")
    return load_config(recipe, [*files, *overrides])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_every_check_with_its_model(recipe, tmp_path):
    config = loaded(recipe, tmp_path)
    check_config(config, read_model_spec(config.model.path))
    trainer = config.trainer
    assert PUBLISHED[recipe.stem] == (
        trainer.mini_batch_size * trainer.rollout_reuse, config.rollout.group_size, config.optimizer.lr,
        config.data.max_prompt_length, config.rollout.max_response_length, trainer.updates,
    )  # fmt: skip
    assert config.actor.world_size == 8


@pytest.mark.parametrize(
    "overrides",
    [
        ["replay.ratio=0"],
        ["replay.static=true", "replay.sampling=uniform"],
        ["replay.ratio=0", "rollout.allocation=adaptive"],
    ],
)
def test_the_controls_of_vsr_are_overrides(overrides, tmp_path):
    config = loaded(ROOT / "examples/recipes/vsr_math_llama3.2_3b.yaml", tmp_path, *overrides)
    check_config(config, read_model_spec(config.model.path))


def test_supervised_training_on_the_experts_is_one_too(tmp_path):
    recipe = ROOT / "examples/recipes/vsr_math_llama3.2_3b.yaml"
    config = loaded(recipe, tmp_path, f"sft.demonstrations={tmp_path}/data.jsonl", f"sft.output={tmp_path}/out")
    check_config(config, read_model_spec(config.model.path), command="sft")
