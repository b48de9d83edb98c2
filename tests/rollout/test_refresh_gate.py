from __future__ import annotations

import pytest
import torch

from megatron_rlvr.rollout import RefreshError
from megatron_rlvr.rollout.refresh_gate import RefreshGate, tensor_fingerprint

SHAPES = {"a": (2, 3), "b": (4,), "c": ()}


def tensors():
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def by_hand(values, bits):
    """The fingerprint's definition with Python integers: sum of bits times (place modulo 65521, plus 1)."""
    total = 0
    for place, value in enumerate(values):
        signed = value - (1 << bits) if value >= 1 << (bits - 1) else value
        total += signed * (place % 65521 + 1)
    return total % 2**64


def test_fingerprint_follows_its_definition_across_chunks(monkeypatch):
    monkeypatch.setattr("megatron_rlvr.rollout.refresh_gate._CHUNK", 7)
    floats = torch.tensor([1.0, -2.5, 0.0, 3e-9] * 5)
    patterns = [int.from_bytes(row, "little") for row in floats.numpy().view("V4").tolist()]
    assert tensor_fingerprint(floats) == by_hand(patterns, 32)
    assert tensor_fingerprint(floats.view(4, 5).t()) == tensor_fingerprint(floats.view(4, 5).t().contiguous())
    assert tensor_fingerprint(floats.bfloat16()) != tensor_fingerprint(floats)
    assert tensor_fingerprint(torch.zeros(0)) == 0


def test_fingerprint_sees_a_swap_and_a_single_bit():
    values = torch.randn(100)
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    flipped = values.clone()
    flipped.view(torch.int32)[57] ^= 1
    assert len({tensor_fingerprint(t) for t in (values, swapped, flipped)}) == 3


def test_report_counts_what_arrived_in_any_order():
    received = []
    forward = RefreshGate(SHAPES).push(tensors().items(), 1, lambda stream: received.extend(stream))
    backward = RefreshGate(SHAPES).push(reversed(tensors().items()), 9, lambda stream: list(stream) and None)
    assert [name for name, _ in received] == ["a", "b", "c"]
    assert (forward.num_tensors, forward.num_bytes, forward.version) == (3, 24 + 8 + 8, 1)
    assert forward.digest == backward.digest and forward.seconds > 0
    changed = tensors() | {"c": torch.tensor(8)}
    assert RefreshGate(SHAPES).push(changed.items(), 1, lambda stream: list(stream) and None).digest != forward.digest


def test_large_finite_values_pass():
    big = torch.full((2, 3), 3e38)  # their float32 sum is infinite, they are not
    RefreshGate({"a": (2, 3)}).push([("a", big)], 1, lambda stream: list(stream) and None)


def test_small_checkpoint_reaches_the_loader_whole_or_not_at_all():
    gate = RefreshGate(SHAPES, staging_bytes=4 * 11)
    started = []
    with pytest.raises(RefreshError, match="tensor c is missing"):
        gate.push(list(tensors().items())[:2], 1, lambda stream: started.append(True))
    gate.require_usable()
    assert not started and gate.version == 0


def test_large_checkpoint_is_pulled_one_tensor_at_a_time():
    gate = RefreshGate(SHAPES, staging_bytes=4 * 10)
    made, seen = [], []

    def produce():
        for name, tensor in tensors().items():
            made.append(name)
            yield name, tensor

    def load(stream):
        for name, _ in stream:
            seen.append((name, len(made)))

    gate.push(produce(), 1, load)
    assert seen == [("a", 1), ("b", 2), ("c", 3)]


def test_loader_that_fails_or_stops_early_blocks_until_the_next_push():
    def fail(stream):
        next(stream)
        raise MemoryError("no room")

    for load, error in ((fail, MemoryError), (lambda stream: next(stream), RefreshError)):
        gate = RefreshGate(SHAPES)
        with pytest.raises(error):
            gate.push(tensors().items(), 1, load)
        with pytest.raises(RefreshError, match="half-written"):
            gate.require_usable()
        gate.push(tensors().items(), 1, lambda stream: list(stream) and None)
        gate.require_usable()
        assert gate.version == 1


def test_gradients_do_not_follow_the_tensors():
    received = []
    weight = torch.ones(4, requires_grad=True)
    RefreshGate({"b": (4,)}).push([("b", weight)], 1, lambda stream: received.extend(stream))
    assert not received[0][1].requires_grad
