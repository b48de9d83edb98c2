"""Published step times of Qwen3-30B-A3B, and what the roofline says of the same setting."""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.counts import Counts
from launch.plan.hardware import GPUS
from launch.plan.timing import EngineSize, Times, Work, estimate
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import ModelSpec

MODEL = "Qwen3-30B-A3B"
READ = "2026-11-30"


@dataclass(frozen=True)
class Published:
    """One row of somebody's table, and its setting as far as the source tells it.

    seconds   phase -> measured seconds
    assumed   what the source leaves open and the comparison had to assume
    """

    source: str
    url: str
    setting: str
    seconds: dict[str, float]
    gpu: str
    actor: ActorConfig
    work: Work
    engine: EngineSize
    assumed: str


_KV_TOKENS = 300_000

PUBLISHED = (
    Published(
        source="NeMo-RL v0.4",
        url="https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md",
        setting="GRPO on policy, 32 H100, 2,048 responses in 4 updates of 512, mean sequence 3,154 of 4,096 tokens; "
        "training TP2 EP8, generation TP4",
        seconds={"step": 225.0},
        gpu="h100-80g",
        actor=ActorConfig(
            tensor_parallel=2,
            expert_parallel=8,
            data_parallel=16,
            distributed_optimizer=True,
            recompute="full",
        ),
        work=Work(512, 4, 32, 200, 2954, 3896, old_logprobs=True, refresh_interval=4),
        engine=EngineSize(4, 256, _KV_TOKENS, "bf16"),
        assumed="prompts of 200 tokens, full recompute, 256 sequences an engine",
    ),
    Published(
        source="verl, fully async recipe, colocate sync baseline",
        url="https://github.com/verl-project/verl/blob/main/docs/advance/fully_async.md",
        setting="GRPO, 128 H20, 512 prompts x 16 responses of up to 8,192 tokens in 4 updates",
        seconds={
            "step": 497.89,
            "rollout": 348.05,
            "old log-probs": 28.73,
            "reference": 20.86,
            "updates": 86.27,
        },
        gpu="h20-96g",
        actor=ActorConfig(
            tensor_parallel=2,
            expert_parallel=8,
            data_parallel=64,
            distributed_optimizer=True,
            recompute="full",
        ),
        work=Work(
            2048,
            4,
            16,
            200,
            1500,
            8192,
            old_logprobs=True,
            reference=True,
            refresh_interval=4,
        ),
        engine=EngineSize(4, 256, _KV_TOKENS, "bf16"),
        assumed="layout, mean response of 1,500 tokens, full recompute, 256 sequences an engine",
    ),
    Published(
        source="verl, checkpoint-engine table",
        url="https://github.com/verl-project/verl/blob/main/docs/advance/fully_async.md",
        setting="weight refresh from 16 H20 trainers to 16 H20 engines, without and with its checkpoint engine",
        seconds={"refresh": 15.76, "refresh, checkpoint engine": 4.38},
        gpu="h20-96g",
        actor=ActorConfig(
            tensor_parallel=2,
            expert_parallel=8,
            data_parallel=8,
            distributed_optimizer=True,
        ),
        work=Work(512, 4, 16, 200, 1500, 8192),
        engine=EngineSize(4, 256, _KV_TOKENS, "bf16"),
        assumed="layout",
    ),
    Published(
        source="ms-swift on Megatron",
        url="https://github.com/QwenLM/Qwen3/issues/1278",
        setting="supervised, 16 A800 80G, TP2 EP8, full recompute, 16 packed sequences of 8,192 tokens an update; "
        "60 GiB a GPU; DeepSpeed ZeRO-2 on the same 16 GPUs ran out of memory",
        seconds={"update": 9.6},
        gpu="a800-80g",
        actor=ActorConfig(
            tensor_parallel=2,
            expert_parallel=8,
            data_parallel=8,
            distributed_optimizer=True,
            recompute="full",
            micro_batch_tokens=8192,
        ),
        work=Work(16, 1, 1, 0, 8192, 8192),
        engine=EngineSize(4, 256, _KV_TOKENS, "bf16"),
        assumed="attention over whole packed rows",
    ),
)


def is_reference_model(spec: ModelSpec) -> bool:
    """Whether the published figures are of a model of this shape."""
    shape = (
        spec.num_layers,
        spec.hidden_size,
        spec.num_experts,
        spec.moe_intermediate_size,
    )
    return shape == (48, 2048, 128, 768)


def same_setting(row: Published, counts: Counts) -> Times:
    """The roofline in the published setting."""
    return estimate(counts, row.work, row.actor, row.engine, GPUS[row.gpu])


def comparable(times: Times, work: Work) -> dict[str, float]:
    """The estimate's phases under the names of `Published.seconds`; a step there is a whole rollout batch."""
    passes = max(1, work.old_logprobs + work.reference)
    return {
        "step": times.step * work.updates,
        "rollout": times.rollout,
        "old log-probs": times.rescoring * work.updates / passes,
        "reference": times.rescoring * work.updates / passes,
        "updates": times.update * work.updates,
        "update": times.update,
        "refresh": times.refresh,
        "refresh, checkpoint engine": times.refresh,
    }
