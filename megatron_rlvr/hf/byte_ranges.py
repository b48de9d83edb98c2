"""A slice of a tensor as byte ranges of a file: read and written where it lies, without mapping the file.

A mapped page counts as the process's memory and reads of it are counted nowhere; plain reads are exact in both.
"""

from __future__ import annotations

import os

import torch

Shape = tuple[int, ...]
Slices = tuple[slice, ...]

# Shorter runs are cheaper to read with the gaps between them: a disk moves whole pages anyway.
_SHORTEST_READ = 4096


def runs(shape: Shape, slices: Slices, itemsize: int) -> tuple[list[int], int]:
    """(offsets in bytes, length in bytes) of the equally long contiguous runs that make `tensor[slices]`, in order."""
    bounds = [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]
    if any(stop <= start for start, stop in bounds):
        return [], 0
    outer, length = len(shape), itemsize
    while outer and bounds[outer - 1] == (0, shape[outer - 1]):
        outer -= 1
        length *= shape[outer]
    offsets, stride = [0], length
    for dim in reversed(range(outer)):
        start, stop = bounds[dim]
        if dim == outer - 1:
            offsets, length = [start * stride], (stop - start) * stride
        else:
            offsets = [index * stride + offset for index in range(start, stop) for offset in offsets]
        stride *= shape[dim]
    return offsets, length


def read_slices(
    descriptor: int, start: int, shape: Shape, dtype: torch.dtype, slices: Slices
) -> tuple[torch.Tensor, int]:
    """(the slice as a new CPU tensor, bytes read) of the tensor whose data begins at byte `start`.

    Raises EOFError where the file ends before the slice does.
    """
    sizes = [max(0, stop - begin) for begin, stop, _ in (s.indices(n) for s, n in zip(slices, shape, strict=True))]
    offsets, length = runs(shape, slices, dtype.itemsize)
    if len(offsets) > 1 and length < _SHORTEST_READ:
        rows = (slice(slices[0].start, slices[0].stop), *(slice(0, n) for n in shape[1:]))
        whole, count = read_slices(descriptor, start, shape, dtype, rows)
        return whole[(slice(None), *slices[1:])].contiguous(), count
    result = torch.empty(sizes, dtype=dtype)
    memory = _memory(result)
    for number, offset in enumerate(offsets):
        _read_into(descriptor, memory[number * length : (number + 1) * length], start + offset)
    return result, len(offsets) * length


def write_slices(descriptor: int, start: int, shape: Shape, slices: Slices, values: torch.Tensor) -> int:
    """Write `values` (CPU, contiguous, in the file's dtype) as that slice; returns the bytes written."""
    offsets, length = runs(shape, slices, values.dtype.itemsize)
    if len(offsets) * length != values.nbytes:
        raise ValueError(f"{list(values.shape)} values do not fill {slices} of {list(shape)}")
    memory = _memory(values)
    for number, offset in enumerate(offsets):
        _write_from(descriptor, memory[number * length : (number + 1) * length], start + offset)
    return values.nbytes


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read_into(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)  # at most 2 GiB at once
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        memory, offset = memory[count:], offset + count


def _write_from(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


def whole(shape: Shape) -> Slices:
    """The slices that cover all of a tensor."""
    return tuple(slice(0, n) for n in shape)
