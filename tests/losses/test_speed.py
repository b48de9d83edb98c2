"""Linear cost: 64 responses of 16,384 tokens in 50 ms of one core (processor time, so that neighbours do not count)."""

import time

import pytest
import torch

from megatron_rlvr.losses import token_coefficients
from megatron_rlvr.losses.proximal_kl import future_sum
from megatron_rlvr.losses.segments import Segments

RESPONSES, LENGTH, LIMIT = 64, 16_384, 0.050


def best_time(run, repeats: int = 8) -> float:
    """Seconds of this thread, the fastest of a few."""
    spent = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        spent.append(time.thread_time() - start)
    return min(spent)


@pytest.fixture(autouse=True)
def one_core():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("horizon", "tail_decay"), [("full", False), (32, False), (32, True), (4096, True)])
def test_future_cost(horizon, tail_decay):
    costs = 0.05 * torch.randn(RESPONSES * LENGTH)
    cu_seqlens = torch.arange(0, RESPONSES * LENGTH + 1, LENGTH)
    seconds = best_time(lambda: future_sum(costs, Segments(cu_seqlens, len(costs)), horizon, tail_decay))
    assert seconds < LIMIT, f"{1e3 * seconds:.0f} ms"


@pytest.mark.parametrize("name", ["respo", "grpo", "proximal_kl"])
def test_coefficients(name):
    logprobs = -torch.rand(RESPONSES * LENGTH)
    keywords = {
        "logprobs": logprobs,
        "behavior_logprobs": logprobs + 0.02 * torch.randn_like(logprobs),
        "reference_logprobs": logprobs + 0.02 * torch.randn_like(logprobs),
        "advantages": torch.randn(RESPONSES),
        "cu_seqlens": torch.arange(0, len(logprobs) + 1, LENGTH),
    }
    seconds = best_time(lambda: token_coefficients(name, **keywords))
    assert seconds < LIMIT, f"{1e3 * seconds:.0f} ms"
