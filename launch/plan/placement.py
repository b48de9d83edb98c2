"""Preflight: does the run's layout go with this model and these nodes? One sentence where it does not."""

from __future__ import annotations

from launch.plan.hardware import GPUS_PER_NODE
from megatron_rlvr.config.checks import (
    check_known_faults,
    check_layout,
    check_model,
    check_schedule,
    installed_version,
)
from megatron_rlvr.config.tree import ActorConfig, RunConfig
from megatron_rlvr.types import ModelSpec, UserError


def check_placement(config: RunConfig, spec: ModelSpec, nodes: int, rollout_tensor_parallel: int = 1) -> None:
    """Refuse what Megatron, vLLM or the nodes cannot run. Raises UserError with the key, its value and the remedy."""
    check_layout(config.actor)
    check_model(config, spec)
    check_schedule(config)
    check_known_faults(config.actor, spec, installed_version("megatron-core"))
    _check_ranks(config.actor, nodes)
    _check_node(config.actor)
    _check_engine(spec, rollout_tensor_parallel)


def _check_ranks(actor: ActorConfig, nodes: int) -> None:
    gpus, replica = (
        nodes * GPUS_PER_NODE,
        actor.tensor_parallel * actor.pipeline_parallel * actor.context_parallel,
    )
    if actor.world_size == gpus:
        return
    if gpus % replica:
        remedy = f"make actor.tensor_parallel times pipeline_parallel times context_parallel divide {gpus}"
    else:
        remedy = f"set actor.data_parallel={gpus // replica}"
    raise UserError(
        f"the layout needs {actor.world_size} ranks, but --nodes {nodes} is {gpus} GPUs ({GPUS_PER_NODE} a node); "
        f"{remedy}"
    )


def _check_node(actor: ActorConfig) -> None:
    if GPUS_PER_NODE % actor.tensor_parallel:
        raise UserError(
            f"actor.tensor_parallel is {actor.tensor_parallel}, whose groups would leave a node of {GPUS_PER_NODE} "
            f"GPUs; set it to a divisor of {GPUS_PER_NODE}"
        )


def _check_engine(spec: ModelSpec, ranks: int) -> None:
    if ranks < 1 or GPUS_PER_NODE % ranks:
        raise UserError(
            f"--rollout-tensor-parallel is {ranks}, but an engine stays within a node of {GPUS_PER_NODE} GPUs; use 1, "
            "2, 4 or 8"
        )
    groups = spec.num_key_value_heads
    if spec.num_attention_heads % ranks or (groups % ranks and ranks % groups):
        raise UserError(
            f"--rollout-tensor-parallel is {ranks}, which splits neither the model's {spec.num_attention_heads} "
            f"attention heads nor its {groups} key-value heads evenly; use a smaller one"
        )


def placement_warnings(config: RunConfig, nodes: int) -> list[str]:
    """Sentences about groups that leave a node: they run, over the network."""
    actor, found = config.actor, []
    inner = actor.tensor_parallel * actor.context_parallel
    if inner > GPUS_PER_NODE:
        found.append(f"tensor x context parallel is {inner}: keys and values travel between nodes in every layer")
    experts = actor.expert_parallel * actor.expert_tensor
    if experts > GPUS_PER_NODE:
        found.append(f"expert x expert tensor parallel is {experts}: tokens travel between nodes in every routed layer")
    return found
