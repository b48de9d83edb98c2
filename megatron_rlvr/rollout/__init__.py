"""Rollout engines and generation; see engine.py for the protocol."""

from megatron_rlvr.rollout.engine import (
    Completion,
    Engine,
    RefreshError,
    RefreshReport,
    SamplingSettings,
)
from megatron_rlvr.rollout.factory import build_engine, sampling_settings
from megatron_rlvr.rollout.generation import roll_out, to_trajectory

__all__ = [
    "Completion",
    "Engine",
    "RefreshError",
    "RefreshReport",
    "SamplingSettings",
    "build_engine",
    "roll_out",
    "sampling_settings",
    "to_trajectory",
]
