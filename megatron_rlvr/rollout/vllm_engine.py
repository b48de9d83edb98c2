"""Rollouts by vLLM inside this process; one code for its CPU and its CUDA build. The only file that imports vllm."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_rlvr.rollout.checkpoint import check_model_length, read_config, tensor_shapes
from megatron_rlvr.rollout.engine import (
    Completion,
    RefreshError,
    RefreshReport,
    SamplingSettings,
    check_distribution,
    check_sampling,
    check_sequences,
    completion_limits,
    context_seeds,
)
from megatron_rlvr.rollout.process_settings import process_settings_kept
from megatron_rlvr.rollout.random_state import isolated_random_state
from megatron_rlvr.rollout.refresh_gate import STAGING_BYTES, RefreshGate
from megatron_rlvr.types import LogprobDistribution, UserError

CPU_BLOCK_SIZE = 32
CPU_BATCHED_TOKENS = 2048
CPU_KV_CACHE_BYTES = (64 << 20, 4 << 30)
REQUESTS_PER_BATCH = 16384


@dataclass(frozen=True)
class VllmSettings:
    """How the engine is built; None leaves the choice to vLLM (on a CPU: to this file).

    max_model_len       tokens, context and response together
    max_num_seqs        sequences decoded at once
    kv_cache_gb         GiB; default: what memory_utilization leaves (CPU: for max_num_seqs full sequences, 4 at most)
    memory_utilization  share of the accelerator's memory, weights included; unused on a CPU
    enforce_eager       no CUDA graphs; always on where there is no CUDA
    distribution        of the log-probs that generate returns; other than the raw softmax it must be the sampling's own
    count_cache_hits    count what `cache_usage` tells
    keep_prefix_cache   reuse cached contexts across generate calls; the same seed then gives the same tokens only up to
                        rounding and chunking
    """

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    precision: Literal["float32", "bf16"] = "bf16"
    max_num_seqs: int = 256
    kv_cache_gb: float | None = None
    memory_utilization: float = 0.45
    enforce_eager: bool = False
    keep_prefix_cache: bool = False
    distribution: LogprobDistribution = field(default_factory=LogprobDistribution)
    count_cache_hits: bool = False
    seed: int = 0
    staging_bytes: int = STAGING_BYTES


class VllmEngine:
    """The Engine protocol on an in-process vllm.LLM.

    Where torch.distributed is initialised, construction is collective over the default group (vLLM makes its own groups
    in it): every rank must build its engine. Where it is not, vLLM initialises it with world size 1, so start the
    trainer's groups first. `close` leaves process groups alone.

    Raises UserError for a directory that is no readable checkpoint, and for sizes that vLLM refuses.
    """

    def __init__(self, model_path: Path, settings: VllmSettings, device: torch.device) -> None:
        self._settings = settings
        config = read_config(model_path)
        check_model_length(config, settings.max_model_len)
        self._vocab_size = int(config["vocab_size"])
        self._gate = RefreshGate(tensor_shapes(model_path), settings.staging_bytes)
        with isolated_random_state(settings.seed), process_settings_kept():
            self._llm = _start(model_path, config, settings, device)
        client = self._llm.llm_engine.engine_core
        client._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, client)

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._gate.version

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingSettings,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See Engine.generate. vLLM draws from torch's global generator; it is seeded here and restored afterwards."""
        self._gate.require_usable()
        check_sampling(sampling, n)
        check_distribution(self._settings.distribution, sampling)
        limits = completion_limits(contexts, sampling, limits)
        check_sequences(contexts, limits, self._settings.max_model_len, self._vocab_size)
        if not self._settings.keep_prefix_cache:
            self._llm.reset_prefix_cache()  # cached blocks change the batches, and with them rounding and draws
        seeds: Sequence[int | None] = context_seeds(contexts, sampling) or [None] * len(limits)
        params = [self._sampling_params(n, sampling, limit, seed) for limit, seed in zip(limits, seeds, strict=True)]
        size = max(1, REQUESTS_PER_BATCH // n)
        chunks = [slice(start, start + size) for start in range(0, len(contexts), size)]
        with isolated_random_state(sampling.seed):
            outputs = [output for chunk in chunks for output in self._run(contexts[chunk], params[chunk])]
        return [[self._completion(sample) for sample in output.outputs] for output in outputs]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See Engine.score. The last id is forced as the one sampled token, so that N may equal max_model_len.

        Raises RuntimeError in an engine with a distribution of its own: its log-prob of a forced id is 0.
        """
        self._gate.require_usable()
        if self._settings.distribution != LogprobDistribution():
            raise RuntimeError(
                "this engine returns log-probs of its sampling; build one with the raw distribution to score"
            )
        check_sequences(sequences, None, self._settings.max_model_len, self._vocab_size)
        from vllm import SamplingParams

        longer = [list(ids) for ids in sequences if len(ids) > 1]
        params = [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                logprobs=0,
                prompt_logprobs=0,
                flat_logprobs=True,
                allowed_token_ids=[ids[-1]],
                ignore_eos=True,
                detokenize=False,
            )
            for ids in longer
        ]
        with isolated_random_state(0):
            outputs = iter(self._run([ids[:-1] for ids in longer], params))
        return [_scores(next(outputs)) if len(ids) > 1 else np.zeros(0, np.float32) for ids in sequences]

    def cache_usage(self) -> tuple[int, int]:
        """See Engine.cache_usage; unknown without VllmSettings.count_cache_hits."""
        if not self._settings.count_cache_hits:
            return 0, 0
        counters = {metric.name: int(metric.value) for metric in self._llm.get_metrics() if hasattr(metric, "value")}
        return counters["vllm:prefix_cache_hits"], counters["vllm:prefix_cache_queries"]

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> RefreshReport:
        """See Engine.update_weights."""
        with torch.no_grad():
            report = self._gate.push(tensors, version, self._load)
        self._llm.reset_prefix_cache()
        return report

    def close(self) -> None:
        """Free model and KV cache; process groups stay."""
        self._finalizer()
        del self._llm

    def _sampling_params(self, n: int, sampling: SamplingSettings, limit: int, seed: int | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=0 if sampling.greedy else max(sampling.top_k, 0),
            max_tokens=limit,
            seed=None if sampling.greedy else seed,  # vLLM counts it up over the n samples
            stop_token_ids=list(self._settings.eos_token_ids),
            ignore_eos=True,  # only the ids above end a response, whatever generation_config.json says
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )

    def _run(self, contexts: Sequence[Sequence[int]], params: list[Any]) -> list[Any]:
        """Run the requests to the end; on any error drop those that are left, so that the engine stays usable."""
        prompts = [{"prompt_token_ids": list(ids)} for ids in contexts]
        try:
            return self._llm.generate(prompts, params, use_tqdm=False)
        except BaseException:
            _drop_requests(self._llm.llm_engine)
            raise

    def _completion(self, sample: Any) -> Completion:
        token_ids = np.array(sample.token_ids, np.int32)
        logprobs = np.array(sample.logprobs.logprobs, np.float32)
        versions = np.full(len(token_ids), self.version, np.int32)
        return Completion(token_ids, logprobs, versions, "stop" if sample.finish_reason == "stop" else "length")

    def _load(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        (unwritten,) = self._llm.collective_rpc(_reload_weights, args=(stream,))
        if unwritten:
            raise RefreshError(
                f"vLLM left parameter {unwritten[0]} unwritten ({len(unwritten)} are); report this model"
            )


def _start(model_path: Path, config: dict[str, Any], settings: VllmSettings, device: torch.device) -> Any:
    on_cpu = device.type == "cpu"
    _prepare_environment(on_cpu)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        from vllm import LLM

    if on_cpu:
        _patch_expert_prepack()
        _patch_rank_count()
        _patch_kernel_scan()
        _register_here(config)
    try:
        llm = LLM(
            str(model_path),
            dtype={"float32": "float32", "bf16": "bfloat16"}[settings.precision],
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            use_tqdm_on_load=False,
            seed=settings.seed,
            disable_log_stats=not settings.count_cache_hits,
            logprobs_mode="raw_logprobs" if settings.distribution == LogprobDistribution() else "processed_logprobs",
            **(_cpu_options(config, settings) if on_cpu else _cuda_options(settings, device)),
        )
    except ValueError as error:
        reason = [line.strip() for line in str(error).splitlines() if line and "For further information" not in line][
            -1
        ]
        raise UserError(f"vLLM refuses to start on {model_path} ({reason}); adapt the rollout section") from error
    return llm


def _shut_down(client: Any) -> None:
    """vLLM's own way would also destroy the default process group, which may be the trainer's."""
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()


def _prepare_environment(on_cpu: bool) -> None:
    """What vLLM reads while it is imported; values that the user has set stay."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if on_cpu else "WARNING")
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM configures its logger only after the first messages.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _cuda_options(settings: VllmSettings, device: torch.device) -> dict[str, Any]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return {
        "device_ids": [index],  # vLLM would take the first device on every rank
        "kv_cache_memory_bytes": None if settings.kv_cache_gb is None else int(settings.kv_cache_gb * 2**30),
        "gpu_memory_utilization": settings.memory_utilization,
        "enforce_eager": settings.enforce_eager,
    }


def _cpu_options(config: dict[str, Any], settings: VllmSettings) -> dict[str, Any]:
    given = settings.kv_cache_gb
    return {
        "kv_cache_memory_bytes": _cpu_kv_cache_bytes(config, settings) if given is None else int(given * 2**30),
        "enforce_eager": True,
        "block_size": CPU_BLOCK_SIZE,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, settings.max_num_seqs),
    }


def _cpu_kv_cache_bytes(config: dict[str, Any], settings: VllmSettings) -> int:
    """Room for max_num_seqs full sequences, between 64 MiB and 4 GiB: vLLM's own default takes most of the machine."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim
    token_bytes = values * (4 if settings.precision == "float32" else 2)
    low, high = CPU_KV_CACHE_BYTES
    return min(max(token_bytes * (settings.max_model_len + CPU_BLOCK_SIZE) * settings.max_num_seqs, low), high)


def _patch_expert_prepack() -> None:
    """Prepack expert weights after every load, not only the first.

    vLLM 0.32.0 for CPUs skips this step on weight updates and then multiplies by weights in the wrong layout, silently.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(setup, "__wrapped__"):
        return

    def setup_and_prepack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_and_prepack.__wrapped__ = setup  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = setup_and_prepack


def _patch_rank_count() -> None:
    """Count ranks of sampled tokens without torch.compile, which needs a C++ compiler and seconds at the first call."""
    from vllm.v1.sample import sampler

    def count_not_less(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (x >= values).sum(-1)

    sampler.batched_count_greater_than = count_not_less


def _patch_kernel_scan() -> None:
    """Let vLLM look for kernels where numba is loaded: a handle of its llvmlite answers to any name, `__dict__` too."""
    from vllm.triton_utils import dispatcher

    def namespace(value: object) -> Mapping[str, Any]:
        found: Any = value.__dict__
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = namespace  # type: ignore[attr-defined]


def _register_here(config: dict[str, Any]) -> None:
    """Import the model class in this process; vLLM would inspect it in a child first, 10 s on a machine's first run."""
    from vllm.model_executor.models import ModelRegistry

    for name in config.get("architectures") or ():
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def _reload_weights(worker: Any, stream: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Runs on the worker: load a checkpoint's tensors in place; returns the parameters that got none.

    When `stream` raises, layers that it has reached are spoiled and the others are as they were; a later call starts
    clean.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = worker.model_runner.get_model(), worker.model_config
    with set_current_vllm_config(worker.vllm_config), _unwritten_layers_unlogged():
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(stream)
        finally:
            finalize_layerwise_reload(model, config)
        _prepack_heads(model)
    return sorted({name for name, _ in model.named_parameters()} - loaded)


def _prepack_heads(model: torch.nn.Module) -> None:
    """vLLM for CPUs multiplies by a packed copy of the head and leaves the copy old where the head is tied."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def _unwritten_layers_unlogged() -> Iterator[None]:
    """vLLM warns of every tied layer; the list that _reload_weights returns holds the real ones."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _drop_requests(engine: Any) -> None:
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    while engine.has_unfinished_requests() or engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()


def _scores(output: Any) -> np.ndarray:
    inside = output.prompt_logprobs.logprobs
    return np.array([*inside, *output.outputs[0].logprobs.logprobs], np.float32)
