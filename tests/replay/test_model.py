"""Random histories of insertion, replacement, eviction, saving and drawing against a plain list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from megatron_rlvr.replay import PrefixBuffer, prefix_score


@dataclass
class Entry:
    prompt: str
    tokens: list[int]
    prompt_length: int
    rate: float
    step: int
    positions: list[int]
    expert: bool

    def score(self, position: int) -> float:
        return prefix_score(position, len(self.tokens) - self.prompt_length, self.rate)


class AgainstAList(RuleBasedStateMachine):
    """The model keeps (prompt, ...) entries in a list and rescans it for everything."""

    @initialize(
        window=st.sampled_from([None, 1, 3]),
        stride=st.integers(1, 3),
        sampling=st.sampled_from(["score", "uniform"]),
        static=st.booleans(),
    )
    def start(self, window: int | None, stride: int, sampling: str, static: bool) -> None:
        self.options = {"window": window, "stride": stride, "sampling": sampling, "static": static, "seed": 11}
        self.buffer = PrefixBuffer(**self.options)  # type: ignore[arg-type]
        self.entries: list[Entry] = []
        self.step = 0

    @rule(
        prompt=st.sampled_from("abcdefgh"),
        prompt_length=st.integers(0, 2),
        response=st.lists(st.integers(0, 99), min_size=1, max_size=9),
        rate=st.sampled_from([0.0, 0.125, 0.5, 0.9, 1.0]),
        expert=st.booleans(),
        chosen=st.none() | st.sets(st.integers(0, 8), min_size=1),
    )
    def insert(
        self, prompt: str, prompt_length: int, response: list[int], rate: float, expert: bool, chosen: set[int] | None
    ) -> None:
        tokens, given = [1] * prompt_length + response, None
        positions = list(range(0, len(response), self.options["stride"]))
        if chosen and min(chosen) < len(response):
            given = positions = sorted(position for position in chosen if position < len(response))
        added = self.buffer.insert(prompt, tokens, prompt_length, rate, self.step, positions=given, expert=expert)
        if self.options["static"] and not expert:
            assert added == 0
            return
        assert added == len(positions)
        self.entries = [entry for entry in self.entries if entry.prompt != prompt]
        self.entries.append(Entry(prompt, tokens, prompt_length, rate, self.step, positions, expert))

    @rule(steps=st.integers(0, 2))
    def evict(self, steps: int) -> None:
        before = sum(len(entry.positions) for entry in self.entries)
        if self.options["window"] is not None and not self.options["static"]:
            self.entries = [entry for entry in self.entries if self.step - entry.step < self.options["window"]]
        after = sum(len(entry.positions) for entry in self.entries)
        assert self.buffer.evict(self.step) == before - after
        self.step += steps

    @rule()
    def save_and_restore(self) -> None:
        copy = PrefixBuffer(**self.options)  # type: ignore[arg-type]
        copy.load_state_dict(self.buffer.state_dict())
        self.buffer = copy

    @rule(count=st.integers(0, 12))
    def draw(self, count: int) -> None:
        weighted = [
            (entry, position)
            for entry in self.entries
            for position in entry.positions
            if self.options["sampling"] == "uniform" or entry.score(position) > 0.0
        ]
        support = {(entry.prompt, position): entry for entry, position in weighted}
        drawn = self.buffer.draw(count)
        assert len(drawn) == (count if support else 0)
        for prefix in drawn:
            entry = support[prefix.prompt_id, prefix.position]
            assert prefix.token_ids.tolist() == entry.tokens[: entry.prompt_length + prefix.position]
            assert (prefix.step, prefix.expert) == (entry.step, entry.expert)
            assert prefix.length == len(entry.tokens) - entry.prompt_length
            assert prefix.score == pytest.approx(entry.score(prefix.position), abs=1e-15)

    @invariant()
    def same_size(self) -> None:
        if hasattr(self, "entries"):
            assert len(self.buffer) == sum(len(entry.positions) for entry in self.entries)
            assert self.buffer.num_trajectories == len(self.entries)

    @invariant()
    def same_statistics(self) -> None:
        if not getattr(self, "entries", []):
            return
        seen = self.buffer.statistics(self.step)
        pairs = [(entry, position) for entry in self.entries for position in entry.positions]
        scores = [entry.score(position) for entry, position in pairs]
        assert seen["replay/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-12)
        assert seen["replay/position/mean"] == pytest.approx(sum(position for _, position in pairs) / len(pairs))
        assert seen["replay/age/max"] == max(self.step - entry.step for entry in self.entries)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
