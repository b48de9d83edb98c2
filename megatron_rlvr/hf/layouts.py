"""How Hugging Face tensors become one Megatron tensor, and how that is split over ranks.

Every layout is the same two steps. Each source is cut evenly along `dim` (rank r owns part r), then the parts of one
rank are joined into its local tensor; merging undoes the two in reverse order. Only joining differs between layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Replicated:
    """One source, whole on every rank."""

    def divides(self, shapes: Sequence[Shape], size: int) -> bool:
        return True

    def local_slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Slices]:
        return [tuple(slice(0, n) for n in shape) for shape in shapes]

    def local_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return shapes[0]

    def join(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], size: int) -> torch.Tensor:
        return parts[0]

    def separate(self, local: torch.Tensor, shapes: Sequence[Shape], size: int) -> list[torch.Tensor]:
        return [local]

    def merge(self, shapes: Sequence[Shape], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """One source cut along `dim`: 0 in column-parallel layers (output rows), 1 in row-parallel ones (inputs)."""

    dim: int = 0

    def divides(self, shapes: Sequence[Shape], size: int) -> bool:
        """True where `size` equal shards exist."""
        return all(shape[self.dim] % size == 0 for shape in shapes)

    def local_slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Slices]:
        return [even_slices(shape, self.dim, rank, size) for shape in shapes]

    def local_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        """Shape of one rank's joined tensor."""
        local = [even_shape(shape, self.dim, size) for shape in shapes]
        return tuple(sum(s[0] for s in local) if d == 0 else n for d, n in enumerate(local[0]))

    def join(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], size: int) -> torch.Tensor:
        """One rank's tensor from its part of every source."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def separate(self, local: torch.Tensor, shapes: Sequence[Shape], size: int) -> list[torch.Tensor]:
        """Inverse of `join`: the parts of every source that one rank holds."""
        return list(local.split([even_shape(shape, self.dim, size)[0] for shape in shapes]))

    def merge(self, shapes: Sequence[Shape], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [self.separate(shard, shapes, len(shards)) for shard in shards]
        return [torch.cat(source, self.dim) for source in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Gated(Split):
    """SwiGLU's first layer, sources (gate, up): each rank holds [its rows of gate; its rows of up]."""


@dataclass(frozen=True)
class GroupedQkv(Split):
    """Attention input, sources (q, k, v): per query group [its q heads | k | v]; ranks own whole groups."""

    num_groups: int = 1

    def divides(self, shapes: Sequence[Shape], size: int) -> bool:
        return self.num_groups % size == 0

    def join(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], size: int) -> torch.Tensor:
        groups = self.num_groups // size
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(self.local_shape(shapes, size))

    def separate(self, local: torch.Tensor, shapes: Sequence[Shape], size: int) -> list[torch.Tensor]:
        groups = self.num_groups // size
        rows = [shape[0] // self.num_groups for shape in shapes]
        grouped = local.reshape(groups, sum(rows), *local.shape[1:])
        return [part.reshape(-1, *local.shape[1:]) for part in grouped.split(rows, dim=1)]


@dataclass(frozen=True)
class Vocabulary(Split):
    """Embedding or output rows, padded with zero rows to a multiple so that every rank has as many."""

    multiple: int = 1

    def divides(self, shapes: Sequence[Shape], size: int) -> bool:
        return self._padded(shapes[0])[0] % size == 0

    def _padded(self, shape: Shape) -> Shape:
        return (-(-shape[0] // self.multiple) * self.multiple, *shape[1:])

    def local_slices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Slices]:
        rows, *rest = even_slices(self._padded(shapes[0]), 0, rank, size)
        real = shapes[0][0]
        return [(slice(min(rows.start, real), min(rows.stop, real)), *rest)]

    def local_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return even_shape(self._padded(shapes[0]), 0, size)

    def join(self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], size: int) -> torch.Tensor:
        rows, *rest = self.local_shape(shapes, size)
        missing = rows - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros(missing, *rest)]) if missing else parts[0]

    def separate(self, local: torch.Tensor, shapes: Sequence[Shape], size: int) -> list[torch.Tensor]:
        """The rows with padding: how many of them are real depends on the rank."""
        return [local]

    def merge(self, shapes: Sequence[Shape], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: shapes[0][0]]]


Layout = Replicated | Split


def even_shape(shape: Shape, dim: int, size: int) -> Shape:
    """`shape` with dimension `dim` divided by `size`."""
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def even_slices(shape: Shape, dim: int, rank: int, size: int) -> Slices:
    """Slices of part `rank` of `size` equal parts along `dim`."""
    n = even_shape(shape, dim, size)[dim]
    return tuple(slice(rank * n, (rank + 1) * n) if d == dim else slice(0, full) for d, full in enumerate(shape))
