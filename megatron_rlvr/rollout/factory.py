"""From the config's rollout section to an engine."""

from __future__ import annotations

import torch

from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.rollout.engine import Engine, SamplingSettings
from megatron_rlvr.types import ModelSpec


def build_engine(config: RunConfig, spec: ModelSpec, device: torch.device) -> Engine:
    """The engine that config.rollout.engine names, holding the weights of config.model.path as version 0.

    Engines are imported here, so that a run with one of them does not need the other. Raises what their constructors
    raise.
    """
    rollout = config.rollout
    max_model_len = config.data.max_prompt_length + rollout.max_response_length
    if rollout.engine == "transformers":
        from megatron_rlvr.rollout.transformers_engine import TransformersEngine, TransformersSettings

        return TransformersEngine(
            config.model.path,
            TransformersSettings(
                max_model_len,
                spec.eos_token_ids,
                rollout.precision,
                rollout.max_num_seqs,
                distribution=config.logprob_distribution,
            ),
            device,
        )
    from megatron_rlvr.rollout.vllm_engine import VllmEngine, VllmSettings

    return VllmEngine(
        config.model.path,
        VllmSettings(
            max_model_len,
            spec.eos_token_ids,
            precision=rollout.precision,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_gb=rollout.kv_cache_gb,
            memory_utilization=rollout.memory_utilization,
            enforce_eager=rollout.enforce_eager,
            seed=config.seed,
            count_cache_hits=config.replay.ratio > 0,
            distribution=config.logprob_distribution,
        ),
        device,
    )


def sampling_settings(config: RunConfig, seed: int) -> SamplingSettings:
    """The rollout section's sampling, with a seed that the caller varies per call and per rank."""
    rollout = config.rollout
    return SamplingSettings(
        rollout.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, greedy=False, seed=seed
    )
