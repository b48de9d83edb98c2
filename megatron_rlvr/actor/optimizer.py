"""Megatron's DistributedDataParallel, optimizer and learning-rate schedule as the run configures them."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_rlvr.config.tree import ActorConfig, OptimizerConfig
from megatron_rlvr.ranges import MegatronRanges


def wrap_chunks(config: ActorConfig, megatron_config: TransformerConfig, chunks: list[GPTModel]) -> list[Any]:
    """Chunks behind Megatron's DDP; gradients are summed, not averaged, over data-parallel ranks (per-token loss)."""
    modules = [Float16Module(megatron_config, chunk) for chunk in chunks] if config.dtype == "bf16" else chunks
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed_optimizer
    )
    return [
        DistributedDataParallel(megatron_config, ddp, module, disable_bucketing=number > 0)
        for number, module in enumerate(modules)
    ]


def build_optimizer(
    config: OptimizerConfig, actor: ActorConfig, megatron_config: TransformerConfig, wrapped: list[Any]
) -> MegatronOptimizer:
    """Adam or AdamW with global-norm clipping; as in Megatron, one-dimensional parameters carry no weight decay."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            decoupled_weight_decay=config.decoupled_weight_decay,
            clip_grad=config.clip_grad,
            bf16=actor.dtype == "bf16",
            params_dtype=megatron_config.params_dtype,
            use_distributed_optimizer=actor.distributed_optimizer,
            timers=MegatronRanges(),
        ),
        wrapped,
    )
    megatron_config.grad_scale_func = optimizer.scale_loss
    megatron_config.finalize_model_grads_func = finalize_model_grads
    return optimizer


def build_scheduler(config: OptimizerConfig, optimizer: MegatronOptimizer, updates: int) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_fraction` of the updates, then the schedule. Step it *before* each update.

    Stepping first makes update u of a w-update warm-up use lr * u / w: no update is spent on a learning rate of zero.
    """
    warmup = min(round(config.warmup_fraction * updates), updates - 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=updates,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
