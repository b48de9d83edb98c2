"""The losses again, written as plain Python loops over floats straight from the papers' formulas; slow on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass
class Batch:
    """Random packed responses as float64 tensors, with the keywords of `token_coefficients`."""

    logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor

    def keywords(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in vars(self).items()}

    def sequences(self) -> list[tuple[list[float], list[float], list[float], float]]:
        """(logprobs, behaviour, reference, advantage) of each response."""
        bounds = self.cu_seqlens.tolist()
        found = []
        for s, (start, end) in enumerate(pairwise(bounds)):
            rows = (self.logprobs, self.behavior_logprobs, self.reference_logprobs)
            found.append((*(row[start:end].tolist() for row in rows), float(self.advantages[s])))
        return found

    def select(self, order: list[int]) -> Batch:
        """The same responses, some of them, in another order."""
        bounds = self.cu_seqlens.tolist()
        index = [i for s in order for i in range(bounds[s], bounds[s + 1])]
        lengths = torch.tensor([0] + [bounds[s + 1] - bounds[s] for s in order])
        rows = (self.logprobs, self.behavior_logprobs, self.reference_logprobs)
        return Batch(*(row[index] for row in rows), self.advantages[order], lengths.cumsum(0))


def random_batch(seed: int, lengths: list[int], drift: float = 0.3) -> Batch:
    """Responses of the given lengths; log ratios of a token have standard deviation `drift` nats."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def noise(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    logprobs = -noise(total).abs()
    return Batch(
        logprobs,
        logprobs + drift * noise(total),
        logprobs + drift * noise(total),
        noise(len(lengths)),
        torch.tensor([0, *lengths]).cumsum(0),
    )


def respo_kernel(w: float, alpha: float, beta: float, lam: float) -> float:
    """ReSPO Eq. 12; the limit W^b at alpha = 1."""
    base = w**beta if alpha == 1 else ((1 - beta) + beta * w ** (alpha - 1)) ** (1 / (alpha - 1))
    return base * math.exp(lam * (1 - base))


def respo(
    logp, behav, ref, adv, alpha_pos=2.0, beta_pos=0.5, lambda_pos=2.0, alpha_neg=1.0, beta_neg=0.5, lambda_neg=2.0
):
    w = math.exp(min(max(sum(logp) - sum(behav), -20.0), 20.0))
    settings = (alpha_pos, beta_pos, lambda_pos) if adv >= 0 else (alpha_neg, beta_neg, lambda_neg)
    return [respo_kernel(w, *settings) * adv for _ in logp]


def vespo(logp, behav, ref, adv):
    w = math.exp(min(max(sum(logp) - sum(behav), -20.0), 20.0))
    power, tilt = (2.0, 3.0) if adv >= 0 else (3.0, 2.0)
    return [w**power * math.exp(tilt * (1 - w)) * adv for _ in logp]


def grpo(logp, behav, ref, adv, clip_low=0.2, clip_high=0.2):
    found = []
    for p, b, r in zip(logp, behav, ref, strict=True):
        rho = math.exp(p - r)
        outside = rho > 1 + clip_high if adv >= 0 else rho < 1 - clip_low
        found.append(0.0 if outside else math.exp(r - b) * rho * adv)
    return found


def gspo(logp, behav, ref, adv, clip_low=3e-4, clip_high=4e-4):
    s = math.exp(sum(p - b for p, b in zip(logp, behav, strict=True)) / max(len(logp), 1))
    outside = s > 1 + clip_high if adv >= 0 else s < 1 - clip_low
    return [0.0 if outside else s * adv for _ in logp]


def cispo(logp, behav, ref, adv, weight_low=0.0, weight_high=5.0):
    return [min(max(math.exp(p - b), weight_low), weight_high) * adv for p, b in zip(logp, behav, strict=True)]


def pg(logp, behav, ref, adv):
    return [math.exp(p - b) * adv for p, b in zip(logp, behav, strict=True)]


def sft(logp, behav, ref, adv):
    return [1.0 for _ in logp]


def proximal_kl(logp, behav, ref, adv, beta=0.3, horizon="full", cost_clip=0.05, tail_decay=False, weighting="token"):
    bound = math.inf if cost_clip is None else cost_clip
    costs = [min(max(p - r, -bound), bound) for p, r in zip(logp, ref, strict=True)]
    last = len(costs) - 1
    mean = sum(p - b for p, b in zip(logp, behav, strict=True)) / max(len(logp), 1)
    found = []
    for i, (p, b) in enumerate(zip(logp, behav, strict=True)):
        end = last if horizon == "full" else i + horizon - 1
        credit = sum(cost for j, cost in enumerate(costs) if i <= j <= end)
        if tail_decay:
            credit += sum(cost * (last - j) / (last - end) for j, cost in enumerate(costs) if j > end)
        weight = {"token": math.exp(p - b), "sequence": math.exp(mean), "none": 1.0}[weighting]
        found.append(weight * (adv - beta * credit))
    return found


def coefficients(name: str, batch: Batch, **settings) -> torch.Tensor:
    """[T] float64, sequence by sequence."""
    loops = {f.__name__: f for f in (respo, vespo, grpo, gspo, cispo, pg, sft, proximal_kl)}
    found = [c for sequence in batch.sequences() for c in loops[name](*sequence, **settings)]
    return torch.tensor(found, dtype=torch.float64)
