"""One of two ranks: linear_logprob and LogprobHead on half a vocabulary each, against the whole one in float64.

python -m tests.actor.logprob_worker
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from megatron_rlvr.actor import parallel
from megatron_rlvr.actor.fused_logprob import linear_logprob
from megatron_rlvr.actor.head import LogprobHead
from megatron_rlvr.actor.nucleus import nucleus_floor
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.types import LogprobDistribution, PackedBatch
from tests.actor.logprob_reference import (
    error,
    make_inputs,
    naive_support,
    numbers,
    plain_logprob,
    spread,
    truncated_logprob,
)

# tokens, real vocabulary, padding (the sum splits into two), temperature; in the third, rank 1 has padding only
CASES = [(13, 50, 0, 1.0), (13, 47, 3, 0.6), (7, 3, 5, 1.0), (0, 50, 0, 1.0)]


# vocabulary, padding, distribution; in the third, rank 1 has padding only; in the fourth, the cut is looked for twice
CUTS = [
    (50, 0, LogprobDistribution(0.6, 0.8, 5)),
    (47, 3, LogprobDistribution(0.6, 0.9)),
    (3, 5, LogprobDistribution(1.0, 1.0, 2)),
    (600, 0, LogprobDistribution(1.5, 0.94)),
]


def halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.chunk(2)[dist.get_rank()]


def split(labels, vocab_size, temperature=1.0):
    return lambda hidden, weight: linear_logprob(
        hidden,
        weight,
        labels,
        group=dist.group.WORLD,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=5,
        chunk_vocab=8,
    )


def split_numbers(labels, vocab_size, temperature, hidden, weight, upstream):
    """What both ranks know together: the shares of hidden's gradient added up, this rank's rows of weight's."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as collective:
        found = numbers(split(labels, vocab_size, temperature), hidden, halves(weight), upstream)
    assert collective.call_count == 2, "the number of collectives must not depend on the tokens"
    share = found[2].double()
    dist.all_reduce(share)
    return [found[0], found[1], share, found[3]]


def check_float32() -> None:
    for tokens, vocab_size, padding, temperature in CASES:
        hidden, weight, labels, upstream = make_inputs(tokens, 6, vocab_size, padding, size=3.0)
        found = split_numbers(labels, vocab_size, temperature, hidden, weight, upstream)
        plain = lambda h, w, y=labels, v=vocab_size, t=temperature: plain_logprob(h, w, y, v, t)  # noqa: E731
        expected = numbers(plain, hidden, weight, upstream, torch.float64)
        expected[3] = halves(expected[3])
        assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5, (tokens, vocab_size)


def check_truncated() -> None:
    """The support of a plain sort over the whole vocabulary; the softmax over it, its gradients and its entropy."""
    for vocab_size, padding, distribution in CUTS:
        hidden, weight, labels, upstream = make_inputs(13, 6, vocab_size, padding, size=3.0)
        temperature, vocabulary = distribution.temperature, {"group": dist.group.WORLD, "vocab_size": vocab_size}
        floor = nucleus_floor(hidden, halves(weight), distribution, **vocabulary, chunk_tokens=4, chunk_vocab=8)
        logits = hidden @ weight[:vocab_size].t() / temperature
        support = naive_support(logits, distribution.top_p, distribution.top_k)
        assert torch.equal(logits >= floor.unsqueeze(1), support), distribution
        assert not support.gather(1, labels.unsqueeze(1)).all(), "no label outside its nucleus"
        share = dict(vocabulary, temperature=temperature, floor=floor, chunk_tokens=5, chunk_vocab=8)
        found = numbers(lambda h, w, y=labels, k=share: linear_logprob(h, w, y, **k), hidden, halves(weight), upstream)
        dist.all_reduce(found[2])
        cut = (labels, vocab_size, temperature, support)
        expected = numbers(lambda h, w, c=cut: truncated_logprob(h, w, *c), hidden, weight, upstream, torch.float64)
        expected[3] = halves(expected[3])
        assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-5, distribution


def check_bf16() -> None:
    """Each value no further from float64 than whole bf16 logits are."""
    hidden, weight, labels, upstream = make_inputs(200, 64, 2000, 0, torch.bfloat16, size=4.0)
    found = split_numbers(labels, 2000, 1.0, hidden, weight, upstream)
    plain = lambda h, w: plain_logprob(h, w, labels, 2000)  # noqa: E731
    usual = numbers(plain, hidden, weight, upstream)
    exact = numbers(plain, hidden, weight, upstream, torch.float64)
    for ours, theirs, truth in zip(found[:3], usual[:3], exact[:3], strict=True):
        assert spread(ours, truth) <= spread(theirs, truth)
    assert spread(found[3], halves(exact[3])) <= spread(halves(usual[3]), halves(exact[3]))


def build_head(weight: torch.Tensor, vocab_size: int, sequence_parallel: bool) -> LogprobHead:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    rows, width = weight.shape
    layer = ColumnParallelLinear(width, rows, config=config, init_method=lambda x: x, bias=False, gather_output=False)
    layer.weight.data.copy_(halves(weight))
    LogprobHead.take_over(layer, vocab_size)
    return layer


def check_head(sequence_parallel: bool, distribution: LogprobDistribution) -> None:
    """Selected positions only, the gradient of hidden whole (or this rank's part of the sequence) on every rank."""
    sequence, rows, vocab_size = 8, 2, 21
    hidden, weight, labels, upstream = make_inputs(sequence * rows, 6, vocab_size, 1, size=3.0)
    index = torch.tensor([0, 3, 7, 8, 14])  # row-major over [rows, sequence]
    labels, upstream = labels[index], upstream[index]
    support = naive_support((hidden @ weight.t())[index, :vocab_size] / 0.7, distribution.top_p, distribution.top_k)
    plain = lambda h, w: truncated_logprob(h[index], w, labels, vocab_size, 0.7, support)  # noqa: E731
    expected = numbers(plain, hidden, weight, upstream, torch.float64)
    head = build_head(weight, vocab_size, sequence_parallel)
    head.distribution = distribution
    none = torch.zeros(0)
    head.batch = PackedBatch(none, none, none, None, sequence, index, labels, none, none, none, none)
    whole = hidden.view(rows, sequence, -1).transpose(0, 1)
    mine = (halves(whole) if sequence_parallel else whole).clone().requires_grad_()
    answer, _ = head(mine)
    answer[:, 0, 0].backward(upstream)
    grad = expected[2].view(rows, sequence, -1).transpose(0, 1)
    expected = [expected[0], expected[1], halves(grad) if sequence_parallel else grad, halves(expected[3])]
    found = [answer[:, 0, 0].detach(), answer[:, 0, 1].detach(), mine.grad, head.weight.grad]
    worst = [error(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(worst) < 1e-5, worst


def main() -> None:
    parallel.initialize(ActorConfig(tensor_parallel=2), seed=0)
    check_float32()
    check_bf16()
    check_truncated()
    for distribution in (LogprobDistribution(0.7), LogprobDistribution(0.7, 0.8, 6)):
        check_head(sequence_parallel=False, distribution=distribution)
        check_head(sequence_parallel=True, distribution=distribution)
    print("all numbers equal", flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
