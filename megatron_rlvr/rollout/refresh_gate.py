"""The door that pushed weights pass: every tensor checked, counted and fingerprinted before the engine sees it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron_rlvr.rollout.checkpoint import num_elements
from megatron_rlvr.rollout.engine import RefreshError, RefreshReport

Loader = Callable[[Iterator[tuple[str, torch.Tensor]]], None]

STAGING_BYTES = 1 << 30
_CHUNK = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_fingerprint(tensor: torch.Tensor) -> int:
    """An integer that depends on every bit and its place; the same on CPU and CUDA, cheap, not cryptographic."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + len(part), device=part.device).remainder_(65521).add_(1)
        total += int((part * weights).sum())
    return total % 2**64


class TensorLedger:
    """The tensors of one push, as they arrive: names, shapes and values checked, bytes and bits recorded."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = expected
        self._lines: dict[str, str] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._lines)

    def admit(self, name: str, tensor: torch.Tensor) -> None:
        """Record one tensor. Raises RefreshError naming it when it is unknown, repeated, misshapen or non-finite."""
        shape = self._expected.get(name)
        if shape is None:
            raise RefreshError(f"tensor {name} is not in the engine's checkpoint; push only the names found there")
        if name in self._lines:
            raise RefreshError(f"tensor {name} was pushed twice; push every tensor once")
        if tuple(tensor.shape) != shape:
            raise RefreshError(f"tensor {name} has shape {tuple(tensor.shape)}; push it in the checkpoint's {shape}")
        if not torch.isfinite(tensor.float().sum()) and not torch.isfinite(tensor).all():
            raise RefreshError(f"tensor {name} holds NaN or infinity; the update that made it must not be published")
        self._lines[name] = f"{name} {shape} {tensor.dtype} {tensor_fingerprint(tensor):016x}"
        self.num_bytes += tensor.numel() * tensor.element_size()

    def check_complete(self) -> None:
        """Raise RefreshError naming the first tensor that never arrived."""
        missing = self._expected.keys() - self._lines.keys()
        if missing:
            raise RefreshError(
                f"tensor {min(missing)} is missing ({len(missing)} of {len(self._expected)} are); push them all"
            )

    def digest(self) -> str:
        """Hex digest over all lines in the order of names."""
        text = "\n".join(line for _, line in sorted(self._lines.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class RefreshGate:
    """Version, checks and state of an engine's weights.

    Checkpoints of up to `staging_bytes` (counted in float32) are checked whole before the engine's loader runs, so a
    bad push changes nothing. Larger ones stream through; a push that fails then leaves the weights half-written.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], staging_bytes: int = STAGING_BYTES) -> None:
        self.version = 0
        self._expected = expected
        self._atomic = 4 * num_elements(expected) <= staging_bytes
        self._broken_by: str | None = None

    def push(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, load: Loader) -> RefreshReport:
        """Check `tensors`, hand them to `load`, publish `version`. Raises RefreshError; then the old version stays."""
        if version <= self.version:
            raise RefreshError(
                f"weight version {version} is not newer than {self.version}, which is published; push a newer one"
            )
        started = time.perf_counter()
        ledger = TensorLedger(self._expected)
        stream = self._checked(tensors, ledger)
        if self._atomic:
            stream = iter(list(stream))
        self._load(stream, load, ledger)
        self.version, self._broken_by = version, None
        return RefreshReport(version, len(ledger), ledger.num_bytes, time.perf_counter() - started, ledger.digest())

    def require_usable(self) -> None:
        """Raise RefreshError while the weights are half-written."""
        if self._broken_by is not None:
            raise RefreshError(
                f"the weights are half-written since a push failed ({self._broken_by}); push a complete version"
            )

    def _checked(
        self, tensors: Iterable[tuple[str, torch.Tensor]], ledger: TensorLedger
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            ledger.admit(name, tensor)
            yield name, tensor.detach()
        ledger.check_complete()

    def _load(self, stream: Iterator[tuple[str, torch.Tensor]], load: Loader, ledger: TensorLedger) -> None:
        try:
            load(stream)
            if next(stream, None) is not None:
                raise RefreshError("the engine's loader left tensors unread; this engine cannot take that checkpoint")
        except BaseException as error:
            if len(ledger) > 0:  # otherwise the first tensor was refused and nothing is written yet
                self._broken_by = str(error) or type(error).__name__
            raise
