"""The nearest layout that fits: the one that changes the fewest settings, and each of them least."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2

from launch.plan.counts import Count, Counts
from launch.plan.hardware import GIB, GPUS_PER_NODE, Gpu
from launch.plan.memory import memory_terms, training_state
from launch.plan.placement import check_placement
from megatron_rlvr.config.tree import ActorConfig, RunConfig
from megatron_rlvr.types import UserError

SEARCHED = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "distributed_optimizer",
    "recompute",
)
POWERS = (1, 2, 4, 8)
MOST_NODES = 16

Settings = dict[str, int | bool | str]


def nearest_layout(
    config: RunConfig,
    counts: Counts,
    gpu: Gpu,
    nodes: int,
    rollout_tensor_parallel: int = 1,
) -> Settings | None:
    """actor settings to change so that the run fits on the same GPUs, data_parallel as it then follows; None: nothing.

    Searched are tensor, pipeline, context and expert parallel sizes, distributed_optimizer and recompute.
    """
    room = gpu.memory_gib * GIB - _fixed(config, counts, gpu, rollout_tensor_parallel)
    if room <= 0:  # no layout of the learner changes what the engine takes
        return None
    for changes in sorted(_candidates(config.actor, counts), key=lambda c: _distance(config.actor, c)):
        moved = apply(config, changes, nodes)
        if moved is None or smallest_state(counts, moved.actor) > room:
            continue
        if _fits(moved, counts, gpu, nodes, rollout_tensor_parallel):
            return _with_data_parallel(changes, config.actor, moved.actor)
    return None


def _fixed(config: RunConfig, counts: Counts, gpu: Gpu, rollout_tensor_parallel: int) -> int:
    """Bytes of a GPU that no layout of the learner changes: the engine and the overhead."""
    terms = memory_terms(
        config.model_copy(update={"actor": ActorConfig()}),
        counts,
        gpu,
        rollout_tensor_parallel,
    )
    return terms.engine + terms.overhead


def smallest_state(counts: Counts, actor: ActorConfig) -> float:
    """A lower bound of the training state of any stage, from the whole model's counts: it costs no shapes."""
    whole, per_rank = counts.whole(), actor.tensor_parallel * actor.pipeline_parallel
    experts = actor.expert_parallel * actor.expert_tensor * actor.pipeline_parallel
    state = training_state(Count(whole.dense // per_rank, whole.expert // experts), actor)
    return state.weights + state.gradients + state.optimizer


def fewest_nodes(
    config: RunConfig,
    counts: Counts,
    gpu: Gpu,
    nodes: int,
    rollout_tensor_parallel: int = 1,
) -> int | None:
    """The smallest doubling of `nodes` on which some layout fits; None up to 16 nodes."""
    while (nodes := 2 * nodes) <= MOST_NODES:
        if nearest_layout(config, counts, gpu, nodes, rollout_tensor_parallel) is not None:
            return nodes
    return None


def _candidates(actor: ActorConfig, counts: Counts) -> Iterator[Settings]:
    """Every combination of the searched settings, as changes to `actor`."""
    experts = counts.spec.num_experts
    expert_sizes = [size for size in (*POWERS, 16, 32, 64, 128) if experts % size == 0] if experts else [1]
    stages = [size for size in (*POWERS, 3, 6, 12, 16) if counts.spec.num_layers % size == 0]
    choices: tuple[tuple[int | bool | str, ...] | list[int], ...] = (
        POWERS,
        stages,
        POWERS,
        expert_sizes,
        (False, True),
        ("none", "full"),
    )
    for values in product(*choices):
        named = dict(zip(SEARCHED, values, strict=True))
        yield {name: value for name, value in named.items() if getattr(actor, name) != value}


def _distance(actor: ActorConfig, changes: Settings) -> tuple[int, float]:
    """(settings that change, doublings and halvings of sizes in all)."""
    sizes = [(getattr(actor, name), value) for name, value in changes.items() if type(value) is int]
    return len(changes), sum(abs(log2(new / old)) for old, new in sizes)


def apply(config: RunConfig, changes: Settings, nodes: int) -> RunConfig | None:
    """The run with `changes` and the data_parallel that fills the nodes; None where the sizes do not divide."""
    actor = config.actor.model_copy(update=changes)
    if actor.pipeline_parallel == 1:
        actor = actor.model_copy(update={"virtual_pipeline": 1})
    if actor.expert_parallel > 1 or "tensor_parallel" in changes:
        actor = actor.model_copy(update={"expert_tensor_parallel": None})
    replica = actor.tensor_parallel * actor.pipeline_parallel * actor.context_parallel
    gpus = nodes * GPUS_PER_NODE
    if gpus % replica or (gpus // actor.pipeline_parallel) % (actor.expert_parallel * actor.expert_tensor):
        return None
    return config.model_copy(update={"actor": actor.model_copy(update={"data_parallel": gpus // replica})})


def _fits(
    config: RunConfig,
    counts: Counts,
    gpu: Gpu,
    nodes: int,
    rollout_tensor_parallel: int,
) -> bool:
    try:
        if memory_terms(config, counts, gpu, rollout_tensor_parallel).total > gpu.memory_gib * GIB:
            return False
        check_placement(config, counts.spec, nodes, rollout_tensor_parallel)
    except UserError:  # sizes that do not divide
        return False
    return True


def _with_data_parallel(changes: Settings, before: ActorConfig, after: ActorConfig) -> Settings:
    followers = ("data_parallel", "virtual_pipeline", "expert_tensor_parallel")
    return changes | {name: getattr(after, name) for name in followers if getattr(after, name) != getattr(before, name)}
