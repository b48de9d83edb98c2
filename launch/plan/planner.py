"""One plan: placement checked, bytes counted, seconds estimated, and what to change where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.plan.counts import Counts
from launch.plan.hardware import GIB, GPUS_PER_NODE, Gpu, find_gpu
from launch.plan.memory import Terms, memory_terms
from launch.plan.placement import check_placement, placement_warnings
from launch.plan.search import Settings, fewest_nodes, nearest_layout
from launch.plan.timing import EngineSize, Times, Work, estimate
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.losses import uses_reference
from megatron_rlvr.types import ModelSpec, UserError

PROMPT_SHARE = 0.25  # mean prompt over data.max_prompt_length
RESPONSE_SHARE = 0.5  # mean response over rollout.max_response_length


@dataclass(frozen=True)
class Plan:
    """What `plan` prints, and what a launcher asks before it submits.

    nearest      actor settings that make it fit; None where nothing does or it fits
    more_nodes   where nothing fits: nodes on which a layout does, None if not up to 16
    """

    config: RunConfig
    spec: ModelSpec
    gpu: Gpu
    nodes: int
    rollout_tensor_parallel: int
    terms: Terms
    work: Work
    times: Times
    warnings: list[str] = field(default_factory=list)
    nearest: Settings | None = None
    more_nodes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the peak stays below the memory of the GPU, and the engine has room for one full sequence."""
        return self.terms.total <= self.gpu.memory_gib * GIB and self.terms.kv_tokens >= longest_sequence(self.config)


def make_plan(
    config: RunConfig,
    gpu: str,
    nodes: int,
    *,
    rollout_tensor_parallel: int = 1,
    response_length: float | None = None,
    prompt_length: float | None = None,
) -> Plan:
    """Plan `config` on `nodes` nodes of eight `gpu`s; reads nothing but the model's config.json.

    response_length, prompt_length   mean tokens; default: a half and a quarter of the longest allowed

    Raises UserError for a layout that cannot be placed, whatever the memory.
    """
    if nodes < 1:
        raise UserError(f"--nodes is {nodes}; give at least 1")
    hardware, spec = find_gpu(gpu), read_model_spec(config.model.path)
    check_placement(config, spec, nodes, rollout_tensor_parallel)
    counts = Counts(spec)
    terms = memory_terms(config, counts, hardware, rollout_tensor_parallel)
    work = run_work(config, response_length, prompt_length)
    engine = EngineSize(
        rollout_tensor_parallel,
        config.rollout.max_num_seqs,
        max(terms.kv_tokens, 1),
        config.rollout.precision,
    )
    times = estimate(counts, work, config.actor, engine, hardware)
    warnings = placement_warnings(config, nodes)
    plan = Plan(
        config,
        spec,
        hardware,
        nodes,
        rollout_tensor_parallel,
        terms,
        work,
        times,
        warnings,
    )
    return plan if plan.fits else _with_remedy(plan, counts)


def _with_remedy(plan: Plan, counts: Counts) -> Plan:
    where = (plan.config, counts, plan.gpu, plan.nodes, plan.rollout_tensor_parallel)
    nearest = nearest_layout(*where)
    more = fewest_nodes(*where) if nearest is None else None
    named = {name: value for name, value in vars(plan).items() if name not in ("nearest", "more_nodes")}
    return Plan(**named, nearest=nearest, more_nodes=more)


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def run_work(config: RunConfig, response_length: float | None, prompt_length: float | None) -> Work:
    """The run's rollout batch in the mean. Raises UserError for a mean that is not positive or above the cap."""
    rollout, trainer = config.rollout, config.trainer
    response = RESPONSE_SHARE * rollout.max_response_length if response_length is None else response_length
    prompt = PROMPT_SHARE * config.data.max_prompt_length if prompt_length is None else prompt_length
    if not 0 < response <= rollout.max_response_length:
        raise UserError(
            f"--response-length is {response:g}, outside 1 to rollout.max_response_length "
            f"{rollout.max_response_length}; give the mean length in tokens"
        )
    return Work(
        sequences=trainer.mini_batch_size * rollout.group_size,
        updates=trainer.rollout_reuse,
        group_size=rollout.group_size,
        prompt=prompt,
        response=response,
        longest=rollout.max_response_length,
        old_logprobs=config.loss.old_logprobs == "recompute",
        reference=uses_reference(config.loss.name, config.reference.enabled),
        refresh_interval=config.refresh_interval,
    )


def gpus(plan: Plan) -> int:
    return plan.nodes * GPUS_PER_NODE
