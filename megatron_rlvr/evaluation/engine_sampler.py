"""Sampling through a rollout engine in this process: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rlvr.data import Problem, tokenize_problems
from megatron_rlvr.evaluation.generation import Response
from megatron_rlvr.evaluation.suite import BenchmarkConfig
from megatron_rlvr.rollout.engine import Engine, SamplingSettings
from megatron_rlvr.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineSampler:
    """`Sampler` on an `Engine`, which starts with the first call of `sample`: not at all where nothing is missing.

    start            makes the engine
    prompt_options   keywords of `tokenize_problems`: chat_template, suffix, max_prompt_length
    """

    def __init__(
        self, start: Callable[[], Engine], tokenizer: PreTrainedTokenizerBase, prompt_options: Mapping[str, Any]
    ) -> None:
        self._start, self._tokenizer, self._options = start, tokenizer, dict(prompt_options)
        self._engine: Engine | None = None

    def check(self, problems: Sequence[Problem], benchmark: BenchmarkConfig) -> None:
        """See Sampler.check: a prompt that is empty or too long."""
        self._prompts(problems)

    def sample(
        self, problems: Sequence[Problem], seeds: Sequence[int], benchmark: BenchmarkConfig
    ) -> Iterator[list[Response]]:
        """See Sampler.sample; the whole of `problems` is one call of the engine."""
        sampling = SamplingSettings(
            benchmark.max_response_length,
            benchmark.temperature,
            benchmark.top_p,
            benchmark.top_k,
            greedy=benchmark.greedy,
            seeds=tuple(seeds),
        )
        self._engine = self._engine or self._start()
        contexts = [prompt.token_ids for prompt in self._prompts(problems)]
        for completions in self._engine.generate(contexts, benchmark.samples, sampling):
            yield [Response(self._decode(c.token_ids.tolist()), len(c.token_ids), c.finish_reason) for c in completions]

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()

    def _prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        return tokenize_problems(problems, self._tokenizer, **self._options)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
