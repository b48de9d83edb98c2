"""A roofline: the least time that arithmetic, memory and links leave an update, a rollout batch and a refresh.

Estimates to choose between layouts with, not promises: every share of a peak in here is an assumption that the report
prints. `reference` puts the same formulas beside published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.counts import Counts
from launch.plan.hardware import GPUS_PER_NODE, Gpu
from launch.plan.memory import BYTES, kv_bytes_per_token, training_state
from megatron_rlvr.config.tree import ActorConfig

HBM_SHARE = 0.7  # of the memory bandwidth that decoding and the optimizer reach
LINK_SHARE = 0.6  # of the link bandwidth that collectives reach
DECODE_MFU = 0.3  # share of the peak for the matrix products of a decode step
PREFILL_MFU = 0.4
STEP_SECONDS = 0.006  # a decode step that costs nothing else: scheduling, sampling, kernel launches
TENSOR_SECONDS = 2e-4  # per tensor of a refresh: a broadcast and a load


@dataclass(frozen=True)
class Work:
    """What one rollout batch is, in the mean: `updates` mini-batches of `sequences` responses each.

    prompt, response, longest   tokens: mean prompt, mean response, longest response
    old_logprobs, reference     a further forward pass of the learner, of the reference
    refresh_interval            updates between weight pushes
    """

    sequences: int
    updates: int
    group_size: int
    prompt: float
    response: float
    longest: int
    old_logprobs: bool = False
    reference: bool = False
    refresh_interval: int = 1


@dataclass(frozen=True)
class EngineSize:
    """One engine: its GPUs, the sequences it decodes at once, the tokens of its KV cache, its precision."""

    gpus: int
    max_num_seqs: int
    kv_tokens: int
    precision: str


@dataclass(frozen=True)
class Times:
    """Seconds. `update` is one optimizer update, `rollout` a whole rollout batch, `refresh` one push.

    step       mean per update, with its share of rollout batch, rescoring and refresh
    bubble     share of the update that pipeline ranks wait
    """

    update: float
    rescoring: float
    rollout: float
    refresh: float
    bubble: float
    step: float


def training_flops(counts: Counts, work: Work, recompute: bool) -> tuple[float, float]:
    """(floating-point operations of one update, those of one forward pass over its tokens).

    Per token: 2 per parameter that it is multiplied with forward, 4 backward, and 2 s a d a layer for causal attention
    over s tokens (half of 4 s a d), 4 backward. The head sees response tokens only, and makes its logits twice.
    """
    spec, length = counts.spec, work.prompt + work.response
    tokens, answers = work.sequences * length, work.sequences * work.response
    attention = 2 * length * spec.num_attention_heads * spec.head_dim * spec.num_layers
    body = tokens * (2 * counts.active() + attention)
    head = answers * 2 * spec.vocab_size * spec.hidden_size
    return (4 if recompute else 3) * body + 4 * head, body + head


def update_seconds(counts: Counts, work: Work, actor: ActorConfig, gpu: Gpu) -> tuple[float, float, float]:
    """(one update, one forward pass over it, the bubble's share of the update)."""
    mfu = gpu.mfu_moe if counts.spec.num_experts else gpu.mfu_dense
    speed = actor.world_size * gpu.bf16 * 1e12 * mfu
    both, forward = training_flops(counts, work, actor.recompute == "full")
    tokens = work.sequences * (work.prompt + work.response) / actor.data_parallel
    micro_batches = max(1.0, tokens / actor.micro_batch_tokens)
    stretch = 1 + (actor.pipeline_parallel - 1) / (micro_batches * actor.virtual_pipeline)
    update = both / speed * stretch + _step_seconds(counts, actor, gpu)
    return update, forward / speed * stretch, 1 - 1 / stretch


def _step_seconds(counts: Counts, actor: ActorConfig, gpu: Gpu) -> float:
    """Adam reads and writes its states once; gradients and, where they are sharded, weights cross the links once."""
    state = training_state(counts.stage(actor, 0), actor)
    memory = 2 * (state.optimizer + state.gradients) / (gpu.hbm * 1e12 * HBM_SHARE)
    replicas = actor.data_parallel * actor.context_parallel
    moved = 2 * state.gradients if replicas > 1 else 0
    return memory + moved / (_link(actor.world_size, gpu) * LINK_SHARE)


def _link(ranks: int, gpu: Gpu) -> float:
    """Bytes per second that one GPU gets in a group of `ranks`."""
    return 1e9 * (gpu.nvlink if ranks <= GPUS_PER_NODE else gpu.network)


def rollout_seconds(counts: Counts, work: Work, engine: EngineSize, gpus: int, gpu: Gpu) -> float:
    """One rollout batch: decode steps until the last response ends, and the prompts' prefill.

    A step over c sequences reads the weights it needs (of E experts, those that c times k draws hit) and c caches, or
    multiplies, whichever takes longer. c is bounded by max_num_seqs and by the cache; when few responses are left, the
    longest one still takes a step for each of its tokens.
    """
    engines = max(1, gpus // engine.gpus)
    prompts = -(-work.sequences * work.updates // work.group_size // engines)
    sequences = prompts * work.group_size
    length = work.prompt + work.response
    at_once = max(1.0, min(sequences, engine.max_num_seqs, engine.kv_tokens / length))
    full = decode_step_seconds(counts, engine, gpu, at_once, work.prompt + work.response / 2)
    tail = decode_step_seconds(counts, engine, gpu, max(1.0, at_once / 8), work.prompt + work.longest * 0.75)
    steps = sequences * work.response / at_once
    prefill = 2 * counts.active() * prompts * work.prompt / (engine.gpus * gpu.bf16 * 1e12 * PREFILL_MFU)
    return steps * full + max(0.0, work.longest - work.response) * tail + prefill


def decode_step_seconds(counts: Counts, engine: EngineSize, gpu: Gpu, at_once: float, context: float) -> float:
    """One token for each of `at_once` sequences with `context` tokens behind them."""
    spec, size = counts.spec, BYTES[engine.precision]
    whole = counts.whole()
    hit = 1 - (1 - spec.num_experts_per_tok / spec.num_experts) ** at_once if spec.num_experts else 0
    head = spec.vocab_size * spec.hidden_size
    read: float = size * (counts.active_dense() + head + whole.expert * hit)
    read += at_once * context * kv_bytes_per_token(spec, engine.precision)
    memory = read / engine.gpus / (gpu.hbm * 1e12 * HBM_SHARE)
    peak = gpu.fp8 if engine.precision == "fp8" else gpu.bf16
    compute = 2 * at_once * (counts.active() + head) / (engine.gpus * peak * 1e12 * DECODE_MFU)
    return max(memory, compute) + STEP_SECONDS


def refresh_seconds(counts: Counts, actor: ActorConfig, gpu: Gpu, gpus: int) -> float:
    """One push: every GPU receives the whole model, tensor by tensor, and writes it."""
    whole = counts.whole().total * BYTES[actor.dtype]
    spec = counts.spec
    tensors = spec.num_layers * 9 + 3 * spec.num_experts * sum(spec.moe_layers)
    return whole / (_link(gpus, gpu) * LINK_SHARE) + 2 * whole / (gpu.hbm * 1e12 * HBM_SHARE) + tensors * TENSOR_SECONDS


def estimate(counts: Counts, work: Work, actor: ActorConfig, engine: EngineSize, gpu: Gpu) -> Times:
    """All of it for a run whose GPUs train and roll out in turns."""
    gpus = actor.world_size
    update, forward, bubble = update_seconds(counts, work, actor, gpu)
    rescoring = forward * (work.old_logprobs + work.reference)
    rollout = rollout_seconds(counts, work, engine, gpus, gpu)
    refresh = refresh_seconds(counts, actor, gpu, gpus)
    step = rollout / work.updates + rescoring + update + refresh / work.refresh_interval
    return Times(update, rescoring, rollout, refresh, bubble, step)
