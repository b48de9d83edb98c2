"""What megatron-core builds on a rank is what the weight map says from config.json alone, at the official sizes."""

import json

import pytest

from megatron_rlvr.config.tree import ActorConfig
from megatron_rlvr.hf import WeightMap, pipeline_stages, read_model_spec
from megatron_rlvr.types import Place
from tests.hf.official import FOLDER
from tests.ranks import run_ranks

CASES = {
    "Qwen3-0.6B": ({"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2}, (0, 3)),
    "Qwen2.5-1.5B": ({"tensor_parallel": 2, "pipeline_parallel": 4}, (1, 6)),
    "Llama-3.2-3B-Instruct": ({"tensor_parallel": 4}, (2,)),
    "Qwen3-30B-A3B": (
        {
            "tensor_parallel": 4,
            "pipeline_parallel": 4,
            "expert_parallel": 8,
            "expert_tensor_parallel": 2,
            "data_parallel": 4,
        },
        (5, 63),
    ),
    "Qwen3-235B-A22B": (
        {"tensor_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 64, "data_parallel": 16},
        (127,),
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    job = [{"path": str(FOLDER / name), "actor": actor, "ranks": ranks} for name, (actor, ranks) in CASES.items()]
    (folder / "job.json").write_text(json.dumps(job))
    files = str(folder / "job.json"), str(folder / "found.json")
    run_ranks("tests.parallel.shape_worker", 1, *files, log_dir=folder / "logs")
    return dict(zip(CASES, json.loads((folder / "found.json").read_text()), strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_megatron_builds_the_predicted_names_and_shapes(built, name):
    spec, config = read_model_spec(FOLDER / name), ActorConfig.model_validate(CASES[name][0])
    weights = WeightMap(spec, vocab_multiple=config.tensor_parallel)
    stages = pipeline_stages(spec.num_layers, config.pipeline_parallel, config.virtual_pipeline)
    for found in built[name]:
        place, mine = Place(**found["place"]), stages[found["pipeline_rank"]]
        assert (place.tensor_size, place.expert_size) == (config.tensor_parallel, config.expert_parallel)
        assert place.expert_tensor_size == config.expert_tensor
        assert len(mine) == len(found["chunks"])
        for stage, chunk in zip(mine, found["chunks"], strict=True):
            expected = {n: list(weights.shard_shape(n, place)) for n in weights.stage_names(place, stage)}
            assert chunk == expected
