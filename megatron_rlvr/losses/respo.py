"""ReSPO: a two-branch kernel of the whole response's weight W (ReSPO Eq. 12, Sec. 3.3, App. A; SPEC 2).

phi0 = [(1-b) + b W^(a-1)]^(1/(a-1)),  phi = phi0 exp(lam (1 - phi0)),  c = phi A, with one (a, b, lam) per sign of A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlvr.losses.core import by_sign, sequence_loss
from megatron_rlvr.losses.hyperparameters import Hyperparameters, log_weight_clamp, number

ALPHA_IS_ONE = 1e-12  # nearer than this the limit W^b is exact to 1e-10


@dataclass(frozen=True)
class RespoHyperparameters(Hyperparameters):
    """Order alpha, mixing beta and tilt lambda of either branch; the bound on |log W|."""

    alpha_pos: float = number(2.0, above=0.0)
    beta_pos: float = number(0.5, low=0.0, high=1.0)
    lambda_pos: float = number(2.0, low=0.0)
    alpha_neg: float = number(1.0, above=0.0)
    beta_neg: float = number(0.5, low=0.0, high=1.0)
    lambda_neg: float = number(2.0, low=0.0)
    log_w_clamp: float = log_weight_clamp()

    def warnings(self) -> list[str]:
        return [*self._positive_tail(), *self._negative_tail()]

    def _positive_tail(self) -> list[str]:
        """phi(0) > 0 and phi'(0) = 0; the latter needs lam = 1/phi0(0), which is 1/(1-b) at a = 2 (Eq. 25)."""
        if self.alpha_pos <= 1 or self.beta_pos == 1:
            return [
                f"alpha_pos={self.alpha_pos:g} with beta_pos={self.beta_pos:g} makes phi(0) = 0, so positive responses "
                "that became unlikely are starved of gradient: choose alpha_pos above 1 and beta_pos below 1."
            ]
        if self.alpha_pos <= 1.5:
            return [
                f"alpha_pos={self.alpha_pos:g} breaks the positive tail condition for every lambda_pos: phi'(W) goes "
                "as W^(2 alpha_pos - 3) at best, which does not vanish at W = 0; choose alpha_pos above 1.5."
            ]
        wanted = (1 - self.beta_pos) ** (-1 / (self.alpha_pos - 1))
        # a > 2: phi'(0) = 0 for any lam, and phi falls everywhere as soon as lam >= 1/phi0(0)
        fine = self.lambda_pos >= wanted if self.alpha_pos > 2 else math.isclose(self.lambda_pos, wanted, rel_tol=1e-6)
        if fine:
            return []
        return [
            f"lambda_pos={self.lambda_pos:g} breaks the positive tail condition (phi'(0) = 0, ReSPO Eq. 25): "
            f"with alpha_pos={self.alpha_pos:g} and beta_pos={self.beta_pos:g} it asks for lambda_pos={wanted:g}."
        ]

    def _negative_tail(self) -> list[str]:
        """phi(0) = 0, and slope -1/2 at W = 1, as the published positive branch has: b (1 - lam) = -1/2."""
        found = []
        if self.alpha_neg > 1 and self.beta_neg < 1:
            found.append(
                f"alpha_neg={self.alpha_neg:g} keeps phi(0) above 0, so negative responses that are already suppressed "
                "keep pushing: choose alpha_neg at most 1."
            )
        if not math.isclose(self.beta_neg * (1 - self.lambda_neg), -0.5, rel_tol=1e-6):
            remedy = f"lambda_neg={1 + 0.5 / self.beta_neg:g}" if self.beta_neg > 0 else "beta_neg above 0"
            found.append(
                f"lambda_neg={self.lambda_neg:g} breaks the slope matching of the negative branch (b (1 - lam) = -1/2 "
                f"at W = 1): with beta_neg={self.beta_neg:g} it asks for {remedy}."
            )
        return found


def log_phi0(log_w: Tensor, alpha: float, beta: float) -> Tensor:
    """[S] log of the power mean [(1-b) + b W^(a-1)]^(1/(a-1)); b log W in the limit a -> 1."""
    order = alpha - 1
    if abs(order) < ALPHA_IS_ONE:
        return beta * log_w
    x = order * log_w
    near = torch.log1p(beta * torch.expm1(x.clamp(-1, 1)))  # exact as a -> 1
    log_rest = math.log1p(-beta) if beta < 1 else -math.inf
    log_beta = math.log(beta) if beta > 0 else -math.inf
    far = torch.logaddexp(x + log_beta, torch.full_like(x, log_rest))  # cannot overflow
    return torch.where(x.abs() <= 1, near, far) / order


def kernel_branch(log_w: Tensor, alpha: float, beta: float, lam: float) -> Tensor:
    """[S] phi of one branch for a log W that is already clamped."""
    log_base = log_phi0(log_w, alpha, beta)
    return torch.exp(log_base - lam * torch.expm1(log_base))


def kernel(log_w: Tensor, lengths: Tensor, advantages: Tensor, hp: RespoHyperparameters) -> tuple[Tensor, Tensor]:
    """[S] phi(W) by the sign of A, and where the clamp cut log W; `log_w` is the complete sum over the response."""
    clamped = log_w.abs() > hp.log_w_clamp
    log_w = log_w.clamp(-hp.log_w_clamp, hp.log_w_clamp)
    positive = kernel_branch(log_w, hp.alpha_pos, hp.beta_pos, hp.lambda_pos)
    negative = kernel_branch(log_w, hp.alpha_neg, hp.beta_neg, hp.lambda_neg)
    return by_sign(advantages, positive, negative), clamped


LOSS = sequence_loss("respo", RespoHyperparameters, kernel)
