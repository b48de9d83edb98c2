"""sigma-hat against the golden values and the formula as the paper writes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rlvr.replay import prefix_score

GOLDEN = Path(__file__).resolve().parents[2] / "../shared/golden/losses.json"
UNIT = st.floats(0.0, 1.0)


@pytest.mark.skipif(not GOLDEN.exists(), reason="no golden values beside this checkout")
def test_golden_values_one_by_one_and_as_arrays() -> None:
    rows = json.loads(GOLDEN.read_text())["vsr_scores"]
    assert len(rows) >= 8
    for row in rows:
        assert prefix_score(row["i"], row["T"], row["p0"], row["R"]) == pytest.approx(row["sigma_hat"], abs=1e-15)
    columns = ([row[name] for row in rows] for name in ("i", "T", "p0", "R"))
    np.testing.assert_allclose(prefix_score(*columns), [row["sigma_hat"] for row in rows], rtol=0, atol=1e-15)


@given(UNIT, st.integers(1, 10_000), UNIT, UNIT)
def test_it_is_the_standard_deviation_of_the_interpolated_success(
    along: float, length: int, success_rate: float, reward: float
) -> None:
    position = int(along * length)
    a = position / length
    p = (1 - a) * success_rate + a * reward
    score = prefix_score(position, length, success_rate, reward)
    assert score * score == pytest.approx(p * (1 - p), abs=1e-15)
    assert 0.0 <= score <= 0.5


@given(st.integers(1, 10_000), UNIT)
def test_settled_outcomes_score_exactly_zero(length: int, success_rate: float) -> None:
    assert prefix_score(length, length, success_rate) == 0.0
    assert not np.any(prefix_score(np.arange(length + 1), length, 1.0, 1.0))
    assert not np.any(prefix_score(np.arange(length + 1), length, 0.0, 0.0))
    assert prefix_score(0, length, success_rate) == math.sqrt(success_rate * (1 - success_rate))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((1, 4, math.nan), "success_rate"),
        ((1, 4, 1.01), "success_rate"),
        ((1, 4, [0.5, -0.1]), "success_rate"),
        ((1, 4, 0.5, -1.0), "reward"),
        ((5, 4, 0.5), "position"),
        ((-1, 4, 0.5), "position"),
        ((0, 0, 0.5), "position"),
        ((math.nan, 4, 0.5), "position"),
    ],
)
def test_values_out_of_range_are_refused(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must lie in"):
        prefix_score(*arguments)
