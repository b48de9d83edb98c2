"""Layouts that an installed megatron-core is known to compute wrongly, refused before anything is built."""

from __future__ import annotations

import megatron.core
from packaging.version import Version

from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import ModelSpec, UserError


def check_layout(spec: ModelSpec, config: ActorConfig) -> None:
    """Raise UserError for a layout whose gradients this megatron-core gets silently wrong.

    megatron-core before 0.19 with tensor parallel > 1, expert parallel 1 and expert tensor parallel 1: expert gradients
    are off by 85-110 % and replicas drift apart while the logits stay perfect.
    """
    version = Version(megatron.core.__version__)
    broken = config.tensor_parallel > 1 and config.expert_parallel == 1 and config.expert_tensor == 1
    if spec.num_experts and broken and version < Version("0.19"):
        raise UserError(
            f"actor.expert_tensor_parallel=1 with tensor_parallel={config.tensor_parallel} and expert_parallel=1 gives "
            f"wrong expert gradients in megatron-core {version}: set actor.expert_tensor_parallel="
            f"{config.tensor_parallel} or actor.expert_parallel > 1"
        )
