"""Which layers a pipeline rank holds, as megatron-core deals them out: evenly, virtual stages in turns."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rlvr.types import UserError


@dataclass(frozen=True)
class Stage:
    """One model chunk of one pipeline rank.

    layers   global layer numbers
    first    it holds the embedding
    last     it holds the final norm and the head
    """

    layers: range
    first: bool
    last: bool


def pipeline_stages(
    num_layers: int, pipeline_parallel: int = 1, virtual_pipeline: int = 1
) -> tuple[tuple[Stage, ...], ...]:
    """stages[pipeline rank][virtual stage]; UserError where the layers do not divide evenly."""
    chunks = pipeline_parallel * virtual_pipeline
    if num_layers % chunks:
        raise UserError(
            f"actor.pipeline_parallel {pipeline_parallel} times actor.virtual_pipeline {virtual_pipeline} does not "
            f"divide the model's {num_layers} layers; use divisors of them."
        )
    size = num_layers // chunks

    def stage(chunk: int) -> Stage:
        return Stage(range(chunk * size, (chunk + 1) * size), chunk == 0, chunk == chunks - 1)

    return tuple(
        tuple(stage(virtual * pipeline_parallel + rank) for virtual in range(virtual_pipeline))
        for rank in range(pipeline_parallel)
    )
