from __future__ import annotations

import itertools

import numba  # noqa: F401  engines start in processes that have quantised before, too
import pytest
import torch

from megatron_rlvr.rollout.transformers_engine import TransformersEngine, TransformersSettings
from megatron_rlvr.rollout.vllm_engine import VllmEngine, VllmSettings
from tests.rollout.models import EOS, MAX_MODEL_LEN, tensors_of, write_model


def make_engine(kind, path, **settings):
    settings = {"precision": "float32", "max_num_seqs": 64} | settings
    if kind == "vllm":
        return VllmEngine(path, VllmSettings(MAX_MODEL_LEN, (EOS,), **settings), torch.device("cpu"))
    return TransformersEngine(path, TransformersSettings(MAX_MODEL_LEN, (EOS,), **settings), torch.device("cpu"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Four checkpoints of one shape with different weights."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed) for seed in range(4)]


@pytest.fixture(scope="session", params=["vllm", "transformers"])
def shared_engine(request, models):
    engine = make_engine(request.param, models[0])
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, models):
    """A long-running engine of each kind, holding the weights of models[0]."""
    shared_engine.update_weights(tensors_of(models[0]).items(), shared_engine.version + 1)
    return shared_engine


@pytest.fixture
def next_version(engine):
    return itertools.count(engine.version + 1).__next__
