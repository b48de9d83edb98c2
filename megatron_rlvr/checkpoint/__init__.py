"""Checkpoints in megatron-core's distributed format: a run that goes on where it stopped, in any layout."""
