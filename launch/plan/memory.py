"""Bytes on one GPU, term by term, of the pipeline stage that needs most.

Weights, gradients and optimizer follow megatron-core 0.16 and 0.19: DistributedDataParallel keeps every gradient of the
rank in float32; the distributed optimizer shards master weights and moments, not gradients, over data x context ranks
(dense parameters) and over the expert data parallel ranks, world / (expert tensor x expert x pipeline) (experts).
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.activations import head_bytes, layer_activations, stored_layers
from launch.plan.counts import Count, Counts, largest_tensor
from launch.plan.hardware import GIB, GPUS_PER_NODE, Gpu
from megatron_rlvr.config.tree import ActorConfig, RunConfig
from megatron_rlvr.losses import uses_reference
from megatron_rlvr.types import ModelSpec

BYTES = {"float32": 4, "bf16": 2, "fp8": 1}
GRADIENT_BYTES = 4  # DistributedDataParallelConfig(grad_reduce_in_fp32=True)
OPTIMIZER_BYTES = {
    "float32": 8,
    "bf16": 12,
}  # two float32 moments; with bf16 weights a float32 master copy as well
ENGINE_WORKING_GIB = 2.0
OVERHEAD_GIB = 4.0


@dataclass(frozen=True)
class Terms:
    """Bytes on one GPU. Activations with the head, and the buffers of a refresh, are not alive at the same time.

    engine_weights, kv_cache, engine_working   add up to what vLLM takes
    host_reference  bytes of pinned host memory per rank, not on the GPU
    stage           the pipeline rank that these are of
    kv_tokens       tokens that the KV cache of one engine (over its GPUs) holds
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    routes: int
    engine_weights: int
    kv_cache: int
    engine_working: int
    refresh: int
    overhead: int
    host_reference: int
    stage: int
    kv_tokens: int

    @property
    def training_state(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def engine(self) -> int:
        return self.engine_weights + self.kv_cache + self.engine_working

    @property
    def total(self) -> int:
        """The peak: either an update is computed or a refresh runs."""
        computing = self.activations + self.head + self.routes
        return self.training_state + self.engine + self.overhead + max(computing, self.refresh)

    def named(self) -> dict[str, int]:
        """The terms that count for `total`, by name, in the report's order."""
        names = (
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "head",
            "routes",
            "engine_weights",
            "kv_cache",
            "engine_working",
            "refresh",
            "overhead",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def largest(self) -> tuple[str, int]:
        """The term that takes most, and its bytes."""
        name = max(self.named(), key=self.named().__getitem__)
        return name, self.named()[name]


@dataclass(frozen=True)
class State:
    """Bytes of one rank's training state."""

    weights: int
    gradients: int
    optimizer: int


def training_state(count: Count, actor: ActorConfig) -> State:
    """Weights, gradients and optimizer of a rank that holds `count` parameters (see the module)."""
    per_parameter = OPTIMIZER_BYTES[actor.dtype]
    dense, expert = count.dense * per_parameter, count.expert * per_parameter
    if actor.distributed_optimizer:
        dense //= actor.data_parallel * actor.context_parallel
        expert //= expert_data_parallel(actor)
    return State(count.total * BYTES[actor.dtype], count.total * GRADIENT_BYTES, dense + expert)


def expert_data_parallel(actor: ActorConfig) -> int:
    """Ranks that hold the same experts."""
    return actor.world_size // (actor.expert_tensor * actor.expert_parallel * actor.pipeline_parallel)


def memory_terms(config: RunConfig, counts: Counts, gpu: Gpu, rollout_tensor_parallel: int = 1) -> Terms:
    """The terms of the pipeline stage with the highest peak."""
    engine = _engine(config, counts, gpu, rollout_tensor_parallel)
    refresh = 2 * largest_tensor(counts.spec) * BYTES[config.actor.dtype]  # its shards, and the whole made of them
    stages = [_stage_terms(config, counts, rank, engine, refresh) for rank in range(config.actor.pipeline_parallel)]
    return max(stages, key=lambda terms: terms.total)


def _stage_terms(
    config: RunConfig,
    counts: Counts,
    rank: int,
    engine: tuple[int, int, int, int],
    refresh: int,
) -> Terms:
    actor, spec = config.actor, counts.spec
    state = training_state(counts.stage(actor, rank), actor)
    keeps_reference = uses_reference(config.loss.name, config.reference.enabled)
    last = rank == actor.pipeline_parallel - 1
    engine_weights, kv_cache, engine_working, kv_tokens = engine
    return Terms(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=_activations(config, spec, rank),
        head=head_bytes(actor, spec) if last else 0,
        routes=_routes(actor, spec),
        engine_weights=engine_weights,
        kv_cache=kv_cache,
        engine_working=engine_working,
        refresh=refresh,
        overhead=round(OVERHEAD_GIB * GIB),
        host_reference=2 * state.weights if keeps_reference else 0,  # the reference, and a place for the learner
        stage=rank,
        kv_tokens=kv_tokens,
    )


def _activations(config: RunConfig, spec: ModelSpec, rank: int) -> int:
    actor = config.actor
    layer = layer_activations(actor, spec)
    alive = stored_layers(actor, spec.num_layers, rank, micro_batches(config))
    if actor.recompute == "full":
        return round(alive * layer.input + layer.saved + layer.working)
    return round(alive * layer.saved + layer.working)


def micro_batches(config: RunConfig) -> int:
    """Micro-batches of an update on one data-parallel rank when all responses run to the cap."""
    actor = config.actor
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    sequences = -(-config.trainer.mini_batch_size * config.rollout.group_size // actor.data_parallel)
    count = -(-sequences // max(1, actor.micro_batch_tokens // longest))
    if actor.virtual_pipeline > 1:
        count = -(-count // actor.pipeline_parallel) * actor.pipeline_parallel
    return count


def _routes(actor: ActorConfig, spec: ModelSpec) -> int:
    """Routes of one micro-batch: a byte (two above 256 experts) for each token, routed layer and chosen expert."""
    if actor.routing_replay == "off":
        return 0
    width = 1 if spec.num_experts <= 256 else 2
    return actor.micro_batch_tokens * sum(spec.moe_layers) * spec.num_experts_per_tok * width


def kv_bytes_per_token(spec: ModelSpec, precision: str) -> int:
    """Keys and values of one token in all layers, over all GPUs of an engine; the cache is bf16 under FP8 weights."""
    return 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim * max(2, BYTES[precision])


def _engine(config: RunConfig, counts: Counts, gpu: Gpu, ranks: int) -> tuple[int, int, int, int]:
    """(weights, KV cache, working memory) of one GPU, and the tokens that the engine's cache holds."""
    rollout, spec = config.rollout, counts.spec
    weights = counts.whole().total * BYTES[rollout.precision] // ranks
    shared = min(ranks, spec.num_key_value_heads)  # more ranks than key-value heads hold copies of them
    per_token = kv_bytes_per_token(spec, rollout.precision) // shared
    working = round(ENGINE_WORKING_GIB * GIB)
    if rollout.engine == "transformers":
        longest = config.data.max_prompt_length + rollout.max_response_length
        cache = rollout.max_num_seqs * longest * per_token
    elif rollout.kv_cache_gb is not None:
        cache = round(rollout.kv_cache_gb * GIB)
    else:
        cache = max(
            0,
            round(rollout.memory_utilization * gpu.memory_gib * GIB) - weights - working,
        )
    return weights, cache, working, cache // per_token


def host_bytes_per_node(terms: Terms) -> int:
    """Pinned host memory of one node's ranks."""
    return GPUS_PER_NODE * terms.host_reference
