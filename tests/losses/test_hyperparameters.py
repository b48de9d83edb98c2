"""Names, ranges and the papers' conditions, checked when a run is configured."""

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_rlvr.losses import (
    LossError,
    available_losses,
    check_hyperparameters,
    find_loss,
    hyperparameters_for,
    token_coefficients,
)

from .naive import random_batch


def test_the_registry():
    assert available_losses() == ("respo", "vespo", "grpo", "gspo", "cispo", "pg", "proximal_kl", "sft")
    needs = {name: find_loss(name).reference for name in available_losses()}
    assert needs == dict.fromkeys(available_losses(), "unused") | {"grpo": "optional", "proximal_kl": "required"}
    with pytest.raises(LossError, match="loss 'proximal' is unknown: did you mean 'proximal_kl'"):
        find_loss("proximal")


@pytest.mark.parametrize("name", available_losses())
def test_defaults_are_those_of_the_papers_and_break_no_condition(name):
    assert check_hyperparameters(name, {}) == []


def test_defaults_of_proximal_kl_and_gspo():
    assert vars(hyperparameters_for("proximal_kl")()) == {
        "beta": 0.3,
        "horizon": "full",
        "cost_clip": 0.05,
        "tail_decay": False,
        "weighting": "token",
        "log_w_clamp": 20.0,
    }
    assert vars(hyperparameters_for("gspo")()) == {"clip_low": 3e-4, "clip_high": 4e-4, "log_w_clamp": 20.0}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("respo", {"lamda_pos": 1.0}, "'lamda_pos' is unknown: did you mean 'lambda_pos'"),
        ("sft", {"beta": 1.0}, "'beta' is unknown: it takes none"),
        ("grpo", {"horizon": 3}, "hyperparameter of loss 'grpo' 'horizon' is unknown"),
        ("respo", {"alpha_pos": 0.0}, "alpha_pos=0.0 is refused: give a number above 0"),
        ("respo", {"beta_neg": 1.5}, "beta_neg=1.5 is refused: give a number from 0 to 1"),
        ("respo", {"lambda_pos": "2"}, "lambda_pos='2' is refused: give a finite number"),
        ("respo", {"lambda_pos": True}, "lambda_pos=True is refused"),
        ("respo", {"lambda_pos": math.nan}, "lambda_pos=nan is refused"),
        ("respo", {"log_w_clamp": 100}, "log_w_clamp=100 is refused: give a number up to 80"),
        ("grpo", {"clip_low": 1.2}, "clip_low=1.2 is refused"),
        ("cispo", {"weight_low": 6.0}, "weight_low=6 is above weight_high=5: exchange them"),
        ("proximal_kl", {"horizon": 0}, "horizon=0 is refused: give a whole number from 1 or the word full"),
        ("proximal_kl", {"horizon": 2.0}, "horizon=2.0 is refused"),
        ("proximal_kl", {"cost_clip": 0.0}, "cost_clip=0.0 is refused: give a number above 0"),
        ("proximal_kl", {"weighting": "tokens"}, "weighting='tokens' is refused: give one of token, sequence, none"),
        ("proximal_kl", {"tail_decay": 1}, "tail_decay=1 is refused: give true or false"),
    ],
)
def test_refused(name, values, message):
    with pytest.raises(LossError) as caught:
        check_hyperparameters(name, values)
    assert message in str(caught.value)
    with pytest.raises(LossError):
        token_coefficients(name, **random_batch(0, [2]).keywords(), **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lambda_pos": 1.5}, "it asks for lambda_pos=2"),
        ({"beta_pos": 0.75}, "it asks for lambda_pos=4"),
        ({"alpha_pos": 1.6, "beta_pos": 0.3, "lambda_pos": 1.7}, "it asks for lambda_pos=1.81205"),
        ({"alpha_pos": 1.5, "beta_pos": 0.3, "lambda_pos": 2.04082}, "choose alpha_pos above 1.5"),
        ({"alpha_pos": 3.0, "lambda_pos": 1.0}, "it asks for lambda_pos=1.41421"),
        ({"alpha_pos": 1.0}, "starved"),
        ({"lambda_neg": 1.0}, "it asks for lambda_neg=2"),
        ({"beta_neg": 0.25}, "it asks for lambda_neg=3"),
        ({"beta_neg": 0.0}, "beta_neg above 0"),
        ({"alpha_neg": 2.0}, "keeps phi(0) above 0"),
    ],
)
def test_warnings_when_a_tail_condition_breaks(values, message):
    (warning,) = check_hyperparameters("respo", values)
    assert message in warning


def test_the_warned_condition_is_the_kernels_own():
    """phi'(0) = 0 at the lambda the warning asks for: the kernel is flat from W = e^-12 to e^-14, and not otherwise."""

    def flatness(**values):
        kernel = find_loss("respo").kernel
        log_w = random_batch(0, [1]).advantages.new_tensor([-12.0, -14.0])
        weights = kernel(log_w, log_w.new_ones(2).long(), log_w.new_ones(2), hyperparameters_for("respo")(**values))[0]
        return abs(float(weights[0] - weights[1])) / math.exp(-12.0)

    assert flatness(beta_pos=0.75, lambda_pos=4.0) < 1e-3 < 0.1 < flatness(beta_pos=0.75, lambda_pos=2.0)
    for alpha in (1.2, 1.4, 1.5, 1.7, 1.9, 2.0):
        wanted = 0.5 ** (-1 / (alpha - 1))
        fine = check_hyperparameters("respo", {"alpha_pos": alpha, "lambda_pos": wanted}) == []
        assert fine == (alpha > 1.5), alpha
        assert (flatness(alpha_pos=alpha, lambda_pos=wanted) < 0.1) == fine, alpha


def test_other_values_that_are_allowed_and_fine():
    assert check_hyperparameters("respo", {"alpha_pos": 3.0, "lambda_pos": 2.0}) == []
    assert check_hyperparameters("proximal_kl", {"tail_decay": True, "horizon": 8}) == []
    assert "no effect" in check_hyperparameters("proximal_kl", {"tail_decay": True})[0]


def test_a_pydantic_config_can_hold_them():
    adapter = TypeAdapter(hyperparameters_for("proximal_kl"))
    assert adapter.validate_python({"horizon": 8, "cost_clip": None}).horizon == 8
    with pytest.raises(ValidationError, match="cost_clip"):
        adapter.validate_python({"cost_clip": -1.0})
