"""Weights from the actor's shards to the rollout engines and to disk, in Hugging Face names, with a certificate."""

from megatron_rlvr.refresh.export import export_checkpoint
from megatron_rlvr.refresh.refresher import Refresher
from megatron_rlvr.refresh.weights import exported_weights, load_weights

__all__ = ["Refresher", "export_checkpoint", "exported_weights", "load_weights"]
