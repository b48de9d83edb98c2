"""Where the actor runs: CUDA with NCCL, or the CPU with gloo. No other module of the actor knows the difference.

On a CPU, megatron-core still asks torch.cuda for devices, streams and generators. `install()` answers those questions
with CPU stand-ins; it must run before the first `import megatron` and does nothing where CUDA is available.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


class _Stream:
    """Stands for torch.cuda.Stream and Event: CPU work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record_event(self, *args: Any) -> _Stream:
        return self

    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's parameters."""
    return _CPU if on_cpu() else torch.device("cuda", torch.cuda.current_device())


def backend() -> str:
    return "gloo" if on_cpu() else "nccl"


def use_transformer_engine() -> bool:
    """Transformer Engine's layers where they exist; its import raises RuntimeError beside a CPU torch."""
    if on_cpu():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def install() -> None:
    """Prepare torch for megatron-core on this machine. Safe to call more than once."""
    import torch.utils._device

    # Fill torch's cache of factory functions with the originals: a device context first used after the patches
    # would otherwise miss them, and transformers would build models with uninitialised buffers.
    torch.utils._device._device_constructors()
    if getattr(torch.cuda, "_megatron_rlvr_shim", False):
        return
    if on_cpu():
        torch.cuda._megatron_rlvr_shim = True  # type: ignore[attr-defined]
        _patch_torch()
        _patch_megatron()
        _patch_gloo()
    _name_missing_gemm()  # the first import of megatron where there is CUDA, so after all patches where there is none


def _name_missing_gemm() -> None:
    """0.16.1 without Transformer Engine, on any device: its router asks for a name that was never imported."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _on_cpu(factory: Callable) -> Callable:
    """A tensor factory for which device='cuda' means the CPU."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]

    stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = lambda *args, **kwargs: None

    cuda.manual_seed = torch.manual_seed  # the default CPU generator stands for the CUDA one
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    tensor_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return tensor_type(self, dtype, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)  # optimizers compare with 'torch.cuda.FloatTensor'

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    # torch.cuda._lazy_call would queue the setter for ever, and the RNG tracker's fork() would silently not fork.
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)

    # The alltoall dispatcher makes split sizes numpy only `if tensor.is_cuda`.
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _rows(tensors: list[torch.Tensor]) -> list[int]:
    return [t.shape[0] if t.dim() else 1 for t in tensors]


def _patch_gloo() -> None:
    """Uneven list collectives, which the alltoall dispatcher needs with expert and expert-tensor parallelism."""
    dist: Any = torch.distributed
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(tensor_list: list, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        rows = _rows(tensor_list)
        if len(set(rows)) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in rows]
        gather(parts, padded, group=group)
        for out, part, n in zip(tensor_list, parts, rows, strict=True):
            out.copy_(part[:n])
        return None

    def reduce_scatter(
        output: torch.Tensor, input_list: list, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = _rows(input_list)
        if len(set(rows)) == 1:
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(input_list), 0)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split(rows, 0)[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
