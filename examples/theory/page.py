"""The papers' exact statements on problems small enough to enumerate: `python examples/theory/page.py [FOLDER]`.

Writes four plots and `page.md` (default folder runs/theory) in about ten seconds on one core.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import gibbs_tree
import shared_head
import torch

from megatron_rlvr.losses import find_loss, hyperparameters_for

BETA = 0.5


def main(folder: Path, updates: int = 1000) -> None:
    """All plots and the page; `updates` of the flow to the proximal optimum."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [kernels(folder), stationarity(folder, updates), interference(folder), odds(folder)]
    (folder / "page.md").write_text("# What the losses do, exactly\n\n" + "\n".join(sections))
    print(f"wrote {folder / 'page.md'}")


def kernels(folder: Path) -> str:
    """phi(W) of ReSPO and VESPO for either sign of the advantage."""
    log_w = torch.linspace(-8, 4, 400, dtype=torch.float64)
    figure, axes = _figure(2)
    for axis, sign in zip(axes, (1.0, -1.0), strict=True):
        for name in ("respo", "vespo"):
            kernel = find_loss(name).kernel
            assert kernel is not None
            ones = torch.ones_like(log_w)
            axis.plot(log_w, kernel(log_w, ones.long(), sign * ones, hyperparameters_for(name)())[0], label=name)
        axis.set(xlabel="log W", ylabel="weight", title="A >= 0" if sign > 0 else "A < 0")
        axis.legend()
    return _save(
        figure,
        folder,
        "kernels",
        "Positive responses that became unlikely keep their weight under ReSPO, not under VESPO.",
    )


def stationarity(folder: Path, updates: int) -> str:
    """Distance to the Gibbs policy along the flow of different updates, sampled by changing mixtures of policies."""
    generator = torch.Generator().manual_seed(0)
    reference = gibbs_tree.random_policy(generator)
    rewards = torch.rand(27, generator=generator, dtype=torch.float64)
    mixtures = [
        gibbs_tree.Mixture([gibbs_tree.random_policy(generator) for _ in range(2)], [0.3, 0.7]) for _ in range(5)
    ]
    target = gibbs_tree.gibbs_policy(reference, rewards, BETA)
    figure, (axis,) = _figure(1)
    for label, loss, settings in (
        ("full future KL", "proximal_kl", {"beta": BETA, **gibbs_tree.EXACT}),
        ("horizon 1", "proximal_kl", {"beta": BETA, **gibbs_tree.EXACT, "horizon": 1}),
        ("no KL (pg)", "pg", {}),
    ):
        path = gibbs_tree.flow(loss, reference, mixtures, reference, rewards, updates, 4.0, **settings)
        axis.semilogy([max(gibbs_tree.distance(policy, target), 1e-16) for policy in path], label=label)
    axis.set(xlabel="update", ylabel="KL to the proximal optimum")
    axis.legend()
    return _save(
        figure,
        folder,
        "stationarity",
        "Only full future credit ends at the proximal optimum, whoever sampled (Theorem 1).",
    )


def interference(folder: Path) -> str:
    """Success on two prompts that share parameters."""
    figure, (axis,) = _figure(1)
    reward, proximal = shared_head.reward_gradient_path(1 / 64), shared_head.proximal_path(1 / 64, BETA, 8)
    axis.plot(*reward.T, label="reward gradient")
    axis.plot(*proximal.T, marker="o", label="proximal rounds")
    axis.set(xlabel="success on prompt 1", ylabel="success on prompt 2")
    axis.legend()
    return _save(
        figure,
        folder,
        "interference",
        f"The reward gradient ends at ({reward[-1, 0]:.3f}, {reward[-1, 1]:.1e}), proximal rounds at "
        f"({proximal[-1, 0]:.3f}, {proximal[-1, 1]:.3f}) (Prop. D.2).",
    )


def odds(folder: Path) -> str:
    """Success odds before and after one exact proximal round, for binary rewards."""
    generator = torch.Generator().manual_seed(1)
    figure, (axis,) = _figure(1)
    rewards = (torch.arange(27) % 5 == 0).double()
    before, after = [], []
    for _ in range(40):
        reference = gibbs_tree.random_policy(generator, spread=2.0)
        for policy, found in ((reference, before), (gibbs_tree.gibbs_policy(reference, rewards, BETA), after)):
            p = float((gibbs_tree.response_probabilities(policy) * rewards).sum())
            found.append(p / (1 - p))
    axis.loglog(before, after, "o", label="exact proximal round")
    axis.loglog(sorted(before), [math.exp(1 / BETA) * x for x in sorted(before)], label="e^(1/beta) x")
    axis.set(xlabel="success odds before", ylabel="after")
    axis.legend()
    return _save(figure, folder, "odds", "Each exact round multiplies the odds of success by e^(1/beta) (Prop. D.1).")


def _figure(columns: int):
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            "the theory page draws with matplotlib, which is not installed: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(5 * columns, 4), squeeze=False)
    return figure, axes[0]


def _save(figure, folder: Path, name: str, sentence: str) -> str:
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=120)
    return f"{sentence}\n\n![{name}]({name}.png)\n"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/theory"))
