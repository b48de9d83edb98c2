"""What enters, leaves and is drawn from the buffer; frequencies by chi-square tests at fixed seeds."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rlvr.replay import ExpertTrajectory, Prefix, PrefixBuffer, prefix_score
from megatron_rlvr.replay.random_words import RandomWords

PROMPT = [7, 8, 9]


def add(buffer: PrefixBuffer, prompt: str, length: int, success_rate: float, step: int = 0, **more: Any) -> int:
    return buffer.insert(prompt, [*PROMPT, *range(100, 100 + length)], len(PROMPT), success_rate, step, **more)


def chi_square_p(observed: list[int], weights: list[float]) -> float:
    """p-value of counts against probabilities proportional to weights; no weight may be 0."""
    expected = np.array(weights) / sum(weights) * sum(observed)
    assert expected.min() >= 5.0
    statistic = float(((np.array(observed) - expected) ** 2 / expected).sum())
    half_freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def places(prefixes: Iterable[Prefix]) -> Counter[tuple[str, int]]:
    return Counter((prefix.prompt_id, prefix.position) for prefix in prefixes)


def filled(sampling: Any) -> tuple[PrefixBuffer, dict[tuple[str, int], float]]:
    """A buffer after replacement and eviction, and sigma-hat of every prefix that must be left."""
    buffer = PrefixBuffer(window=2, stride=2, sampling=sampling, seed=5)
    add(buffer, "old", 30, 0.5, step=0)
    add(buffer, "again", 40, 0.5, step=0)
    add(buffer, "a", 9, 0.25, step=1)
    add(buffer, "again", 6, 0.125, step=1)  # replaces the longer one
    add(buffer, "b", 20, 0.75, step=1)
    add(buffer, "given", 20, 0.25, step=1, positions=[1, 5, 6, 19])
    buffer.evict(2)
    left = {"a": (9, 0.25, range(0, 9, 2)), "again": (6, 0.125, range(0, 6, 2)), "b": (20, 0.75, range(0, 20, 2))}
    left["given"] = (20, 0.25, [1, 5, 6, 19])
    return buffer, {
        (name, position): prefix_score(position, length, rate)
        for name, (length, rate, positions) in left.items()
        for position in positions
    }


@pytest.mark.parametrize("sampling", ["score", "uniform"])
@pytest.mark.parametrize("at_once", [1, 64])
def test_frequencies_are_proportional_to_the_weights(sampling: str, at_once: int) -> None:
    buffer, scores = filled(sampling)
    assert len(buffer) == len(scores) == 22
    drawn = places(prefix for _ in range(20_000 // at_once) for prefix in buffer.draw(at_once))
    assert set(drawn) == set(scores)
    weights = [1.0 if sampling == "uniform" else score for score in scores.values()]
    wrong = [score if sampling == "uniform" else 1.0 for score in scores.values()]
    observed = [drawn[place] for place in scores]
    assert chi_square_p(observed, weights) > 0.01
    assert chi_square_p(observed, wrong) < 1e-6  # the test would see the other mode


def test_draws_are_independent() -> None:
    """Successive pairs of draws follow the product distribution: nothing is held back until a pass is over."""
    buffer = PrefixBuffer(None, seed=1)
    add(buffer, "a", 3, 0.5)
    add(buffer, "b", 2, 0.25)
    scores = {("a", k): prefix_score(k, 3, 0.5) for k in range(3)} | {
        ("b", k): prefix_score(k, 2, 0.25) for k in (0, 1)
    }
    drawn = [(prefix.prompt_id, prefix.position) for prefix in buffer.draw(20_000)]
    pairs = Counter(zip(drawn[::2], drawn[1::2], strict=True))
    weights = {(x, y): scores[x] * scores[y] for x in scores for y in scores}
    assert chi_square_p([pairs[pair] for pair in weights], list(weights.values())) > 0.01


def test_a_prefix_carries_what_a_rollout_needs() -> None:
    buffer = PrefixBuffer(None, seed=3)
    states = [{"board": "#@.", "moves": [1, 2]}, {"board": "#.@", "moves": []}]
    add(buffer, "p", 10, 0.25, step=4, positions=[4, 8], states=states, fractions=[0.0, 0.5])
    drawn = {prefix.position: prefix for prefix in buffer.draw(50)}
    assert set(drawn) == {4, 8}
    for position, state, score in ((4, states[0], prefix_score(0, 2, 0.25)), (8, states[1], prefix_score(1, 2, 0.25))):
        prefix = drawn[position]
        assert prefix.token_ids.tolist() == [*PROMPT, *range(100, 100 + position)]
        assert prefix.token_ids.dtype == np.int32 and not prefix.token_ids.flags.writeable
        assert (prefix.prompt_id, prefix.prompt_length, prefix.length, prefix.step) == ("p", 3, 10, 4)
        assert prefix.state == state and prefix.score == score and not prefix.expert


def test_stored_content_does_not_follow_the_callers_objects() -> None:
    buffer, tokens, state = PrefixBuffer(None), np.arange(6), {"moves": [1]}
    buffer.insert("p", tokens, 3, 0.5, 0, positions=[1], states=[state])
    tokens[:], state["moves"] = -1, []
    buffer.draw(1)[0].state["moves"].append(2)  # type: ignore[index]
    assert buffer.draw(1)[0].token_ids.tolist() == [0, 1, 2, 3]
    assert buffer.draw(1)[0].state == {"moves": [1]}


def test_the_bare_prompt_is_a_prefix_and_the_whole_response_is_none() -> None:
    buffer = PrefixBuffer(None)
    assert add(buffer, "one token", 1, 0.5) == 1
    assert buffer.draw(1)[0].token_ids.tolist() == PROMPT
    assert add(buffer, "p", 7, 0.5) == 7
    assert add(PrefixBuffer(None, stride=3), "p", 7, 0.5) == 3  # 0, 3, 6
    assert add(PrefixBuffer(None, stride=3), "p", 6, 0.5) == 2  # 0, 3; 6 is the end
    assert add(PrefixBuffer(None, stride=50), "p", 6, 0.5) == 1


def test_settled_prefixes_are_never_drawn_by_score() -> None:
    buffer = PrefixBuffer(None)
    assert buffer.draw(4) == []
    add(buffer, "solved", 50, 1.0)
    add(buffer, "failed", 50, 0.0, reward=0.0)
    assert len(buffer) == 100 and buffer.draw(4) == []
    add(buffer, "hard", 2, 0.0)  # 0 at the bare prompt, 1/2 half-way
    assert set(places(buffer.draw(200))) == {("hard", 1)}
    assert buffer.draw(0) == []


@pytest.mark.parametrize(("point", "position"), [(0.0, 1), (1.0 - 2.0**-53, 2)])  # the first is refused once
def test_the_ends_of_the_random_range_fall_on_weighted_prefixes(
    monkeypatch: pytest.MonkeyPatch, point: float, position: int
) -> None:
    """Both ends of [0, 1) beside prefixes of weight 0: the bare prompt of p0 = 0, and a solved prompt after it."""
    buffer = PrefixBuffer(None)
    add(buffer, "solved", 3, 1.0)
    add(buffer, "hard", 3, 0.0)
    add(buffer, "solved too", 3, 1.0)
    points = iter([point, point, point, 0.4, 0.0])
    monkeypatch.setattr(RandomWords, "uniform", lambda self, count: [next(points) for _ in range(count)])
    assert set(places(buffer.draw(1))) == {("hard", position)}


def test_window_5_keeps_the_newest_5_updates() -> None:
    buffer = PrefixBuffer(window=5)
    for step in range(10):
        add(buffer, str(step), 4, 0.5, step)
        assert buffer.evict(step) == (4 if step >= 5 else 0)
    assert {prefix.step for prefix in buffer.draw(400)} == {5, 6, 7, 8, 9}
    assert buffer.evict(100) == 20 and len(buffer) == 0 and buffer.draw(1) == []


def test_restarted_ages_count_from_the_step_given() -> None:
    buffer, twin = (PrefixBuffer(window=5, seed=2) for _ in range(2))
    for each in (buffer, twin):
        for step in (996, 1000):
            add(each, str(step), 4, 0.5, step)
    buffer.restart_ages()
    assert places(buffer.draw(50)) == places(twin.draw(50))
    assert buffer.statistics(3)["replay/age/max"] == buffer.statistics(3)["replay/age/mean"] == 3
    assert buffer.evict(4) == 0 and buffer.evict(5) == 8


def test_without_window_nothing_ages_out() -> None:
    buffer = PrefixBuffer(window=None)
    add(buffer, "p", 4, 0.5, 0)
    assert buffer.evict(10**9) == 0 and len(buffer) == 4


def test_experts_seed_and_are_replaced() -> None:
    buffer = PrefixBuffer(window=2)
    experts = [ExpertTrajectory(name, np.array([*PROMPT, 1, 2, 3, 4], dtype=np.int32), 3) for name in ("a", "b")]
    assert buffer.seed(experts) == 8
    drawn = buffer.draw(400)
    assert set(places(drawn)) == {(name, k) for name in ("a", "b") for k in (1, 2, 3)}  # p0 = 0: no bare prompt
    assert all(prefix.expert and prefix.score == prefix_score(prefix.position, 4, 0.0) for prefix in drawn)
    add(buffer, "a", 5, 0.5, step=1)
    assert buffer.num_trajectories == 2 and buffer.statistics(1)["replay/expert_share"] == 0.5
    buffer.evict(2)
    assert {(prefix.prompt_id, prefix.expert) for prefix in buffer.draw(100)} == {("a", False)}


def test_a_static_buffer_keeps_its_experts() -> None:
    buffer = PrefixBuffer(window=1, static=True, sampling="uniform")
    buffer.seed([ExpertTrajectory("a", np.array([1, 2, 3], dtype=np.int32), 1)])
    assert add(buffer, "a", 9, 0.5, step=1) == add(buffer, "b", 9, 0.5, step=1) == buffer.evict(50) == 0
    assert set(places(buffer.draw(50))) == {("a", 0), ("a", 1)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"success_rate": math.nan}, "success_rate"),
        ({"success_rate": 1.5}, "success_rate"),
        ({"reward": -1.0}, "reward"),
        ({"prompt_length": 6}, "no response"),
        ({"prompt_length": -1}, "no response"),
        ({"token_ids": [1.0, 2.0]}, "token_ids"),
        ({"token_ids": [[1, 2], [3, 4]]}, "token_ids"),
        ({"token_ids": [0, 1, 2, 3, 2**31]}, "token_ids"),
        ({"positions": [3]}, "positions"),
        ({"positions": [2, 1]}, "positions"),
        ({"positions": [1, 1]}, "positions"),
        ({"positions": [-1, 1]}, "positions"),
        ({"positions": []}, "positions"),
        ({"states": [1]}, "states"),
        ({"positions": [0, 1], "states": [1]}, "states"),
        ({"positions": [0, 1], "fractions": [0.5]}, "fractions"),
        ({"positions": [0, 1], "fractions": [0.5, math.nan]}, "fractions"),
    ],
)
def test_faulty_trajectories_are_refused_and_leave_the_buffer_alone(change: dict[str, Any], named: str) -> None:
    buffer = PrefixBuffer(None)
    good: dict[str, Any] = {"token_ids": range(6), "prompt_length": 3, "success_rate": 0.5, "step": 0}
    buffer.insert("p", **good)
    before = repr(buffer.state_dict())
    with pytest.raises(ValueError, match=named):
        buffer.insert("p", **{**good, **change})
    with pytest.raises(TypeError):
        buffer.insert("p", **good, positions=[1], states=[object()])
    assert repr(buffer.state_dict()) == before


@pytest.mark.parametrize("settings", [{"window": 0}, {"stride": 0}, {"sampling": "rank"}, {"seed": -1}])
def test_faulty_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PrefixBuffer(**{"window": None, **settings})


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        PrefixBuffer(None).draw(-1)


@pytest.mark.parametrize(("prefixes", "length", "bound"), [(10_000_000, 8_192, 0.1), (320_000, 32, 16.0)])
def test_prefixes_fit_in_16_bytes_each_beyond_the_tokens(prefixes: int, length: int, bound: float) -> None:
    """Short responses too, where the trajectories' own bytes have few prefixes to be shared out over."""
    tokens = np.zeros(length + 64, dtype=np.int32)
    tracemalloc.start()
    try:
        buffer = PrefixBuffer(5)
        for k in range(prefixes // length + 1):
            buffer.insert(str(k), tokens, 64, 0.25, 0)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    stored = buffer.num_trajectories * tokens.nbytes
    assert len(buffer) >= prefixes
    assert 0.0 < (used - stored) / len(buffer) < bound
