"""The schema: its page is up to date, unknown names are refused, and what the rooms log is in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rlvr.losses import available_losses, finalize_metrics, policy_loss
from megatron_rlvr.observability.metrics import SCHEMA, Schema, document, plain, validation_key

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_is_what_the_schema_prints() -> None:
    assert DOCS.read_text(encoding="utf-8") == document()


def test_no_name_is_given_twice() -> None:
    names = [name for metric in SCHEMA for name in metric.names]
    assert len(names) == len(set(names))


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    assert all(metric.unit and metric.meaning for metric in SCHEMA)


@pytest.mark.parametrize(
    "name",
    [
        "actor/grad_norm",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/lr",
        "critic/score/mean",
        "critic/rewards/max",
        "critic/advantages/min",
        "response_length/clip_ratio",
        "prompt_length/mean",
        "timing_s/gen",
        "timing_s/update_actor",
        "perf/throughput",
        "perf/total_num_tokens",
        "training/global_step",
        "val-core/heldout/acc/mean@4",
    ],
)
def test_the_names_of_verl_are_known(name: str) -> None:
    assert Schema().knows(name)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"metric actor/gradnorm is not in the schema.*actor/grad_norm"):
        Schema().check(["actor/lr", "actor/gradnorm"])
    for name in ("timing_s/", "critic/score", "critic/score/median", "Actor/lr", ""):
        assert not Schema().knows(name), name


def test_the_name_of_a_held_out_accuracy() -> None:
    assert validation_key("heldout", 4) == "val-core/heldout/acc/mean@4"


@pytest.mark.parametrize("loss", available_losses())
def test_all_that_a_loss_measures_is_in_the_schema(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -1 + 0.1 * torch.randn(600, generator=generator)
    _, _, sums = policy_loss(
        loss,
        logprobs=logprobs,
        behavior_logprobs=logprobs + 0.3 * torch.randn(600, generator=generator),
        reference_logprobs=logprobs + 0.1 * torch.randn(600, generator=generator),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        cu_seqlens=torch.tensor([0, 100, 101, 350, 600]),
    )
    Schema().check(finalize_metrics(sums))


def test_plain_numbers() -> None:
    assert plain(torch.tensor(2.5)) == 2.5 and type(plain(torch.tensor(2.5))) is float
    assert plain(np.float32(0.5)) == 0.5 and type(plain(np.float32(0.5))) is float
    assert plain(np.int64(3)) == 3 and type(plain(np.int64(3))) is int
    assert plain(True) == 1
    assert [plain(float(x)) for x in ("nan", "inf", "-inf")] == [None] * 3
