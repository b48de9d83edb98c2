"""Hugging Face checkpoints in and out of Megatron: names, shapes, slices, and whole directories."""

from megatron_rlvr.hf.checkpoint import HFCheckpoint
from megatron_rlvr.hf.export import ExportPlan, PartWriter
from megatron_rlvr.hf.mapping import WeightMap
from megatron_rlvr.hf.skeleton import Skeleton
from megatron_rlvr.hf.spec import read_model_spec
from megatron_rlvr.hf.stages import Stage, pipeline_stages
from megatron_rlvr.hf.writer import write_checkpoint

__all__ = [
    "ExportPlan",
    "HFCheckpoint",
    "PartWriter",
    "Skeleton",
    "Stage",
    "WeightMap",
    "pipeline_stages",
    "read_model_spec",
    "write_checkpoint",
]
