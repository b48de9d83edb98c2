"""Whether the planner accepts what is known to run, refuses what is known to fail, and says what to change."""

from __future__ import annotations

import pytest

from launch.plan import make_plan, render, verdict
from launch.plan.activations import layer_activations, stored_layers
from launch.plan.counts import Counts
from launch.plan.hardware import GIB, GPUS
from launch.plan.reference import PUBLISHED, comparable, is_reference_model, same_setting
from launch.plan.timing import update_seconds
from megatron_rlvr.cli import main
from megatron_rlvr.config.load import load_config
from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.types import UserError
from tests.e2e.commands import REPOSITORY
from tests.hf.official import FOLDER

RECIPE = REPOSITORY / "examples/recipes/respo_qwen3_30b_a3b.yaml"
MODEL = f"model.path={FOLDER / 'Qwen3-30B-A3B-Base'}"
DENSE = FOLDER / "Qwen3-8B-Base"


@pytest.fixture(scope="module")
def counts():
    return Counts(read_model_spec(FOLDER / "Qwen3-30B-A3B"))


def plan(gpu, nodes, *overrides, rollout=1, **options):
    return make_plan(load_config(RECIPE, [MODEL, *overrides]), gpu, nodes, rollout_tensor_parallel=rollout, **options)


def test_it_accepts_the_papers_run_for_the_right_reason():
    """Experts over 8 ranks keep all their optimizer states, dense parameters a quarter (18 and 6 + 12/4 bytes)."""
    found = plan("h200", 1, rollout=4)
    assert found.fits
    routers_and_norms = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048  # whole on every tensor rank
    experts = 28_991_029_248 // 8
    dense = (1_541_093_376 - routers_and_norms) // 2 + routers_and_norms
    assert found.terms.training_state == 18 * experts + 9 * dense
    assert found.terms.training_state == pytest.approx(72.2e9, rel=0.01)
    assert found.terms.largest[0] == "kv_cache" and found.terms.named()["optimizer"] == pytest.approx(45.8e9, rel=0.01)
    assert found.terms.engine == pytest.approx(0.45 * 139.8 * GIB, rel=1e-6)
    assert found.terms.engine_weights == pytest.approx(2 * 30_532_122_624 / 4)
    assert "planned only" in render(found)


def test_it_refuses_the_same_on_eighty_gigabytes_and_says_what_takes_most():
    found = plan("h100-80g", 1, rollout=4)
    assert not found.fits and found.nearest is None and found.more_nodes == 2
    assert "optimizer" in verdict(found) and "--nodes 2" in verdict(found)


def test_it_agrees_with_the_published_memory_of_ms_swift():
    """TP2 EP8 on 16 A800 of 80 GB took 60 GiB a GPU, with whole logits and without an engine; ZeRO-2 ran out of memory:
    whole weights on every GPU, gradients and states over 16, which is less than our EP1 with whole gradients."""
    lengths = ["data.max_prompt_length=100", "rollout.max_response_length=8092", "actor.micro_batch_tokens=8192"]
    shared = plan("a800-80g", 2, "actor.data_parallel=8", *lengths, rollout=8)
    training = shared.terms.total - shared.terms.engine
    assert 45 * GIB < training < 60 * GIB
    whole = ["actor.tensor_parallel=1", "actor.expert_parallel=1", "actor.data_parallel=16"]
    refused = plan("a800-80g", 2, *whole, *lengths, rollout=8)
    assert not refused.fits and refused.terms.weights + refused.terms.overhead > 60 * GIB
    zero2 = refused.terms.weights + (refused.terms.gradients + refused.terms.optimizer * 16) / 16
    assert zero2 > 79.1 * GIB


def test_it_accepts_nemo_rls_published_layout():
    assert plan("h100-80g", 4, "actor.data_parallel=16", rollout=4).fits


def test_the_nearest_layout_changes_least_and_fits():
    found = plan("h100-80g", 2, "actor.data_parallel=8", rollout=4)
    assert not found.fits and found.nearest == {"expert_parallel": 16}
    changed = [f"actor.{name}={value}" for name, value in found.nearest.items()]
    assert plan("h100-80g", 2, "actor.data_parallel=8", *changed, rollout=4).fits
    plain = plan("h200", 1, "actor.recompute=none", rollout=4)
    assert plain.terms.activations > 15 * found.terms.activations and plain.nearest == {"recompute": "full"}


def test_more_room_never_stops_a_run_from_fitting():
    peaks = [plan("h200", nodes, f"actor.data_parallel={4 * nodes}", rollout=4).terms.total for nodes in (1, 2, 4)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]


def test_cache_and_weights_of_an_engine_too_large_for_its_share_are_refused():
    found = plan("h100-80g", 8, "actor.data_parallel=32", "rollout.memory_utilization=0.2", rollout=4)
    assert not found.fits and found.terms.kv_tokens < 9216 and "KV cache" in verdict(found)


@pytest.mark.parametrize(
    ("nodes", "overrides", "rollout", "parts"),
    [
        (2, [], 1, ["needs 8 ranks", "16 GPUs", "actor.data_parallel=8"]),
        (1, ["actor.tensor_parallel=3"], 1, ["actor.tensor_parallel", "3"]),
        (2, ["actor.tensor_parallel=4", "actor.data_parallel=4", "actor.expert_parallel=12"], 1, ["expert_parallel"]),
        (1, ["actor.pipeline_parallel=5"], 1, ["pipeline_parallel", "48"]),
        (1, [], 3, ["--rollout-tensor-parallel is 3"]),
        (1, ["trainer.mini_batch_size=30"], 1, ["mini_batch_size"]),
    ],
)
def test_a_layout_that_cannot_be_placed_is_refused_in_one_sentence(nodes, overrides, rollout, parts):
    with pytest.raises(UserError) as refusal:
        plan("h200", nodes, *overrides, rollout=rollout)
    assert all(part in str(refusal.value) for part in parts), str(refusal.value)


def test_the_command_prints_the_plan_and_fails_where_it_does_not_fit(capsys):
    arguments = ["plan", str(RECIPE), MODEL, "--nodes", "1", "--rollout-tensor-parallel", "4"]
    assert main([*arguments, "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    urls = {row.url for row in PUBLISHED}
    assert all(url in printed for url in urls) and "fits: " in printed and "assumed" in printed
    assert main([*arguments, "--gpu", "h100-80g"]) == 2
    assert "does not fit" in capsys.readouterr().out
    assert main([*arguments, "--gpu", "b9000"]) == 2
    assert "h100-80g, h200" in capsys.readouterr().err


def test_activations_of_a_dense_layer_against_counting_by_hand():
    """Qwen3-8B, one token on one rank in bf16: h 4096, 32 heads and 8 groups of 128, MLP 12288."""
    actor, spec = ActorConfig(micro_batch_tokens=1), read_model_spec(DENSE)
    norms, qk_norms = 4 * 4096, 4096 + 1024
    attention, mlp = 4096 + 2 * 1024 + 4096, 3 * 12288
    assert layer_activations(actor, spec).saved == 2 * (norms + qk_norms + attention + mlp)
    split = layer_activations(ActorConfig(micro_batch_tokens=8, tensor_parallel=2, context_parallel=4), spec)
    assert split == layer_activations(actor, spec)


def test_waiting_micro_batches_against_published_schedules():
    """1F1B keeps p - r micro-batches on rank r; interleaving has the factor 1 + (p-1)/(pv) (Korthikanti et al.)."""
    for stages, chunks in ((4, 1), (4, 2), (8, 3)):
        actor = ActorConfig(pipeline_parallel=stages, virtual_pipeline=chunks)
        factor = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1
        assert stored_layers(actor, 48, 0, 1000) == pytest.approx(48 * factor)
    actor = ActorConfig(pipeline_parallel=4)
    assert [stored_layers(actor, 48, rank, 1000) for rank in range(4)] == [48, 36, 24, 12]
    assert stored_layers(actor, 48, 0, 2) == 24


def test_the_bubble_is_that_of_the_schedule(counts):
    work = PUBLISHED[0].work
    actor = ActorConfig(pipeline_parallel=4, expert_parallel=8, data_parallel=8, micro_batch_tokens=16384)
    micro_batches = work.sequences * (work.prompt + work.response) / 8 / 16384
    for chunks in (1, 2):
        changed = actor.model_copy(update={"virtual_pipeline": chunks})
        bubble = update_seconds(counts, work, changed, GPUS["h200"])[2]
        assert bubble == pytest.approx(3 / (micro_batches * chunks + 3), rel=1e-6)


def test_estimates_lie_near_published_measurements(counts):
    """No factor was fitted to a row: within 3 times of every measurement whose setting the source tells."""
    assert is_reference_model(counts.spec)
    told = {row.source: row for row in PUBLISHED if "mean response" not in row.assumed}
    assert len(told) == 3
    for row in told.values():
        estimated = comparable(same_setting(row, counts), row.work)
        for name, measured in row.seconds.items():
            assert measured / 3 < estimated[name] < measured * 3, (row.source, name, measured, estimated[name])
