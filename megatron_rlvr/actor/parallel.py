"""Process groups of one run, and where this rank stands in them."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rlvr.actor import platform
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import Place, UserError


def initialize(config: ActorConfig, seed: int, timeout_minutes: int = 30) -> None:
    """Join the process group that the launcher prepared (RANK, WORLD_SIZE, MASTER_ADDR) and split it as configured.

    Raises UserError when the number of ranks is not what the layout needs.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.world_size:
        raise UserError(
            f"{world_size} ranks were started but the layout tensor {config.tensor_parallel} x pipeline "
            f"{config.pipeline_parallel} x context {config.context_parallel} x data {config.data_parallel} needs "
            f"{config.world_size}: start that many or change actor.data_parallel"
        )
    join(timeout_minutes)
    form_groups(config, seed, timeout_minutes)


def form_groups(config: ActorConfig, seed: int, timeout_minutes: int = 30) -> None:
    """Split the default process group as configured and seed megatron-core's generators; a collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=timeout_minutes,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)
    random.seed(seed + 1)  # a reward of the user's may draw from these
    np.random.seed((seed + 1) % 2**32)


def join(timeout_minutes: int = 30) -> None:
    """Join the default process group and claim this rank's device; does nothing the second time."""
    if dist.is_initialized():
        return
    if platform.on_cpu():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(platform.backend(), timeout=timeout)
        # The launcher serves this store. Children that rendezvous on their own (an engine's workers) must serve theirs.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    else:  # a single process needs no rendezvous
        dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def place() -> Place:
    """This rank's position in the groups that split tensors."""
    return Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def shutdown(keep_process_group: bool = False) -> None:
    """Leave all groups; without it, a rank that exits early makes the others print connection errors."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        if not keep_process_group:
            dist.destroy_process_group()
