"""megatron_rlvr: reinforcement learning with verifiable rewards for Mixture-of-Experts models on Megatron-Core."""

__version__ = "0.1.0"
