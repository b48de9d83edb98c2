"""What both engines promise, checked against plain transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_rlvr.rollout import RefreshError, SamplingSettings
from megatron_rlvr.types import LogprobDistribution, UserError
from tests.rollout.conftest import make_engine
from tests.rollout.models import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB,
    contexts,
    gap,
    ids_of,
    oracle_logprobs,
    tensors_of,
)

SAMPLING = SamplingSettings(max_response_length=30, seed=5)
GREEDY = SamplingSettings(max_response_length=30, greedy=True)


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_sampled_logprobs_equal_transformers(engine, models):
    given = contexts(8, seed=0)
    assert gap(models[0], given, engine.generate(given, 4, SAMPLING)) < 1e-5


def test_completions_are_labelled_by_how_they_ended(engine):
    given = contexts(16, seed=1)
    groups = engine.generate(given, 4, SAMPLING)
    completions = [c for group in groups for c in group]
    assert [len(group) for group in groups] == [4] * 16
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert c.token_ids.dtype == np.int32 and c.logprobs.dtype == np.float32 and c.versions.dtype == np.int32
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        assert EOS not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == EOS)
        assert c.finish_reason == "stop" or len(c.token_ids) == SAMPLING.max_response_length
        assert (c.versions == engine.version).all()


def test_completions_of_one_context_differ(engine):
    (group,) = engine.generate(contexts(1, seed=2), 8, SAMPLING)
    assert len({tuple(c.token_ids) for c in group}) == 8


def test_draws_follow_the_distribution(engine, models):
    """4,000 first tokens against the softmax, each share within 5 standard errors."""
    context, temperature = contexts(1, seed=3)[0], 1.5
    (group,) = engine.generate([context], 4000, SamplingSettings(1, temperature=temperature, seed=9))
    shares = np.bincount([c.token_ids[0] for c in group], minlength=VOCAB) / 4000
    raw = np.array([row[-1] for row in oracle_logprobs(models[0], [[*context, token] for token in range(VOCAB)])])
    expected = np.exp(raw / temperature) / np.exp(raw / temperature).sum()
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected / 4000) + 1e-3).all()
    assert max(abs(c.logprobs[0] - raw[c.token_ids[0]]) for c in group) < 1e-5


def test_top_k_and_top_p_cut_the_tail(engine, models):
    context = contexts(1, seed=4)[0]
    raw = np.array([row[-1] for row in oracle_logprobs(models[0], [[*context, token] for token in range(VOCAB)])])
    order = np.argsort(-raw)
    nucleus = order[: int((np.exp(raw[order]).cumsum() < 0.6).sum()) + 1]
    (by_p,) = engine.generate([context], 500, SamplingSettings(1, top_p=0.6, seed=1))
    (by_k,) = engine.generate([context], 500, SamplingSettings(1, top_k=3, seed=1))
    assert {int(c.token_ids[0]) for c in by_p} == set(nucleus.tolist())
    assert {int(c.token_ids[0]) for c in by_k} == set(order[:3].tolist())
    assert max(abs(c.logprobs[0] - raw[c.token_ids[0]]) for c in by_p + by_k) < 1e-5


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def truncating_engine(request, models):
    engine = make_engine(request.param, models[0], distribution=LogprobDistribution(0.6, 0.8, 5))
    yield engine
    engine.close()


def test_logprobs_are_those_of_truncated_sampling_when_asked(truncating_engine, models):
    """Temperature, then top-k, then top-p on the renormalised rest, by hand; and no token has another support."""
    context = contexts(1, seed=5)[0]
    raw = np.array([row[-1] for row in oracle_logprobs(models[0], [[*context, token] for token in range(VOCAB)])])
    order = np.argsort(-raw)[:5]
    shares = np.exp(raw[order] / 0.6) / np.exp(raw[order] / 0.6).sum()
    nucleus = order[: int((shares.cumsum() < 0.8).sum()) + 1]
    kept = shares[: len(nucleus)] / shares[: len(nucleus)].sum()
    (group,) = truncating_engine.generate([context], 400, SamplingSettings(1, 0.6, 0.8, 5, seed=1))
    assert {int(c.token_ids[0]) for c in group} == set(nucleus.tolist())
    assert 1 < len(nucleus) < 5, "both cuts must show"
    expected = dict(zip(nucleus.tolist(), np.log(kept), strict=True))
    assert max(abs(c.logprobs[0] - expected[int(c.token_ids[0])]) for c in group) < 1e-5


@pytest.mark.parametrize(
    "sampling, asked",
    [
        (SamplingSettings(4, 0.6, 0.8), "temperature 0.6, top_p 0.8, top_k -1"),
        (SamplingSettings(4, 1.0, 0.8, 5), "temperature 1, top_p 0.8, top_k 5"),
        (SamplingSettings(4, 0.6, 0.8, 5, greedy=True), "greedy decoding"),
    ],
    ids=str,
)
def test_sampling_from_elsewhere_than_is_scored_is_refused(truncating_engine, sampling, asked):
    with pytest.raises(UserError, match=f"at temperature 0.6, top_p 0.8, top_k 5, but was asked for {asked}"):
        truncating_engine.generate([[5, 6, 7]], 1, sampling)


def test_greedy_takes_the_likeliest_token(engine, models):
    given = contexts(4, seed=5)
    for ids, (completion,) in zip(given, engine.generate(given, 1, GREEDY), strict=True):
        for t in (0, len(completion.token_ids) - 1):
            prefix = ids + completion.token_ids[:t].tolist()
            raw = [row[-1] for row in oracle_logprobs(models[0], [[*prefix, token] for token in range(VOCAB)])]
            assert int(np.argmax(raw)) == completion.token_ids[t]


def test_same_seed_same_tokens_whatever_came_before(engine):
    given = contexts(6, seed=6)
    first = engine.generate(given, 3, SAMPLING)
    engine.generate(contexts(5, seed=7), 2, SamplingSettings(12, seed=1))
    engine.score(given)
    torch.rand(3), random.random()
    again = engine.generate(given, 3, SAMPLING)
    assert ids_of(first) == ids_of(again)
    assert all(
        (a.logprobs == b.logprobs).all() for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)
    )
    other = engine.generate(given, 3, SamplingSettings(30, seed=6))
    assert ids_of(first) != ids_of(other)


def test_seeds_of_contexts_give_each_sample_its_own_stream(engine):
    given = contexts(3, seed=12)
    together = ids_of(engine.generate(given, 3, SamplingSettings(12, seeds=(100, 7, 100))))
    assert ids_of(engine.generate([given[1]], 3, SamplingSettings(12, seed=5, seeds=(7,)))) == together[1:2]
    assert ids_of(engine.generate([given[1]], 1, SamplingSettings(12, seeds=(9,))))[0][0] == together[1][2]  # 7 + 2
    assert together[1][0] != together[1][1]
    with pytest.raises(UserError, match="2 seeds were given for 3 contexts"):
        engine.generate(given, 3, SamplingSettings(12, seeds=(1, 2)))


def test_global_random_state_is_untouched(engine, models, next_version):
    before = random_states()
    engine.generate(contexts(2, seed=8), 2, SAMPLING)
    engine.score(contexts(2, seed=8))
    engine.update_weights(tensors_of(models[1]).items(), next_version())
    with pytest.raises(UserError):
        engine.generate([[VOCAB]], 1, SAMPLING)
    assert random_states() == before


def test_score_equals_transformers_at_every_length(engine, models):
    sequences = [
        *contexts(5, seed=9),
        contexts(1, seed=9, shortest=MAX_MODEL_LEN, longest=MAX_MODEL_LEN)[0],
        [7],
        [7, EOS],
    ]
    scores = engine.score(sequences)
    for ids, score, row in zip(sequences, scores, oracle_logprobs(models[0], sequences), strict=True):
        assert score.dtype == np.float32 and score.shape == (len(ids) - 1,)
        assert len(ids) == 1 or np.abs(score - row).max() < 1e-5


def test_every_refresh_is_sampled_and_scored_by_the_new_weights(engine, models, next_version):
    given = contexts(4, seed=10, shortest=40, longest=60)  # longer than a cache block
    for path in (models[1], models[2], models[3]):
        version = next_version()
        report = engine.update_weights(tensors_of(path).items(), version)
        groups = engine.generate(given, 2, SAMPLING)
        assert engine.version == report.version == version
        assert report.num_tensors == len(tensors_of(path))
        assert report.num_bytes == sum(t.numel() * 4 for t in tensors_of(path).values())
        assert gap(path, given, groups) < 1e-5
        assert (
            max(np.abs(a - b).max() for a, b in zip(engine.score(given), oracle_logprobs(path, given), strict=True))
            < 1e-5
        )
        assert all((c.versions == version).all() for group in groups for c in group)


def test_same_weights_pushed_twice_change_nothing(engine, models, next_version):
    given = contexts(6, seed=11)
    before = engine.generate(given, 1, GREEDY)
    digests = {engine.update_weights(tensors_of(models[0]).items(), next_version()).digest for _ in range(2)}
    assert ids_of(engine.generate(given, 1, GREEDY)) == ids_of(before)
    assert len(digests) == 1


def test_weights_in_another_precision_are_converted(engine, models, next_version):
    given = contexts(2, seed=12)
    exact = engine.score(given)
    engine.update_weights(((n, t.bfloat16()) for n, t in tensors_of(models[0]).items()), next_version())
    rounded = engine.score(given)
    assert 1e-4 < max(np.abs(a - b).max() for a, b in zip(exact, rounded, strict=True)) < 0.5


def bad_pushes():
    name, expert = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.experts.5.up_proj.weight"

    def poison(value):
        def change(tensors):
            tensors[expert][3, 4] = value
            return tensors.items()

        return change

    return {
        "NaN": (expert, poison(float("nan"))),
        "infinity": (expert, poison(float("-inf"))),
        "missing": (expert, lambda tensors: [(n, t) for n, t in tensors.items() if n != expert]),
        "extra": ("model.extra.weight", lambda tensors: [*tensors.items(), ("model.extra.weight", torch.ones(2))]),
        "twice": (name, lambda tensors: [*tensors.items(), (name, tensors[name])]),
        "shape": (name, lambda tensors: [(n, t[:-1] if n == name else t) for n, t in tensors.items()]),
    }


@pytest.mark.parametrize("fault", bad_pushes())
def test_bad_push_is_refused_by_name_and_the_old_weights_answer(engine, models, next_version, fault):
    name, change = bad_pushes()[fault]
    given, version = contexts(4, seed=13), engine.version
    before = engine.generate(given, 2, SAMPLING)
    with pytest.raises(RefreshError, match=name.replace(".", r"\.")):
        engine.update_weights(change(tensors_of(models[1])), next_version())
    assert engine.version == version
    assert ids_of(engine.generate(given, 2, SAMPLING)) == ids_of(before)
    engine.update_weights(tensors_of(models[1]).items(), next_version())
    assert gap(models[1], given, engine.generate(given, 2, SAMPLING)) < 1e-5


@pytest.mark.parametrize("step_back", [0, 1])
def test_older_or_equal_version_is_refused(engine, models, step_back):
    version = engine.version
    with pytest.raises(RefreshError, match=f"{version - step_back}"):
        engine.update_weights(tensors_of(models[1]).items(), version - step_back)
    assert engine.version == version


REFUSED = {
    "too long": ([[5] * (MAX_MODEL_LEN - 29)], 1, SAMPLING, f"sequence 0 .*{MAX_MODEL_LEN - 29} tokens"),
    "empty": ([[4], []], 1, SAMPLING, "sequence 1 "),
    "id too large": ([[4], [4, VOCAB]], 1, SAMPLING, f"token id {VOCAB}"),
    "negative id": ([[-3]], 1, SAMPLING, "token id -3"),
    "n": ([[4]], 0, SAMPLING, "n is 0"),
    "no length": ([[4]], 1, SamplingSettings(0), "max_response_length is 0"),
    "temperature": ([[4]], 1, SamplingSettings(4, temperature=0.0), "temperature is 0.0"),
    "top_p": ([[4]], 1, SamplingSettings(4, top_p=0.0), "top_p is 0.0"),
    "top_k": ([[4]], 1, SamplingSettings(4, top_k=0), "top_k is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_refused_in_one_sentence_and_the_engine_lives(engine, case):
    given, n, sampling, message = REFUSED[case]
    before = engine.generate([[5, 6, 7]], 2, SAMPLING)
    with pytest.raises(UserError, match=message) as refusal:
        engine.generate(given, n, sampling)
    assert "\n" not in str(refusal.value)
    assert ids_of(engine.generate([[5, 6, 7]], 2, SAMPLING)) == ids_of(before)


def test_longest_context_that_fits_is_taken(engine):
    ((completion,),) = engine.generate([[5] * (MAX_MODEL_LEN - 30)], 1, SAMPLING)
    assert len(completion.token_ids) <= 30


def test_too_long_sequence_is_not_scored(engine):
    with pytest.raises(UserError, match=f"{MAX_MODEL_LEN + 1} tokens"):
        engine.score([[5] * (MAX_MODEL_LEN + 1)])


def test_no_contexts_no_completions(engine):
    assert engine.generate([], 2, SAMPLING) == []
    assert engine.score([]) == []
