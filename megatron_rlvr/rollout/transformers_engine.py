"""Rollouts by a transformers model and a plain sampling loop: oracle for other engines, fallback without vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_rlvr.rollout.checkpoint import check_model_length, read_config, tensor_shapes
from megatron_rlvr.rollout.engine import (
    Completion,
    RefreshReport,
    SamplingSettings,
    check_distribution,
    check_sampling,
    check_sequences,
    completion_limits,
    context_seeds,
)
from megatron_rlvr.rollout.random_state import isolated_random_state
from megatron_rlvr.rollout.refresh_gate import STAGING_BYTES, RefreshGate
from megatron_rlvr.types import LogprobDistribution

Generators = torch.Generator | list[torch.Generator]  # of a whole batch, or one for each row
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class TransformersSettings:
    """How the engine is built.

    max_model_len  tokens, context and response together
    max_num_seqs   rows that are decoded at once
    distribution   of the log-probs that generate returns; other than the raw softmax it must be the sampling's own
    """

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    precision: Literal["float32", "bf16"] = "float32"
    max_num_seqs: int = 256
    staging_bytes: int = STAGING_BYTES
    distribution: LogprobDistribution = field(default_factory=LogprobDistribution)


class TransformersEngine:
    """The Engine protocol on transformers' AutoModelForCausalLM.

    Raises UserError for a directory that is no readable checkpoint or a model shorter than max_model_len.
    """

    def __init__(self, model_path: Path, settings: TransformersSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        config = read_config(model_path)
        check_model_length(config, settings.max_model_len)
        self._vocab_size = int(config["vocab_size"])
        self._gate = RefreshGate(tensor_shapes(model_path), settings.staging_bytes)
        with isolated_random_state(0):
            self._model = _load_model(model_path, settings.precision, device)
        self._targets = _CheckpointSlices(self._model)

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._gate.version

    @torch.no_grad()
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingSettings,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See Engine.generate."""
        self._gate.require_usable()
        check_sampling(sampling, n)
        check_distribution(self._settings.distribution, sampling)
        limits = completion_limits(contexts, sampling, limits)
        check_sequences(contexts, limits, self._settings.max_model_len, self._vocab_size)
        shared = torch.Generator(self._device).manual_seed(sampling.seed)
        own = self._generators(context_seeds(contexts, sampling), n)
        rows = [list(ids) for ids in contexts for _ in range(n)]
        row_limits = [limit for limit in limits for _ in range(n)]
        size = self._settings.max_num_seqs
        done: list[Completion] = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            generators = shared if own is None else own[part]
            done += self._sample_batch(rows[part], row_limits[part], sampling, generators)
        return [done[start : start + n] for start in range(0, len(done), n)]

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See Engine.score."""
        self._gate.require_usable()
        check_sequences(sequences, None, self._settings.max_model_len, self._vocab_size)
        size = self._settings.max_num_seqs
        scores: list[np.ndarray] = []
        for start in range(0, len(sequences), size):
            batch = [list(ids) for ids in sequences[start : start + size]]
            ids, mask = _left_pad(batch, self._device)
            logits = self._model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask)).logits
            picked = _log_softmax(logits[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()
            scores += [row[row.shape[0] - len(seq) + 1 :] for row, seq in zip(picked, batch, strict=True)]
        return scores

    def cache_usage(self) -> tuple[int, int]:
        """See Engine.cache_usage: there is no cache."""
        return 0, 0

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> RefreshReport:
        """See Engine.update_weights."""
        with torch.no_grad():
            return self._gate.push(tensors, version, self._load)

    def close(self) -> None:
        """Free the weights."""
        del self._model, self._targets

    def _load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in stream:
            self._targets(name).copy_(tensor)

    def _generators(self, seeds: list[int] | None, n: int) -> list[torch.Generator] | None:
        """One for each row where contexts have seeds of their own."""
        if seeds is None:
            return None
        return [torch.Generator(self._device).manual_seed(seed + sample) for seed in seeds for sample in range(n)]

    def _sample_batch(
        self, contexts: list[list[int]], limits: list[int], sampling: SamplingSettings, generators: Generators
    ) -> list[Completion]:
        """One batch of rows, decoded until every row has ended; a row that has ended is dropped from the batch."""
        from transformers import DynamicCache

        ids, mask = _left_pad(contexts, self._device)
        cache, positions = DynamicCache(), _positions(mask)
        alive = torch.arange(len(contexts), device=self._device)
        stop_ids = torch.tensor(self._settings.eos_token_ids, device=self._device, dtype=torch.long)
        responses = _Responses(len(contexts))
        caps = torch.tensor(limits, device=self._device)
        for step in range(1, max(limits) + 1):
            out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            logits = out.logits[:, -1].float()
            raw = _log_softmax(logits)
            of_rows = generators if isinstance(generators, torch.Generator) else [generators[i] for i in alive.tolist()]
            tokens = _draw(raw, sampling, of_rows)
            logprobs = _scored(logits, raw, self._settings.distribution)
            stopped = torch.isin(tokens, stop_ids)
            responses.append(alive, tokens, logprobs.gather(-1, tokens[:, None])[:, 0], stopped)
            ended = stopped | (caps[alive] == step)
            if bool(ended.all()):
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            if bool(ended.any()):
                keep = (~ended).nonzero()[:, 0]
                alive, mask, ids, positions = alive[keep], mask[keep], ids[keep], positions[keep]
                cache.batch_select_indices(keep)
        return responses.completions(self.version)


class _Responses:
    """Grows the responses of a batch token by token."""

    def __init__(self, rows: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._logprobs: list[list[float]] = [[] for _ in range(rows)]
        self._stopped = [False] * rows

    def append(self, rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, stopped: torch.Tensor) -> None:
        columns = (rows.tolist(), tokens.tolist(), logprobs.tolist(), stopped.tolist())
        for row, token, logprob, stop in zip(*columns, strict=True):
            self._tokens[row].append(token)
            self._logprobs[row].append(logprob)
            self._stopped[row] = stop

    def completions(self, version: int) -> list[Completion]:
        return [
            Completion(
                np.array(tokens, np.int32),
                np.array(logprobs, np.float32),
                np.full(len(tokens), version, np.int32),
                "stop" if stopped else "length",
            )
            for tokens, logprobs, stopped in zip(self._tokens, self._logprobs, self._stopped, strict=True)
        ]


def _load_model(model_path: Path, precision: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with torch.device("meta"):
        if torch.arange(1).device.type != "meta":
            raise RuntimeError("torch.device contexts are broken in this process: from_pretrained would go wrong")
    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[precision]
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True).to(device).eval()
    finally:
        if bars:
            logging.enable_progress_bar()


class _CheckpointSlices:
    """Checkpoint name -> the part of a parameter that holds it.

    transformers 5 keeps the experts of a layer in two tensors, [experts, 2 * intermediate, hidden] (gate above up) and
    [experts, hidden, intermediate], while checkpoints hold each expert's three matrices.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = model.state_dict(keep_vars=False)

    def __call__(self, name: str) -> torch.Tensor:
        """Raises KeyError for a name that the model does not have."""
        match = _EXPERT.fullmatch(name)
        if name in self._tensors or match is None:
            return self._tensors[name]
        experts, index, part = match[1], int(match[2]), match[3]
        if part == "down":
            return self._tensors[f"{experts}.down_proj"][index]
        gate_up = self._tensors[f"{experts}.gate_up_proj"][index]
        half = gate_up.shape[0] // 2
        return gate_up[:half] if part == "gate" else gate_up[half:]


def _left_pad(sequences: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, [rows, longest] int64 each; padding on the left, id 0."""
    width = max(len(ids) for ids in sequences)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in sequences], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in sequences], device=device)
    return ids, mask


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1, dtype=torch.float32)


def _draw(logprobs: torch.Tensor, sampling: SamplingSettings, generators: Generators) -> torch.Tensor:
    """[rows] ids drawn from [rows, vocabulary] raw log-probs under temperature, then top-k, then top-p."""
    if sampling.greedy:
        return logprobs.argmax(-1)
    scaled = _truncated(logprobs / sampling.temperature, sampling.top_p, sampling.top_k)
    noise = torch.empty_like(scaled)
    if isinstance(generators, torch.Generator):
        noise.exponential_(generator=generators)
    else:
        for row, generator in zip(noise, generators, strict=True):
            row.exponential_(generator=generator)
    return (scaled.softmax(-1) / noise).argmax(-1)


def _scored(logits: torch.Tensor, raw: torch.Tensor, distribution: LogprobDistribution) -> torch.Tensor:
    """[rows, vocabulary] log-probs of that distribution, from the logits and their raw log-probs."""
    if not distribution.truncated:
        return _log_softmax(logits / distribution.temperature)
    # As `_draw` cuts it, to the bit: a token that was drawn must not come out as impossible.
    return _log_softmax(_truncated(raw / distribution.temperature, distribution.top_p, distribution.top_k))


def _truncated(scaled: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """[rows, vocabulary] logits, -inf outside top-k and then top-p of the rest; ids that tie with the last all stay."""
    if top_k != -1:
        kth = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if top_p < 1:
        ordered = scaled.sort(dim=-1, descending=True).values
        mass = ordered.double().softmax(-1)
        outside = mass.cumsum(-1) - mass >= top_p  # the first id that crosses top_p stays
        last = ordered.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < last, float("-inf"))
    return scaled
