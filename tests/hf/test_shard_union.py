"""The shards of every layout together are exactly the published tensors, at their real sizes, without weights.

Which tensors a rank holds depends on its pipeline stage and expert-parallel rank, which part of them on its (expert)
tensor rank. The two are checked apart, so that together they cover every combination of the sizes below.
"""

from collections import Counter
from itertools import combinations, product
from math import prod

import pytest

from megatron_rlvr.hf import WeightMap, pipeline_stages, read_model_spec
from megatron_rlvr.types import Place, UserError

from .official import FOLDER, NAMES, config, transformers_shapes

TENSOR, EXPERT, EXPERT_TENSOR = (1, 2, 4, 8), (1, 8, 64), (1, 2)
PIPELINE = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]  # (stages, virtual stages per rank)
# Whole on every tensor rank: norms, routers, and the biases of row-parallel layers.
REPLICATED = ("norm.weight", "layernorm.weight", "mlp.gate.weight", "o_proj.bias", "down_proj.bias")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


def boxes_of(weights, name, places):
    """source -> the part that each place holds, as (start, stop) per dimension."""
    parts = {}
    for place in places:
        for source, slices in weights.local_slices(name, place):
            parts.setdefault(source, []).append(tuple((s.start, s.stop) for s in slices))
    return parts


def covers_once(boxes, shape, known):
    """Whether the boxes fill the tensor without overlap."""
    key = (tuple(boxes), shape)
    if key not in known:
        inside = all(0 <= a <= b <= n for box in boxes for (a, b), n in zip(box, shape, strict=True))
        apart = all(
            any(min(p[1], q[1]) <= max(p[0], q[0]) for p, q in zip(*pair, strict=True))
            for pair in combinations(boxes, 2)
        )
        volume = sum(prod(b - a for a, b in box) for box in boxes)
        known[key] = inside and apart and volume == prod(shape)
    return known[key]


def check_parts(weights, names, places, shapes):
    """The HF tensors of `names`, each found whole: on every place where replicated, else cut without gap or overlap."""
    found, known = [], {}
    for name in names:
        for source, boxes in boxes_of(weights, name, places).items():
            found.append(source)
            if source.endswith(REPLICATED):
                assert set(boxes) == {tuple((0, n) for n in shapes[source])}, source
            else:
                assert covers_once(boxes, shapes[source], known), source
    return found


@pytest.mark.parametrize("size", TENSOR)
def test_tensor_ranks_tile_every_tensor(name, size):
    shapes, spec = transformers_shapes(name), read_model_spec(FOLDER / name)
    weights = WeightMap(spec, vocab_multiple=size)
    names = [n for n in weights.names() if not weights.is_expert(n)]
    places = [Place(rank, size) for rank in range(size)]
    if config(name)["num_key_value_heads"] % size:
        with pytest.raises(UserError, match=f"actor.tensor_parallel {size} cannot split .*linear_qkv"):
            check_parts(weights, names, places, shapes)
        return
    found = check_parts(weights, names, places, shapes)
    assert sorted(found) == sorted(n for n in shapes if ".experts." not in n)
    if spec.tie_word_embeddings:  # the last stage's copy is cut like the embedding
        copy = boxes_of(weights, "output_layer.weight", places)
        assert copy == boxes_of(weights, "embedding.word_embeddings.weight", places)


@pytest.mark.parametrize("size", EXPERT_TENSOR)
@pytest.mark.parametrize("name", [n for n in NAMES if "-A" in n])
def test_expert_tensor_ranks_tile_every_expert(name, size):
    shapes, weights = transformers_shapes(name), WeightMap(read_model_spec(FOLDER / name))
    names = [n for n in weights.names() if weights.is_expert(n)]
    found = check_parts(weights, names, [Place(0, 1, 0, 1, rank, size) for rank in range(size)], shapes)
    assert sorted(found) == sorted(n for n in shapes if ".experts." in n)


def test_stages_and_expert_ranks_share_out_every_tensor(name):
    """Each expert lives on one rank, everything else once on each expert-parallel rank's side."""
    spec, tried = read_model_spec(FOLDER / name), 0
    weights = WeightMap(spec)
    experts = {n: 1 for n in weights.names() if weights.is_expert(n)}
    others = [n for n in weights.names() if n not in experts]
    for (pipeline, virtual), ep in product(PIPELINE, EXPERT if spec.num_experts else (1,)):
        if spec.num_layers % (pipeline * virtual):
            with pytest.raises(UserError, match=f"does not divide the model's {spec.num_layers} layers"):
                pipeline_stages(spec.num_layers, pipeline, virtual)
            continue
        held = Counter()
        for rank, stages in product(range(ep), pipeline_stages(spec.num_layers, pipeline, virtual)):
            for stage in stages:
                held.update(weights.stage_names(Place(expert_rank=rank, expert_size=ep), stage))
        copy = {"output_layer.weight": ep} if spec.tie_word_embeddings and pipeline > 1 else {}
        assert held == experts | dict.fromkeys(others, ep) | copy
        tried += 1
    assert tried >= (2 if spec.num_layers == 94 else 4)


def test_all_ranks_of_one_layout_hold_all_parameters():
    """Counted rank by rank: TP2 x PP4 x VPP2 x EP8 x ETP2 of Qwen3-30B-A3B, whose vocabulary needs no padding."""
    spec = read_model_spec(FOLDER / "Qwen3-30B-A3B")
    weights, total = WeightMap(spec, vocab_multiple=2), 0
    for stages in pipeline_stages(spec.num_layers, 4, 2):
        for expert_rank, shard in product(range(8), range(2)):
            place = Place(shard, 2, expert_rank, 8, shard, 2)
            for name in (n for stage in stages for n in weights.stage_names(place, stage)):
                replicated = len(weights.hf_names(name)) == 1 and weights.hf_names(name)[0].endswith(REPLICATED)
                first = weights.is_expert(name) or (expert_rank == 0 and (shard == 0 or not replicated))
                total += prod(weights.shard_shape(name, place)) if first else 0
    assert total == 30_532_122_624
