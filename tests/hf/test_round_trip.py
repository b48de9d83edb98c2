"""Checkpoints through Megatron's shards on two ranks and back: the same files, byte for byte, in every layout."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rlvr.hf import HFCheckpoint
from tests.ranks import run_ranks

from .checkpoints import BASE, MOE, fuse, hf_shapes, random_tensors, write_directory

SHARED = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
MODELS = {
    "moe": BASE | MOE | SHARED,
    "fused": BASE | MOE | SHARED,
    "tied": BASE | {"num_hidden_layers": 4, "tie_word_embeddings": True},
}
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "ep2": {"expert_parallel": 2, "data_parallel": 2},
    "dp2": {"data_parallel": 2},
}
PAIRS = [
    (m, x) for m in MODELS for x in LAYOUTS if not (m == "tied" and x == "ep2") and not (m == "fused" and x == "dp2")
]


def cases(sources):
    for model, layout in PAIRS:
        yield {"name": f"{model}.{layout}", "source": sources[model], "actor": LAYOUTS[layout]}
    for layout in ("ep2", "dp2"):
        yield {"name": f"moe.{layout}.broadcast", "source": sources["moe"], "actor": LAYOUTS[layout], "broadcast": True}
    yield {
        "name": "wide",
        "source": sources["fused"],
        "actor": LAYOUTS["tp2"] | {"dtype": "float32"},
        "dtype": "float32",
    }
    yield {"name": "cut", "source": sources["moe"], "actor": LAYOUTS["pp2"], "max_shard_bytes": 6000}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("round_trip")
    sources = {}
    for name, config in MODELS.items():
        tensors = random_tensors(config)
        if name == "tied":  # as several published checkpoints do
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        stored = fuse(config, tensors) if name == "fused" else tensors
        sources[name] = str(write_directory(root / "sources" / name, config, stored, shards=1 if name == "tied" else 3))
    conversions = [
        {"name": "ck.fused", "source": sources["fused"], "actor": LAYOUTS["ep2"], "back": {"tp2": LAYOUTS["tp2"]}},
        {"name": "ck.tied", "source": sources["tied"], "actor": LAYOUTS["tp2"], "back": {"pp2": LAYOUTS["pp2"]}},
    ]
    job = {"root": str(root), "cases": list(cases(sources)), "conversions": conversions}
    (root / "job.json").write_text(json.dumps(job))
    run_ranks("tests.hf.roundtrip_worker", 2, str(root / "job.json"), log_dir=root / "logs")
    return root


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_every_file_comes_back_byte_for_byte(made, model, layout):
    assert contents(made / f"{model}.{layout}") == contents(made / "sources" / model)


@pytest.mark.parametrize("name", ["ck.fused.tp2", "ck.tied.pp2"])
def test_a_distributed_checkpoint_becomes_the_same_files_in_another_layout(made, name):
    assert contents(made / name) == contents(made / "sources" / name.split(".")[1])
    assert (made / name.rsplit(".", 1)[0] / "manifest.json").is_file()


def found(made, name):
    return json.loads((made / f"{name}.json").read_text())


def split(config):
    """(bytes of the experts, bytes of everything else) in bfloat16."""
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in hf_shapes(config).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, sum(sizes.values()) - experts


def test_every_rank_reads_the_slices_that_it_holds_and_no_more(made):
    experts, others = split(MODELS["moe"])
    for name in ("moe.ep2", "fused.ep2"):
        for rank in found(made, name):
            assert rank["read"] == rank["held"] == rank["filled"] == experts // 2 + others
    for name in ("moe.pp2", "fused.pp2"):
        assert sum(rank["read"] for rank in found(made, name)) == experts + others
    for rank in found(made, "moe.dp2"):
        assert rank["read"] == experts + others


def test_one_replica_reads_for_all(made):
    experts, others = split(MODELS["moe"])
    first, second = found(made, "moe.dp2.broadcast")
    assert first["read"] == experts + others and second["read"] == 0
    assert second["filled"] == second["held"] == first["held"]
    first, second = found(made, "moe.ep2.broadcast")
    assert first["read"] == experts // 2 + others and second["read"] == experts // 2
    for layout in ("dp2", "ep2"):
        assert contents(made / f"moe.{layout}.broadcast") == contents(made / "sources" / "moe")


def test_experts_are_written_where_they_live(made):
    experts, others = split(MODELS["moe"])
    assert [rank["written"] for rank in found(made, "moe.ep2")] == [experts // 2 + others, experts // 2]


def test_a_wider_dtype_is_cut_anew_and_named(made):
    source, wide = HFCheckpoint(made / "sources" / "fused"), HFCheckpoint(made / "wide")
    assert wide.stored_shapes() == source.stored_shapes()
    for name in source.stored_shapes():
        assert torch.equal(wide.read(name), source.read(name).float()), name
    assert json.loads((made / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert [file.name for file in wide.files()] == ["model.safetensors"]  # below 5 GB


def test_a_smaller_shard_size_cuts_more_files(made):
    source, cut = HFCheckpoint(made / "sources" / "moe"), HFCheckpoint(made / "cut")
    assert len(cut.files()) > len(source.files())
    assert max(file.stat().st_size for file in cut.files()) < 6000 + 4000  # the header is not counted
    for name in source.stored_shapes():
        assert torch.equal(cut.read(name), source.read(name)), name


def test_nothing_is_left_beside_the_targets(made):
    assert not list(made.glob(".*"))
