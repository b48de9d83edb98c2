"""Checkpoints through Megatron's shards on two ranks and back: the same files, byte for byte, in every layout."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rlvr.hf import HFCheckpoint
from tests.ranks import run_ranks

from .checkpoints import BASE, MOE, fuse, random_tensors, write_directory

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
PAIRS = [(m, x) for m in MODELS for x in LAYOUTS if not (m == "tied" and x == "ep2") and not (m == "fused" and x == "dp2")]


def cases(sources):
    for model, layout in PAIRS:
        yield {"name": f"{model}.{layout}", "source": sources[model], "actor": LAYOUTS[layout]}
    for layout in ("ep2", "dp2"):
        yield {"name": f"moe.{layout}.broadcast", "source": sources["moe"], "actor": LAYOUTS[layout], "broadcast": True}
    yield {"name": "wide", "source": sources["fused"], "actor": LAYOUTS["tp2"] | {"dtype": "float32"}, "dtype": "float32"}
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
    (root / "job.json").write_text(json.dumps({"root": str(root), "cases": list(cases(sources))}))
    run_ranks("tests.hf.roundtrip_worker", 2, str(root / "job.json"), log_dir=root / "logs")
    return root


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def bytes_of(directory):
    checkpoint = HFCheckpoint(directory)
    return sum(checkpoint.read(name).nbytes for name in checkpoint.stored_shapes())


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_every_file_comes_back_byte_for_byte(made, model, layout):
    assert contents(made / f"{model}.{layout}") == contents(made / "sources" / model)


def test_nothing_is_left_beside_the_targets(made):
    assert not list(made.glob(".*"))
