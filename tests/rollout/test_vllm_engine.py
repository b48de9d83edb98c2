"""What is particular to vLLM: one process shared with a trainer, streamed pushes, prefix caches, start-up."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rlvr.rollout import RefreshError, SamplingSettings
from megatron_rlvr.rollout.vllm_engine import VllmEngine, VllmSettings
from megatron_rlvr.types import UserError
from tests.rollout.conftest import make_engine
from tests.rollout.models import contexts, gap, ids_of, oracle_logprobs, tensors_of, write_model

SAMPLING = SamplingSettings(max_response_length=30, seed=5)
LONG = {"shortest": 60, "longest": 66}  # almost two cache blocks


@pytest.fixture
def closing():
    engines = []

    def build(path, **settings):
        engines.append(make_engine("vllm", path, **settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_fresh_engine_repeats_a_long_running_one(engine, models):
    given = contexts(8, seed=20, **LONG)
    engine.generate(given[:3], 4, SAMPLING)  # a vLLM that kept its cache would batch the next call differently
    fresh = make_engine("vllm" if isinstance(engine, VllmEngine) else "transformers", models[0])
    again = fresh.generate(given, 4, SAMPLING)
    fresh.close()
    assert ids_of(again) == ids_of(engine.generate(given, 4, SAMPLING))


def test_construction_leaves_the_process_as_it_was(models, closing):
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    before = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.set_num_threads,
        {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    )
    closing(models[0], precision="bf16")
    after = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.set_num_threads,
        {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
    )
    del os.environ["LOCAL_WORLD_SIZE"]
    assert after == before


def test_cached_context_is_sampled_by_the_new_weights(models, closing):
    engine = closing(models[0], keep_prefix_cache=True)
    given = contexts(4, seed=21, **LONG)
    assert gap(models[0], given, engine.generate(given, 2, SAMPLING)) < 1e-5
    assert gap(models[0], given, engine.generate(given, 2, SAMPLING)) < 1e-5
    engine.update_weights(tensors_of(models[1]).items(), 1)
    groups = engine.generate(given, 2, SAMPLING)
    assert gap(models[1], given, groups) < 1e-5
    assert gap(models[0], given, groups) > 0.1


def test_continuations_of_one_long_context_find_it_in_the_cache(models, closing):
    engine = closing(models[0], count_cache_hits=True)
    given = contexts(3, seed=12, **LONG)
    before = engine.cache_usage()
    engine.generate(given, 4, SAMPLING)
    hits, asked = (after - old for after, old in zip(engine.cache_usage(), before, strict=True))
    assert asked == 4 * sum(map(len, given))
    assert 3 * 3 * 32 <= hits < asked  # all but the first of each context find at least its first block
    assert closing(models[0]).cache_usage() == (0, 0)


def test_streamed_push_that_fails_blocks_the_engine_until_a_complete_one(models, closing):
    engine = closing(models[0], staging_bytes=0)
    given, tensors = contexts(4, seed=22), tensors_of(models[1])
    last = list(tensors)[-1]

    def stream(bad):
        for name, tensor in tensors.items():
            yield name, torch.full_like(tensor, float("nan")) if name == bad else tensor

    with pytest.raises(RefreshError, match=last.replace(".", r"\.")):
        engine.update_weights(stream(bad=last), 1)
    for refused in (lambda: engine.generate(given, 1, SAMPLING), lambda: engine.score(given)):
        with pytest.raises(RefreshError, match="half-written"):
            refused()
    assert engine.version == 0
    for version, path in enumerate((models[2], models[3]), start=1):
        engine.update_weights(tensors_of(path).items(), version)
        assert gap(path, given, engine.generate(given, 2, SAMPLING)) < 1e-5


def test_stream_refused_at_its_first_tensor_leaves_the_engine_usable(models, closing):
    engine = closing(models[0], staging_bytes=0)
    given = contexts(2, seed=23)
    before = engine.score(given)
    with pytest.raises(RefreshError, match="no such"):
        engine.update_weights([("no such", torch.ones(1))], 1)
    assert all((a == b).all() for a, b in zip(before, engine.score(given), strict=True))


def test_streamed_tensors_are_not_held_together(models, closing):
    """The producer may free a tensor once its layer is complete: few are alive at once."""
    import weakref

    engine = closing(models[0], staging_bytes=0)
    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for name, tensor in sorted(tensors_of(models[1]).items()):
            copy = tensor.clone()
            alive.append(weakref.ref(copy.untyped_storage()))
            yield name, copy
            del copy
            most = max(most, sum(ref() is not None for ref in alive))

    report = engine.update_weights(stream(), 1)
    assert report.num_tensors > 80
    assert most < 40


def test_error_in_the_middle_of_a_step_leaves_no_request_behind(models, closing, monkeypatch):
    engine = closing(models[0])
    given = contexts(6, seed=24)
    before = ids_of(engine.generate(given, 3, SAMPLING))
    core = engine._llm.llm_engine
    step, calls = core.step, []

    def failing_step():
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", failing_step)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(given, 3, SAMPLING)
    assert core.get_num_unfinished_requests() == 0
    assert ids_of(engine.generate(given, 3, SAMPLING)) == before


def test_nothing_is_compiled_on_a_cpu(models, closing):
    """A bare machine has no C++ compiler."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    before = counters["frames"]["total"]
    engine = closing(models[0])
    engine.generate(contexts(3, seed=28), 3, SAMPLING)
    engine.score(contexts(3, seed=28))
    assert counters["frames"]["total"] == before


def test_more_requests_than_one_chunk_keep_their_order(models, closing, monkeypatch):
    monkeypatch.setattr("megatron_rlvr.rollout.vllm_engine.REQUESTS_PER_BATCH", 8)
    engine = closing(models[0])
    given = contexts(7, seed=25)
    groups = engine.generate(given, 4, SAMPLING)
    assert [len(group) for group in groups] == [4] * 7
    assert gap(models[0], given, groups) < 1e-5


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_dense_model_with_tied_embeddings_is_refreshed(tmp_path, kind):
    old, new = (write_model(tmp_path / str(s), s, family="qwen3", tied=True) for s in (30, 31))
    engine = make_engine(kind, old)
    given = contexts(3, seed=26)
    assert gap(old, given, engine.generate(given, 2, SAMPLING)) < 1e-5
    engine.update_weights(tensors_of(new).items(), 1)
    assert gap(new, given, engine.generate(given, 2, SAMPLING)) < 1e-5
    engine.close()


def test_bf16_engine_stays_near_float32_through_refreshes(models, closing):
    engine = closing(models[0], precision="bf16")
    given = contexts(6, seed=27)
    for version, path in enumerate(models[1:3], start=1):
        engine.update_weights(tensors_of(path).items(), version)
        gaps = [np.abs(a - b).mean() for a, b in zip(engine.score(given), oracle_logprobs(path, given), strict=True)]
        assert 0 < np.mean(gaps) < 0.1


def test_unreadable_checkpoints_are_refused(models, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(models[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for path, message in (
        (tmp_path / "none", "config.json does not exist"),
        (broken, "model.safetensors cannot be read"),
    ):
        for kind in ("vllm", "transformers"):
            with pytest.raises(UserError, match=message) as refusal:
                make_engine(kind, path)
            assert "\n" not in str(refusal.value)


def test_model_shorter_than_max_model_len_is_refused(models):
    with pytest.raises(UserError, match=r"max_model_len 129 .*max_position_embeddings 128"):
        VllmEngine(models[0], VllmSettings(129, (1,)), torch.device("cpu"))


def test_kv_cache_too_small_for_one_sequence_is_refused(models):
    with pytest.raises(UserError, match="vLLM refuses to start"):
        make_engine("vllm", models[0], kv_cache_gb=1e-6)


def test_two_trainer_ranks_with_an_engine_each(models):
    """Gloo collectives of a trainer go on before, between and after rollouts and refreshes; ranks draw differently."""
    program = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(program)]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, models[:2])], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank done") == 2
