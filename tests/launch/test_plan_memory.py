"""Bytes that the planner predicts against models and optimizers that megatron-core really builds."""

from __future__ import annotations

import json

import pytest
import torch

from launch.plan.counts import Counts
from launch.plan.memory import training_state
from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.config.tree import ActorConfig, OptimizerConfig
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.types import ModelSpec
from tests.hf.official import FOLDER
from tests.launch.optimizer_bytes import optimizer_bytes
from tests.ranks import run_ranks

PATH = FOLDER / "Qwen3-30B-A3B"
SHARDED = {"distributed_optimizer": True}
LAYOUTS = [  # (actor, rank whose bytes are counted)
    ({"tensor_parallel": 2, "expert_parallel": 8, "data_parallel": 4} | SHARDED, 0),  # the published recipe
    ({"tensor_parallel": 2, "pipeline_parallel": 6, "expert_parallel": 8, "data_parallel": 16} | SHARDED, 191),
    ({"pipeline_parallel": 6, "expert_parallel": 16, "data_parallel": 16, "dtype": "float32"} | SHARDED, 3),
    ({"tensor_parallel": 4, "pipeline_parallel": 3, "expert_parallel": 32, "data_parallel": 16} | SHARDED, 100),
    ({"tensor_parallel": 4, "pipeline_parallel": 6, "expert_parallel": 16, "data_parallel": 4}, 15),
    ({"tensor_parallel": 2, "pipeline_parallel": 3, "expert_parallel": 16, "data_parallel": 8, "dtype": "float32"}, 47),
    (
        {
            "tensor_parallel": 2,
            "context_parallel": 2,
            "pipeline_parallel": 3,
            "expert_parallel": 16,
            "data_parallel": 4,
        }
        | SHARDED,
        9,
    ),
    ({"tensor_parallel": 2, "pipeline_parallel": 4, "expert_parallel": 8, "data_parallel": 8} | SHARDED, 0),
    ({"pipeline_parallel": 12, "expert_parallel": 8, "data_parallel": 8, "dtype": "float32"}, 95),
    (
        {"tensor_parallel": 2, "pipeline_parallel": 4, "virtual_pipeline": 3, "expert_parallel": 8, "data_parallel": 4},
        31,
    ),
    (
        {
            "tensor_parallel": 4,
            "pipeline_parallel": 4,
            "expert_parallel": 8,
            "expert_tensor_parallel": 2,
            "data_parallel": 4,
        }
        | SHARDED,
        21,
    ),
    ({"pipeline_parallel": 8, "expert_parallel": 4, "data_parallel": 8} | SHARDED, 63),
]
TINY = ModelSpec(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=512,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    eos_token_ids=(3,),
    moe_layers=(True, False),
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    job = [{"path": str(PATH), "actor": actor, "rank": rank} for actor, rank in LAYOUTS]
    (folder / "job.json").write_text(json.dumps(job))
    files = str(folder / "job.json"), str(folder / "found.json")
    run_ranks("tests.launch.plan_worker", 1, *files, log_dir=folder / "logs")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", range(len(LAYOUTS)))
def test_training_state_is_what_megatron_holds(built, case):
    actor, found = ActorConfig.model_validate(LAYOUTS[case][0]), built[case]
    count = Counts(read_model_spec(PATH)).stage(actor, found["pipeline_rank"])
    planned = training_state(count, actor)
    assert planned.weights == found["weights"] and planned.gradients == found["gradients"]
    assert planned.weights + planned.optimizer == pytest.approx(found["weights"] + found["optimizer"], rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_training_state_of_a_real_model_after_a_real_step(dtype, sharded):
    config = ActorConfig(dtype=dtype, distributed_optimizer=sharded)
    actor = Actor(TINY, config, OptimizerConfig(), updates=2, seed=0)
    try:
        shapes = {name: p.shape for name, p in actor._parameters.items()}
        actor.load(lambda name, place: torch.full(shapes[name], 0.5))
        for parameter in actor._parameters.values():
            parameter.main_grad.fill_(0.1)
        actor.step()
        held = actor.num_bytes + optimizer_bytes(actor.optimizer, dtype)
    finally:
        actor.close()
    planned = training_state(Counts(TINY).stage(config, 0), config)
    assert planned.weights == actor.num_bytes
    assert planned.weights + planned.optimizer == pytest.approx(held, rel=0.02)
