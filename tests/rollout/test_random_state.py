from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_rlvr.rollout.random_state import isolated_random_state


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_inside_is_seeded_and_outside_goes_on_even_after_an_error():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    plain = [draws(), draws()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first = draws()
    with isolated_random_state(7):
        inside = draws()
    with pytest.raises(KeyError), isolated_random_state(7):
        assert draws() == inside
        raise KeyError
    assert [first, draws()] == plain
    with isolated_random_state(2**40 + 7):
        assert draws() != inside
