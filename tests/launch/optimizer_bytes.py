"""What Megatron's optimizer really holds."""

from __future__ import annotations

from typing import Any

import torch


def optimizer_bytes(optimizer: Any, dtype: str) -> int:
    """Bytes of moments and, with bf16 weights, of float32 master copies, once the states exist (made here if not)."""
    total = 0
    for inner in {
        id(part.optimizer): part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])
    }.values():
        parameters = [p for group in inner.param_groups for p in group["params"]]
        if not inner.state:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            inner.step()
        assert len(inner.state) == len(parameters)
        total += sum(state[name].nbytes for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq"))
        if dtype == "bf16":
            assert all(p.dtype == torch.float32 for p in parameters)
            total += sum(p.nbytes for p in parameters)
    return total
