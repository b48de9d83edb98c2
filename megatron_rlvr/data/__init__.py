"""Data: problems and prompts, the cursor that walks them, demonstrations, and the packing of trajectories."""

from megatron_rlvr.data.balancing import plan_micro_batches
from megatron_rlvr.data.cursor import PromptCursor
from megatron_rlvr.data.demonstrations import load_demonstrations
from megatron_rlvr.data.packing import build_mini_batch, split_mini_batches
from megatron_rlvr.data.prompts import Problem, load_problems, load_tokenizer, tokenize_problems
from megatron_rlvr.data.report import DataReport, data_warnings, find_overlap, inspect_source
from megatron_rlvr.data.schemas import SCHEMAS, Schema

__all__ = [
    "SCHEMAS",
    "DataReport",
    "Problem",
    "PromptCursor",
    "Schema",
    "build_mini_batch",
    "data_warnings",
    "find_overlap",
    "inspect_source",
    "load_demonstrations",
    "load_problems",
    "load_tokenizer",
    "plan_micro_batches",
    "split_mini_batches",
    "tokenize_problems",
]
