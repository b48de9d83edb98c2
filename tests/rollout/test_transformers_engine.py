"""The oracle's own arithmetic: padding, dropping of ended rows, fused experts, the broken-device canary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rlvr.rollout import SamplingSettings
from megatron_rlvr.rollout.transformers_engine import TransformersEngine, TransformersSettings
from tests.rollout.conftest import make_engine
from tests.rollout.models import EOS, VOCAB, contexts, gap, ids_of, tensors_of

GREEDY = SamplingSettings(max_response_length=40, greedy=True)


def test_batch_of_unequal_lengths_equals_one_by_one(models):
    settings = TransformersSettings(
        96, tuple(range(1, VOCAB, 9))
    )  # many stops: rows leave the batch at different times
    engine = TransformersEngine(models[0], settings, torch.device("cpu"))
    given = [[9], *contexts(10, seed=50, shortest=2, longest=50)]
    together = engine.generate(given, 1, GREEDY)
    alone = [engine.generate([ids], 1, GREEDY)[0] for ids in given]
    assert ids_of(together) == ids_of(alone)
    assert len({len(c.token_ids) for (c,) in together}) > 3
    for (a,), (b,) in zip(together, alone, strict=True):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    scores = engine.score(given)
    assert max(np.abs(a - engine.score([ids])[0]).max() for a, ids in zip(scores[1:], given[1:], strict=True)) < 1e-5


def test_more_rows_than_one_batch_keep_their_order(models):
    engine = make_engine("transformers", models[0], max_num_seqs=5)
    given = contexts(7, seed=51)
    groups = engine.generate(given, 3, SamplingSettings(20, seed=2))
    assert [len(group) for group in groups] == [3] * 7
    assert gap(models[0], given, groups) < 1e-5
    assert [len(row) for row in engine.score(given)] == [len(ids) - 1 for ids in given]


def test_each_checkpoint_tensor_reaches_its_own_place(models):
    """Every tensor of the fused model changes when, and only when, one of its checkpoint tensors is pushed changed."""
    engine = make_engine("transformers", models[0])
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    tensors = tensors_of(models[0])
    before = {n: t.clone() for n, t in engine._model.state_dict().items()}
    engine.update_weights(((n, t + 1 if n == name else t) for n, t in tensors.items()), 1)
    changed = {n: t - before[n] for n, t in engine._model.state_dict().items() if not torch.equal(t, before[n])}
    expected = torch.zeros(8, 64, 64)
    expected[6, 32:] = 1
    (found,) = changed.items()
    assert found[0] == "model.layers.1.mlp.experts.gate_up_proj"
    torch.testing.assert_close(found[1], expected)


def test_broken_device_contexts_are_noticed(models, monkeypatch):
    """A patch of torch's factories that hides them from device contexts makes from_pretrained build wrong models."""
    monkeypatch.setattr(torch, "arange", lambda *args, **kwargs: torch.tensor([0]).to("cpu"))
    monkeypatch.setattr(torch, "tensor", lambda data: torch.ones(1, device="cpu"))
    with pytest.raises(RuntimeError, match="device contexts"):
        make_engine("transformers", models[0])


def test_several_stop_ids(models):
    stops = (EOS, 17, 33)
    engine = TransformersEngine(models[0], TransformersSettings(96, stops), torch.device("cpu"))
    completions = [c for g in engine.generate(contexts(8, seed=52), 4, SamplingSettings(40)) for c in g]
    ends = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
    assert ends == set(stops)
    assert not any(np.isin(c.token_ids[:-1], stops).any() for c in completions)
