"""What a rollout engine is: token ids in; token ids, log-probs and weight versions out; weights pushed by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from megatron_rlvr.types import LogprobDistribution, UserError


class RefreshError(UserError):
    """A weight push that was refused; the sentence names the tensor or the version and says what to do."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn.

    max_response_length  tokens, the end-of-sequence token included
    top_k                -1: no top-k
    greedy               arg-max decoding; temperature, top_p, top_k and seed are then unused
    seed                 the same seed and contexts give the same tokens; vary it per call and per rank
    seeds                one for each context, in place of `seed`: sample j of a context then draws with its seed + j,
                         whatever other contexts the call has (up to rounding, which follows the batch)
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    seed: int = 0
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response of T tokens.

    token_ids      [T] int32    ends with the end-of-sequence token when finish_reason is "stop"
    logprobs       [T] float32  nats, log-prob of each sampled token under the engine's `distribution`: the raw softmax
                   (temperature 1, no top-k or top-p), or what sampling draws from
    versions       [T] int32    weight version that sampled each token
    finish_reason  "stop" (end-of-sequence token) or "length" (cut at max_response_length)
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class RefreshReport:
    """What one weight push wrote.

    num_tensors, num_bytes  as they arrived, before the engine's own precision
    seconds                 wall time of the push, the producer's gathering included
    digest                  hex digest over names, shapes, dtypes and bits; independent of the order of arrival
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    digest: str


class Engine(Protocol):
    """A sampler with its own copy of the weights.

    An engine belongs to one process and serves one call at a time. No call touches the global random state of torch,
    numpy or Python: the trainer lives in the same process.
    """

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; 0 is the checkpoint that the engine was built from."""
        ...

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingSettings,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each context, in the order of the contexts.

        limits   most tokens of each context's completions, in place of sampling.max_response_length

        Raises UserError for a context that is empty, holds an id outside the vocabulary, or is longer than
        max_model_len minus max_response_length, and RefreshError while the weights are half-written; the engine stays
        usable.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """[N-1] float32 per sequence of N ids: log-prob (nats, temperature 1) of each id given the ones before it.

        Raises UserError for an empty sequence, one longer than max_model_len, or an id outside the vocabulary.
        """
        ...

    def cache_usage(self) -> tuple[int, int]:
        """Context tokens that `generate` found in its prefix cache so far, and all it looked up; (0, 0): unknown."""
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> RefreshReport:
        """Replace every weight by the tensor of that Hugging Face name and publish `version`.

        `tensors` is consumed lazily; a yielded tensor must not be written to before this returns. Every tensor of the
        checkpoint must arrive exactly once, finite and in its shape, and `version` must be newer: otherwise
        RefreshError names the tensor, and the old version stays published. Caches of the old weights are dropped.

        A checkpoint larger than the engine's staging limit is loaded while it streams in; a push that fails then leaves
        half-written weights, and the engine refuses to generate until a complete push arrives.
        """
        ...

    def close(self) -> None:
        """Free the weights and caches; the engine cannot be used afterwards."""
        ...


def completion_limits(
    contexts: Sequence[Sequence[int]], sampling: SamplingSettings, limits: Sequence[int] | None
) -> list[int]:
    """Most tokens of the completions of each context. Raises UserError where one may have none at all."""
    if limits is None:
        return [sampling.max_response_length] * len(contexts)
    if len(limits) != len(contexts):
        raise UserError(f"{len(limits)} limits were given for {len(contexts)} contexts; give one for each")
    if any(limit < 1 for limit in limits):
        raise UserError(f"a completion may have {min(limits)} tokens; leave room for at least one behind its prefix")
    return list(limits)


def check_sequences(
    sequences: Sequence[Sequence[int]], rooms: Sequence[int] | None, limit: int, vocab_size: int
) -> None:
    """Refuse sequences that are empty, hold foreign ids, or leave no space for `rooms` more tokens below `limit`.

    rooms   tokens that each sequence may grow by; None: they do not grow
    Raises UserError naming the first bad sequence by its index.
    """
    for index, ids in enumerate(sequences):
        room = 0 if rooms is None else rooms[index]
        if len(ids) == 0:
            raise UserError(f"sequence {index} has no tokens; give at least one")
        if len(ids) + room > limit:
            raise UserError(
                f"sequence {index} has {len(ids)} tokens and {room} are to be sampled, over max_model_len {limit}; "
                "shorten the context or lower max_response_length"
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise UserError(
                f"sequence {index} holds token id {bad}, outside the vocabulary of {vocab_size}; "
                "use the tokenizer that belongs to the model"
            )


def context_seeds(contexts: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[int] | None:
    """The seeds of the contexts, None where they share one. Raises UserError where their number is another."""
    if sampling.seeds is None:
        return None
    if len(sampling.seeds) != len(contexts):
        raise UserError(f"{len(sampling.seeds)} seeds were given for {len(contexts)} contexts; give one for each")
    return list(sampling.seeds)


def check_sampling(sampling: SamplingSettings, n: int) -> None:
    """Raise UserError for settings that no engine can follow."""
    if n < 1:
        raise UserError(f"n is {n}; ask for at least one completion per context")
    if sampling.max_response_length < 1:
        raise UserError(f"max_response_length is {sampling.max_response_length}; it must be at least 1")
    if not sampling.greedy and sampling.temperature <= 0:
        raise UserError(f"temperature is {sampling.temperature}; use a positive one, or greedy decoding")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"top_p is {sampling.top_p}; it must lie in (0, 1]")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise UserError(f"top_k is {sampling.top_k}; use a positive number, or -1 for none")


def check_distribution(distribution: LogprobDistribution, sampling: SamplingSettings) -> None:
    """Raise UserError where log-probs are to be those of sampling, but sampling is to differ; raw ones always can."""
    drawn_from = LogprobDistribution(sampling.temperature, sampling.top_p, sampling.top_k)
    if distribution != LogprobDistribution() and (sampling.greedy or drawn_from != distribution):
        asked = "greedy decoding" if sampling.greedy else str(drawn_from)
        raise UserError(
            f"this engine returns log-probs of sampling at {distribution}, but was asked for {asked}; sample as it "
            "scores, or leave loss.logprob_temperature out so that it returns raw log-probs"
        )
