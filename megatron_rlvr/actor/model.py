"""GPTModel chunks of this pipeline rank, built from a ModelSpec of any family."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from megatron_rlvr.actor import platform
from megatron_rlvr.actor.aux_loss import BalancedRouter
from megatron_rlvr.actor.context_attention import ContextParallelAttention
from megatron_rlvr.actor.head import LogprobHead
from megatron_rlvr.actor.modules import RMSNorm, SdpaCoreAttention, with_bias
from megatron_rlvr.actor.rope import inverse_frequencies, softmax_scale
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import ModelSpec

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(spec: ModelSpec, config: ActorConfig) -> TransformerConfig:
    """Megatron-Core's configuration of `spec` in the layout of `config`."""
    accelerated = platform.use_transformer_engine()
    dtype = DTYPES[config.dtype]
    fields: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_key_value_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.attention_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_scale=softmax_scale(spec),
        bias_activation_fusion=accelerated,
        bias_dropout_fusion=accelerated,
        masked_softmax_fusion=accelerated,
        apply_rope_fusion=accelerated,
        persist_layer_norm=accelerated,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor,
        sequence_parallel=config.tensor_parallel > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # dense models too: the default refuses sequences of variable length
        # The policy loss arrives divided by the mini-batch's own denominator: Megatron must not average it again.
        calculate_per_token_loss=True,
        # Weights come from a checkpoint. The initialisers still run, as they mark parameters as tensor parallel (the
        # gradient norm would count one shard of an unmarked one), but they leave the memory as it is.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        **_pipeline_fields(config),
        **(_moe_fields(spec, config, accelerated) if spec.num_experts else {}),
        **(_recompute_fields() if config.recompute == "full" else {}),
    )
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    if missing := set(fields) - known:
        raise RuntimeError(f"this megatron-core has no TransformerConfig fields {sorted(missing)}")
    return TransformerConfig(**fields)


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _pipeline_fields(config: ActorConfig) -> dict[str, Any]:
    # Batched p2p over gloo mixes up virtual stages (grad norm 464 instead of 2.3); plain overlapped p2p is right.
    interleaved = config.virtual_pipeline > 1
    return dict(batch_p2p_comm=not interleaved, overlap_p2p_comm=interleaved)


def _recompute_fields() -> dict[str, Any]:
    return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def _moe_fields(spec: ModelSpec, config: ActorConfig, accelerated: bool) -> dict[str, Any]:
    balanced = config.moe_aux_loss_coeff > 0
    return dict(
        num_moe_experts=spec.num_experts,
        moe_router_topk=spec.num_experts_per_tok,
        moe_ffn_hidden_size=spec.moe_intermediate_size,
        moe_layer_freq=[int(moe) for moe in spec.moe_layers],
        moe_router_score_function="softmax",
        # norm_topk_prob: softmax over the chosen logits equals the softmax over all, renormalised over the chosen.
        moe_router_pre_softmax=not spec.norm_topk_prob,
        moe_router_load_balancing_type="aux_loss" if balanced else "none",
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_router_dtype="fp32",
        moe_grouped_gemm=accelerated,
    )


def layer_spec(config: TransformerConfig, spec: ModelSpec, vp_stage: int | None) -> Any:
    """Transformer Engine's block on accelerators that have it; else the local one with our norm and attention."""
    accelerated = platform.use_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=accelerated, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        _add_biases(layer, spec)
        if (parts := _mlp_parts(layer)) and hasattr(parts, "router"):
            parts.router = BalancedRouter
    if accelerated:
        return block
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention.core_attention = ContextParallelAttention if config.context_parallel_size > 1 else SdpaCoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def _add_biases(layer: Any, spec: ModelSpec) -> None:
    """Biases of single layers: megatron-core's add_bias_linear knows only all of them, and none beside experts."""
    attention, parts = layer.submodules.self_attention.submodules, _mlp_parts(layer)
    if spec.output_bias:
        attention.linear_proj = with_bias(attention.linear_proj)
    if spec.mlp_bias:
        parts.linear_fc1, parts.linear_fc2 = with_bias(parts.linear_fc1), with_bias(parts.linear_fc2)


def _mlp_parts(layer: Any) -> Any:
    """The submodules of a layer's MLP or experts: 0.16 wraps them in a ModuleSpec, 0.19 in a partial."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def padded_vocab_size(spec: ModelSpec, tensor_parallel: int) -> int:
    """The vocabulary rounded up so that every tensor rank holds as many rows."""
    return -(-spec.vocab_size // tensor_parallel) * tensor_parallel


def build_chunks(spec: ModelSpec, config: ActorConfig) -> tuple[TransformerConfig, list[GPTModel]]:
    """This rank's model chunks (more than one only with virtual pipeline stages), with uninitialised weights."""
    megatron_config = transformer_config(spec, config)
    stages: list[int | None] = list(range(config.virtual_pipeline)) if config.virtual_pipeline > 1 else [None]
    return megatron_config, [_build_chunk(spec, config, megatron_config, stage) for stage in stages]


def _build_chunk(
    spec: ModelSpec, config: ActorConfig, megatron_config: TransformerConfig, stage: int | None
) -> GPTModel:
    chunk = GPTModel(
        config=megatron_config,
        transformer_layer_spec=layer_spec(megatron_config, spec, stage),
        vocab_size=padded_vocab_size(spec, config.tensor_parallel),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        vp_stage=stage,
    )
    chunk.rotary_pos_emb.inv_freq = inverse_frequencies(spec).to(platform.device())
    if chunk.post_process:
        LogprobHead.take_over(chunk.output_layer, vocab_size=spec.vocab_size)
    return chunk.to(platform.device())
