"""The plan as text: what fits, what takes most, what to change, how long, and every assumption behind it."""

from __future__ import annotations

from collections.abc import Iterator

from launch.plan import timing
from launch.plan.activations import EXPERT_IMBALANCE
from launch.plan.counts import Counts
from launch.plan.hardware import GIB, GPUS_PER_NODE
from launch.plan.memory import ENGINE_WORKING_GIB, OVERHEAD_GIB, host_bytes_per_node
from launch.plan.planner import Plan, longest_sequence
from launch.plan.reference import (
    MODEL,
    PUBLISHED,
    READ,
    comparable,
    is_reference_model,
    same_setting,
)
from launch.plan.search import MOST_NODES

_MEANING = {
    "weights": "the learner's shard",
    "gradients": "float32",
    "optimizer": "Adam's moments, with bf16 weights a float32 copy too",
    "activations": "of the micro-batches that wait for their backward",
    "head": "tiles of logits, the head's gradient, hidden states",
    "routes": "routing replay",
    "engine_weights": "of the rollout engine",
    "kv_cache": "of the rollout engine",
    "engine_working": "CUDA graphs and activations of the engine",
    "refresh": "largest tensor and its shards; not beside activations",
    "overhead": "CUDA context, NCCL, fragmentation",
}


def render(plan: Plan) -> str:
    """The whole report, without a final newline."""
    parts = (
        _head(plan),
        _memory(plan),
        _verdict(plan),
        _times(plan),
        _published(plan),
        _assumptions(plan),
    )
    return "\n\n".join("\n".join(part) for part in parts if part)


def verdict(plan: Plan) -> str:
    """One sentence: fits, or what takes most and what to change."""
    peak, room = plan.terms.total / GIB, plan.gpu.memory_gib
    if plan.fits:
        return f"fits: {peak:.1f} of {room:.1f} GiB on each {plan.gpu.name}"
    if plan.terms.total <= room * GIB:
        fault = (
            f"does not fit: the KV cache of an engine holds {plan.terms.kv_tokens} tokens, less than one sequence of "
            f"{longest_sequence(plan.config)}"
        )
    else:
        name, size = plan.terms.largest
        need = f"{peak:.1f} of {room:.1f} GiB on each {plan.gpu.name}"
        fault = f"does not fit: {need}, most of it {name} ({size / GIB:.1f})"
    return f"{fault}; {_remedy(plan)}"


def _remedy(plan: Plan) -> str:
    if plan.nearest is not None:
        changes = " ".join(f"actor.{name}={_value(value)}" for name, value in plan.nearest.items())
        return f"the nearest layout that fits on these GPUs: {changes}"
    if plan.more_nodes is not None:
        return f"no layout fits on {plan.nodes * GPUS_PER_NODE} GPUs, one does with --nodes {plan.more_nodes}"
    if plan.terms.engine > plan.gpu.memory_gib * GIB / 2:
        return "no layout fits beside so large an engine: lower rollout.memory_utilization or rollout.kv_cache_gb"
    return f"no layout fits, even on {MOST_NODES} nodes: lower actor.micro_batch_tokens or rollout.memory_utilization"


def _value(value: int | bool | str | None) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _head(plan: Plan) -> Iterator[str]:
    actor = plan.config.actor
    yield f"plan of {plan.config.name}: {plan.nodes} x {GPUS_PER_NODE} {plan.gpu.name}"
    yield (
        f"model      {plan.spec.family}, {Counts(plan.spec).whole().total / 1e9:.2f} B parameters, "
        f"{Counts(plan.spec).active() / 1e9:.2f} B of the layers active per token"
    )
    yield (
        f"layout     TP {actor.tensor_parallel}, PP {actor.pipeline_parallel} x {actor.virtual_pipeline}, "
        f"CP {actor.context_parallel}, DP {actor.data_parallel}, EP {actor.expert_parallel}, "
        f"ETP {actor.expert_tensor}, {actor.dtype}, recompute {actor.recompute}, "
        f"distributed optimizer {_value(actor.distributed_optimizer)}"
    )
    yield f"rollouts   {plan.config.rollout.engine}, {plan.config.rollout.precision}, {_engines(plan)}"
    yield from (f"warning: {sentence}" for sentence in plan.warnings)


def _engines(plan: Plan) -> str:
    ranks = plan.rollout_tensor_parallel
    if ranks == 1:
        return "one engine on each GPU, the whole model in it"
    return f"engines over {ranks} GPUs (planned only: `train` runs one engine on each GPU today)"


def _memory(plan: Plan) -> Iterator[str]:
    stages = plan.config.actor.pipeline_parallel
    where = f", pipeline stage {plan.terms.stage} of {stages}, the fullest" if stages > 1 else ""
    yield f"memory of a GPU in GiB{where}"
    for name, size in plan.terms.named().items():
        yield f"  {name:<15}{size / GIB:8.2f}   {_MEANING[name]}"
    yield f"  {'peak':<15}{plan.terms.total / GIB:8.2f}   of {plan.gpu.memory_gib:.1f}"
    yield f"  training state {plan.terms.training_state / 1e9:.1f} GB = {plan.terms.training_state / GIB:.1f} GiB"
    full = plan.terms.kv_tokens / longest_sequence(plan.config)
    yield f"  the KV cache of an engine holds {plan.terms.kv_tokens:,} tokens: {full:.1f} of the longest sequences"
    if plan.terms.host_reference:
        yield f"host memory of a node: {host_bytes_per_node(plan.terms) / GIB:.1f} GiB pinned for the reference policy"


def _verdict(plan: Plan) -> Iterator[str]:
    yield verdict(plan)


def _times(plan: Plan) -> Iterator[str]:
    times, work = plan.times, plan.work
    tokens = work.sequences * (work.prompt + work.response)
    yield "roofline in seconds"
    yield f"  update      {times.update:9.1f}   {tokens:,.0f} tokens; pipeline bubble {times.bubble:.1%} of it"
    yield f"  rescoring   {times.rescoring:9.1f}   old log-probs and reference, per update"
    responses = work.sequences * work.updates
    yield f"  rollout     {times.rollout:9.1f}   {responses:,} responses, for {work.updates} updates"
    yield f"  refresh     {times.refresh:9.1f}   one push, every {work.refresh_interval} updates"
    yield f"  step        {times.step:9.1f}   per update, with its share of rollout and refresh"


def _published(plan: Plan) -> Iterator[str]:
    if not is_reference_model(plan.spec):
        return
    counts = Counts(plan.spec)
    yield f"published figures of {MODEL} (read {READ}) and this roofline in the same setting, in seconds"
    for row in PUBLISHED:
        estimated = comparable(same_setting(row, counts), row.work)
        figures = ", ".join(
            f"{name} {seconds:g} (roofline {estimated[name]:.1f})" for name, seconds in row.seconds.items()
        )
        yield f"  {row.source}: {figures}"
        yield f"    {row.setting}"
        yield f"    assumed: {row.assumed}; {row.url}"


def _assumptions(plan: Plan) -> Iterator[str]:
    gpu, work = plan.gpu, plan.work
    mfu = gpu.mfu_moe if plan.spec.num_experts else gpu.mfu_dense
    yield "assumed"
    yield f"  mean prompt {work.prompt:g} and response {work.response:g} tokens; some response runs to {work.longest}"
    yield f"  training at {mfu:.0%} of {gpu.bf16:g} TFLOP/s; a decode step at {timing.DECODE_MFU:.0%} of the peak or"
    yield (
        f"  {timing.HBM_SHARE:.0%} of {gpu.hbm:g} TB/s, and {timing.STEP_SECONDS * 1e3:g} ms; links at "
        f"{timing.LINK_SHARE:.0%} of {gpu.nvlink:g} (node) and {gpu.network:g} (network) GB/s a GPU"
    )
    yield f"  {timing.TENSOR_SECONDS * 1e3:g} ms per tensor of a refresh; the busiest expert rank {EXPERT_IMBALANCE}"
    yield f"  times the mean; {OVERHEAD_GIB:g} GiB overhead and {ENGINE_WORKING_GIB:g} GiB for the engine's work;"
    yield "  flash attention, fused Adam without temporary copies"
