"""One line of a family's table: which Hugging Face tensors make which Megatron tensor."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlvr.hf.layouts import Layout, Shape


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: its full name and shape."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Rule:
    """A canonical Megatron tensor with GLOBAL layer and expert numbers.

    expert   global expert number, or None; expert tensors are split over the expert-tensor group, all others over the
             tensor group
    """

    name: str
    sources: tuple[Source, ...]
    layout: Layout
    expert: int | None = None

    @property
    def layer(self) -> int | None:
        """Global layer number; None for embedding, final norm and head."""
        return int(self.name.split(".", 3)[2]) if self.name.startswith("decoder.layers.") else None
