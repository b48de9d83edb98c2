"""Saving and restoring: the same content, the same next draws, nothing half-written, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rlvr.replay import PrefixBuffer
from megatron_rlvr.types import UserError

SETTINGS: dict[str, Any] = {"window": 3, "stride": 2, "seed": 4}


def used() -> PrefixBuffer:
    """A buffer with a history: replaced, evicted and explicit entries, an odd place in the random stream."""
    buffer, generator = PrefixBuffer(**SETTINGS), np.random.default_rng(0)
    for step in range(6):
        for prompt in generator.choice(40, 12, replace=False):
            tokens = generator.integers(0, 1000, generator.integers(5, 60))
            buffer.insert(f"p{prompt}", tokens, 4, generator.integers(0, 9) / 8, step, expert=bool(prompt % 2))
        buffer.insert(f"agent{step}", range(30), 3, 0.25, step, positions=[0, 9], states=[{"at": step}, None])
        buffer.insert(f"steps{step}", range(30), 3, 0.25, step, positions=[0, 9], fractions=[0.0, 0.5])
        buffer.evict(step)
        buffer.draw(3)
    buffer.draw(1)  # 38 words: not a whole block of the generator
    return buffer


def sequence(buffer: PrefixBuffer, count: int = 1000) -> list[tuple[Any, ...]]:
    return [
        (p.prompt_id, p.token_ids.tolist(), p.position, p.length, p.score, p.step, p.state, p.expert)
        for p in buffer.draw(count)
    ]


def test_a_restored_buffer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    buffer, copy, other = used(), PrefixBuffer(**SETTINGS), PrefixBuffer(**SETTINGS)
    buffer.save(tmp_path / "replay.safetensors")
    state = json.loads(json.dumps({k: v for k, v in buffer.state_dict().items() if k != "arrays"}))
    copy.load_state_dict({**state, "arrays": buffer.state_dict()["arrays"]})
    other.load(tmp_path / "replay.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["replay.safetensors"]
    for each in (buffer, copy, other):  # the history goes on alike, too
        each.insert("new", range(50), 10, 0.5, 6)
        each.evict(6)
    assert len(buffer) == len(copy) == len(other) and buffer.statistics(6) == copy.statistics(6)
    expected = sequence(buffer)
    assert len({row[:1] for row in expected}) > 10
    assert sequence(copy) == expected and sequence(other) == expected
    assert sequence(buffer) != expected


def test_an_empty_buffer_is_restored(tmp_path: Path) -> None:
    PrefixBuffer(**SETTINGS).save(tmp_path / "empty")
    buffer = used()
    buffer.load(tmp_path / "empty")
    assert len(buffer) == 0 and buffer.draw(2) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, path = used(), tmp_path / "replay.safetensors"
    buffer.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    buffer.insert("new", range(50), 10, 0.5, 6)
    with pytest.raises(OSError, match="No space"):
        buffer.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"window": 4}, {"stride": 1}, {"sampling": "uniform"}, {"static": True}, {"seed": 5}]
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    used().save(tmp_path / "saved")
    with pytest.raises(UserError, match=rf"saved: the saved prefix buffer has replay {next(iter(change))}="):
        PrefixBuffer(**{**SETTINGS, **change}).load(tmp_path / "saved")


def _drop_token(state: dict[str, Any]) -> None:
    state["arrays"]["token_ids"] = state["arrays"]["token_ids"][:-1]


def _drop_rate(state: dict[str, Any]) -> None:
    state["arrays"]["success_rate"] = state["arrays"]["success_rate"][:-1]


def _nan_rate(state: dict[str, Any]) -> None:
    state["arrays"]["success_rate"][0] = np.nan


def _same_prompt(state: dict[str, Any]) -> None:
    state["prompt_ids"][0] = state["prompt_ids"][1]


def _no_words(state: dict[str, Any]) -> None:
    del state["random_words"]


def _negative_words(state: dict[str, Any]) -> None:
    state["random_words"] = -1


def _short_states(state: dict[str, Any]) -> None:
    next(iter(state["states"].values())).pop()


@pytest.mark.parametrize(
    "damage", [_drop_token, _drop_rate, _nan_rate, _same_prompt, _no_words, _negative_words, _short_states]
)
def test_a_state_that_does_not_hold_together_is_refused_whole(damage: Any) -> None:
    buffer, state = used(), used().state_dict()
    damage(state)
    with pytest.raises(UserError, match="does not hold together"):
        buffer.load_state_dict(state)
    assert sequence(buffer) == sequence(used())


def test_foreign_and_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x80\x04not a buffer")
    for path in (foreign, tmp_path / "missing"):
        with pytest.raises(UserError, match=f"^{path}: it "):
            PrefixBuffer(**SETTINGS).load(path)


def test_statistics_of_a_large_buffer_come_from_evenly_spread_prefixes() -> None:
    buffer = PrefixBuffer(None)
    for prompt in range(1000):
        buffer.insert(str(prompt), np.zeros(401, dtype=np.int32), 1, prompt / 1000, 0)
    seen, a = buffer.statistics(2), np.arange(400) / 400
    p = np.array([(1 - a) * k / 1000 + a for k in range(1000)])
    scores = np.sqrt(np.maximum(p * (1 - p), 0))
    assert seen["replay/size"] == 400_000 and seen["replay/age/mean"] == 2.0
    assert seen["replay/position/mean"] == pytest.approx(199.5, abs=1.0)  # every 4th, from the first: 198
    assert seen["replay/position_fraction/mean"] == pytest.approx(0.49875, rel=0.005)
    assert seen["replay/score/mean"] == pytest.approx(scores.mean(), rel=0.01)
    for name, at in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        assert seen[f"replay/score/{name}"] == pytest.approx(np.quantile(scores, at), rel=0.01)
    assert PrefixBuffer(None).statistics(0) == {"replay/size": 0.0, "replay/trajectories": 0.0}
