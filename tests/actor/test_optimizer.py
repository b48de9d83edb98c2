"""What the recipe's optimizer section does to a real Megatron optimizer: schedule, clipping, decay."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_rlvr.actor.actor import Actor
from megatron_rlvr.config.tree import ActorConfig, OptimizerConfig
from megatron_rlvr.types import ModelSpec

UPDATES = 40
LR, MIN_LR = 1e-3, 1e-4
SPEC = ModelSpec(
    family="qwen3",
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=31,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    eos_token_ids=(3,),
    moe_layers=(False,),
)


@pytest.fixture
def make_actor():
    """Actors of one rank with weights of 0.5, one at a time."""
    made = []

    def make(**optimizer):
        actor = Actor(SPEC, ActorConfig(dtype="float32"), OptimizerConfig(lr=LR, **optimizer), updates=UPDATES, seed=0)
        made.append(actor)
        shapes = {name: parameter.shape for name, parameter in actor._parameters.items()}
        actor.load(lambda name, place: torch.full(shapes[name], 0.5))
        return actor

    yield make
    for actor in made:
        actor.close()


def set_gradients(actor, value):
    for parameter in actor._parameters.values():
        parameter.main_grad.fill_(value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_fraction": 0.0}, lambda u: LR),
        ({"warmup_fraction": 0.1}, lambda u: LR * min(u / 4, 1)),
        ({"warmup_fraction": 0.1, "schedule": "linear"}, lambda u: LR * u / 4 if u <= 4 else LR * (1 - (u - 4) / 36)),
        (
            {"warmup_fraction": 0.05, "schedule": "cosine", "min_lr": MIN_LR},
            lambda u: (
                LR * u / 2 if u <= 2 else MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * (u - 2) / (UPDATES - 2))) / 2
            ),
        ),
    ],
)
def test_learning_rate_of_every_update(make_actor, settings, expected):
    actor = make_actor(**settings)
    set_gradients(actor, 0.0)
    rates = [actor.step()["actor/lr"] for _ in range(UPDATES)]
    np.testing.assert_allclose(rates, [expected(update) for update in range(1, UPDATES + 1)], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("clip", [0.25, 1e9, 0.0])
def test_the_norm_is_that_before_clipping_and_adam_sees_what_is_left(make_actor, clip):
    actor = make_actor(warmup_fraction=0.0, clip_grad=clip)
    set_gradients(actor, 0.1)
    count = sum(parameter.numel() for parameter in actor._parameters.values())
    norm = 0.1 * math.sqrt(count)
    assert actor.step()["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    left = 0.1 * (min(1.0, clip / norm) if clip else 1.0)
    for state in actor.optimizer.optimizer.state.values():
        torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], 0.1 * left), rtol=1e-4, atol=0)


@pytest.mark.parametrize("decoupled", [True, False])
def test_weights_after_one_update(make_actor, decoupled):
    """Matrices decay, vectors do not. Adam's first step is lr * sign(gradient), whatever the gradient's size."""
    actor = make_actor(warmup_fraction=0.0, weight_decay=0.1, decoupled_weight_decay=decoupled, clip_grad=0.0)
    set_gradients(actor, -0.2)
    actor.step()
    for name, parameter in actor._parameters.items():
        decay = 0.1 * 0.5 * LR if parameter.dim() > 1 and decoupled else 0.0
        torch.testing.assert_close(
            parameter.data, torch.full_like(parameter, 0.5 + LR - decay), rtol=1e-6, atol=0, msg=name
        )


def test_a_non_finite_gradient_leaves_the_weights_and_moves_on(make_actor):
    actor = make_actor(warmup_fraction=0.0)
    set_gradients(actor, float("nan"))
    assert actor.step()["actor/skipped_updates"] == 1.0 and actor.version == 1
    assert all(bool((parameter == 0.5).all()) for parameter in actor._parameters.values())
