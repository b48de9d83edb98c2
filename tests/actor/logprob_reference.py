"""The plain way to the same numbers, for comparison: the whole logits, torch's own log_softmax, autograd."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def plain_logprob(hidden, weight, labels, vocab_size, temperature=1.0):
    """(log-probs [A], entropy [A]) from logits in the inputs' dtype; the softmax in float32, or float64 for float64."""
    logits = hidden @ weight[:vocab_size].t()
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = (logits.to(wide) / temperature).log_softmax(-1)
    return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def naive_support(logits, top_p, top_k):
    """[A, V] bool: what stays of finished float logits, by a plain sort of each row; ties with the last one all stay.

    None where a mass meets top_p to the last bits, so that rounding alone decides.
    """
    support = torch.zeros_like(logits, dtype=torch.bool)
    for row, stays in zip(logits.double(), support, strict=True):
        order = sorted(range(len(row)), key=lambda i, row=row: -row[i].item())
        if 0 < top_k < len(order):
            order = [i for i in order if row[i] >= row[order[top_k - 1]]]
        probabilities = row[order].softmax(0).tolist()
        kept, mass = 0, 0.0
        while kept < len(order) and (mass < top_p or top_p == 1):
            mass += probabilities[kept]
            kept += 1
            if abs(mass - top_p) < 1e-6 and top_p < 1:
                return None
        stays[[i for i in order if row[i] >= row[order[kept - 1]]]] = True
    return support


def truncated_logprob(hidden, weight, labels, vocab_size, temperature, support):
    """As plain_logprob, of the softmax over `support` [A, V] and the labels."""
    logits = hidden @ weight[:vocab_size].t()
    wide = torch.promote_types(logits.dtype, torch.float32)
    support = support.scatter(1, labels.unsqueeze(1), True)
    logprobs = (logits.to(wide) / temperature).masked_fill(~support, float("-inf")).log_softmax(-1)
    probabilities = logprobs.exp()
    return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1), -torch.xlogy(probabilities, probabilities).sum(-1)


def numbers(function, hidden, weight, upstream, dtype=None):
    """[log-probs, entropy, gradient of hidden, gradient of weight] of `function(hidden, weight)` in `dtype`."""
    hidden, weight = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (hidden, weight))
    logprobs, entropy = function(hidden, weight)
    logprobs.backward(upstream.to(logprobs.dtype))
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


def error(found, expected):
    """Largest difference, relative to the largest expected value or to 1 nat, whichever is more."""
    if not expected.numel():
        return 0.0
    return ((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def spread(found, expected):
    """Root mean square of the difference, in the unit of the values."""
    return (found.double() - expected).square().mean().sqrt().item()


def make_inputs(tokens, hidden_size, vocab_size, padding=0, dtype=torch.float32, seed=0, size=1.0):
    """hidden [A, h], weight [V + padding, h], labels [A], upstream gradients [A]; logits of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab_size + padding, hidden_size, generator=generator) * size / hidden_size**0.5).to(dtype)
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(tokens, generator=generator)


class Largest(TorchDispatchMode):
    """Remembers the most elements that any operation's new result had."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result
