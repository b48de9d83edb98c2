"""Bytes that a micro-batch leaves on a GPU for the backward pass.

After Korthikanti et al. 2022 (arXiv:2205.05198, equation 2: a layer of s b tokens, h wide, stores 34 s b h bytes of
16-bit values with dropout and GELU, plus the attention scores), counted again for what these models are made of. Values
per token, with h the hidden size, a query heads and g key-value heads of d, f the MLP's width, E experts:

    attention   input, normed input                          2 h
                q, k before their norms (where there are)    (a + g) d
                q, k, v as attention reads them, its output  (2 a + 2 g) d
    MLP         input, normed input                          2 h
                dense SwiGLU: both halves, their product     3 f
                k experts a token: permuted input, both halves and their product, result    k (2 h + 3 f)
                router: logits and probabilities in float32  2 E * 4 bytes

FlashAttention keeps no a*s*s scores, and these models have no dropout. Tensor parallelism with sequence parallelism
divides everything by its size (experts that are split over e tensor ranks instead of t of them: tokens of all e ranks
meet, widths are divided by e); context parallelism divides the tokens.

How many micro-batches wait for their backward: 1F1B (Narayanan et al. 2021, arXiv:2104.04473): p - r on pipeline rank
r; interleaved with v chunks of L / (p v) layers: 2 (p - r - 1) + (v - 1) p + 1 chunks, on rank 0 the factor
1 + (p - 1) / (p v) of Korthikanti et al. Full recomputation keeps the input of every layer, and one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import ModelSpec

EXPERT_IMBALANCE = 1.2  # tokens of the busiest expert rank over the mean
CHUNK_TOKENS, CHUNK_VOCAB = 1024, 4096  # tiles of the fused head
VALUE_BYTES = {"float32": 4, "bf16": 2}


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer (the widest kind) and one micro-batch on one rank.

    input    the hidden states that enter it
    saved    all that the backward reads
    working  the largest gradients that exist beside it for a moment
    """

    input: float
    saved: float
    working: float


def layer_activations(actor: ActorConfig, spec: ModelSpec) -> LayerActivations:
    """Of a routed layer where the model has one, else of a dense one."""
    tokens = actor.micro_batch_tokens / actor.context_parallel / actor.tensor_parallel
    size, hidden = VALUE_BYTES[actor.dtype], spec.hidden_size
    heads, groups = (
        spec.num_attention_heads * spec.head_dim,
        spec.num_key_value_heads * spec.head_dim,
    )
    attention = 2 * hidden + (heads + groups) * spec.qk_norm + 2 * heads + 2 * groups
    if any(spec.moe_layers):
        mlp, extra = _expert_values(actor, spec), 8 * spec.num_experts
    else:
        mlp, extra = float(3 * spec.intermediate_size), 0
    saved = tokens * (size * (attention + 2 * hidden + mlp) + extra)
    return LayerActivations(tokens * size * hidden, saved, tokens * size * (mlp + 2 * hidden))


def _expert_values(actor: ActorConfig, spec: ModelSpec) -> float:
    """Values per token of the rank's own; the expert tensor group shares its tokens and splits the widths."""
    split = actor.expert_tensor
    per_choice = split * (2 * spec.hidden_size + 3 * spec.moe_intermediate_size / split)
    return EXPERT_IMBALANCE * spec.num_experts_per_tok * per_choice


def stored_layers(actor: ActorConfig, num_layers: int, rank: int, micro_batches: int) -> float:
    """Layers times micro-batches whose activations wait at once on this pipeline rank."""
    stages, chunks = actor.pipeline_parallel, actor.virtual_pipeline
    if chunks == 1:
        return num_layers / stages * min(stages - rank, micro_batches)
    waiting = 2 * (stages - rank - 1) + (chunks - 1) * stages + 1
    return num_layers / (stages * chunks) * min(waiting, chunks * micro_batches)


def head_bytes(actor: ActorConfig, spec: ModelSpec) -> int:
    """The fused head (actor/fused_logprob.py) at its peak, its backward, when every token is an action token.

    Hidden states gathered over the tensor ranks and selected, their gradient in float32 and in the model's precision,
    the gradient of the rank's rows of the head, two tiles of logits and one of the head's gradient in float32.
    """
    tokens, size = (
        actor.micro_batch_tokens // actor.context_parallel,
        VALUE_BYTES[actor.dtype],
    )
    rows = -(-spec.vocab_size // actor.tensor_parallel)
    hidden = tokens * spec.hidden_size * (3 * size + 4)
    tiles = 4 * (2 * min(CHUNK_TOKENS, tokens) * min(CHUNK_VOCAB, rows) + min(CHUNK_VOCAB, rows) * spec.hidden_size)
    return hidden + rows * spec.hidden_size * size + tiles
