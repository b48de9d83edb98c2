"""Slices and merges against a naive reference that builds whole tensors and cuts them head by head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rlvr.hf import HFCheckpoint, WeightMap, read_model_spec
from megatron_rlvr.types import ModelSpec, Place, UserError

from .checkpoints import BASE, CONFIGS, MOE, hf_shapes, random_tensors, write_directory


def reader(tensors):
    return lambda name, slices: tensors[name][slices]


def naive_qkv(tensors, layer, config, rank, size):
    """Rows of this rank, one head at a time."""
    d, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (tensors[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
    rows = []
    for g in range(rank * groups // size, (rank + 1) * groups // size):
        for h in range(g * heads // groups, (g + 1) * heads // groups):
            rows.extend(q[h * d : (h + 1) * d])
        rows.extend(k[g * d : (g + 1) * d])
        rows.extend(v[g * d : (g + 1) * d])
    return torch.stack(rows)


def naive_fc1(gate, up, rank, size):
    n = len(gate) // size
    return torch.stack([*gate[rank * n : (rank + 1) * n], *up[rank * n : (rank + 1) * n]])


def places(expert_size, tensor_size, expert_tensor_size):
    for e in range(expert_size):
        for t in range(tensor_size):
            for x in range(expert_tensor_size):
                yield Place(t, tensor_size, e, expert_size, x, expert_tensor_size)


LAYOUTS = [(ep, tp, etp) for ep in (1, 2, 4) for tp in (1, 2) for etp in (1, 2)]


def spec_of(config, tmp_path):
    return read_model_spec(write_directory(tmp_path / "model", config, random_tensors(config)))


@pytest.mark.parametrize(("ep", "tp", "etp"), LAYOUTS)
def test_shards_of_every_layout_are_exactly_the_checkpoint(config, checkpoint_dir, ep, tp, etp):
    spec, checkpoint = read_model_spec(checkpoint_dir), HFCheckpoint(checkpoint_dir)
    if not spec.num_experts and (ep, etp) != (1, 1):
        return
    weights = WeightMap(spec, vocab_multiple=tp)
    shards = {}
    for place in places(ep, tp, etp):
        for name in weights.local_names(place):
            local = weights.local_tensor(name, checkpoint.read, place)
            assert local.shape == weights.shard_shape(name, place)
            rank = place.expert_tensor_rank if weights.is_expert(name) else place.tensor_rank
            shards.setdefault(name, {})[rank] = local
    merged = [
        pair for name in weights.names() for pair in weights.merge(name, [t for _, t in sorted(shards[name].items())])
    ]
    expected = random_tensors(config)
    assert sorted(name for name, _ in merged) == sorted(expected)
    for name, tensor in merged:
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name


def test_each_expert_lives_on_one_rank(tmp_path):
    weights = WeightMap(spec_of(CONFIGS["moe"], tmp_path))
    held = [{n for n in weights.local_names(Place(0, 1, e, 2)) if weights.is_expert(n)} for e in range(2)]
    assert not held[0] & held[1]
    assert {n.split("local_experts.")[1][0] for n in held[1]} == {"2", "3"}
    with pytest.raises(ValueError, match="does not live on expert-parallel rank 0"):
        weights.local_tensor(min(held[1]), reader({}), Place(0, 1, 0, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_slices_equal_the_naive_reference(tmp_path, size):
    config = CONFIGS["moe"]
    tensors, weights = random_tensors(config), WeightMap(spec_of(config, tmp_path), vocab_multiple=size)
    for rank in range(size):
        place = Place(rank, size, 0, 1, rank, size)
        local = {name: weights.local_tensor(name, reader(tensors), place) for name in weights.names()}
        assert torch.equal(
            local["decoder.layers.2.self_attention.linear_qkv.weight"], naive_qkv(tensors, 2, config, rank, size)
        )
        p = "model.layers.2.mlp.experts.3."
        assert torch.equal(
            local["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"],
            naive_fc1(tensors[p + "gate_proj.weight"], tensors[p + "up_proj.weight"], rank, size),
        )
        down = tensors[p + "down_proj.weight"]
        columns = [down[:, i] for i in range(rank * 8 // size, (rank + 1) * 8 // size)]
        assert torch.equal(
            local["decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"], torch.stack(columns, dim=1)
        )
        p = "model.layers.1.mlp."
        assert torch.equal(
            local["decoder.layers.1.mlp.linear_fc1.weight"],
            naive_fc1(tensors[p + "gate_proj.weight"], tensors[p + "up_proj.weight"], rank, size),
        )
        assert torch.equal(local["decoder.layers.0.mlp.router.weight"], tensors["model.layers.0.mlp.gate.weight"])


def test_vocabulary_is_padded_with_zero_rows(tmp_path):
    tensors, weights = random_tensors(BASE), WeightMap(spec_of(BASE, tmp_path), vocab_multiple=32)
    shards = [weights.local_tensor("output_layer.weight", reader(tensors), Place(r, 4)) for r in range(4)]
    assert [s.shape for s in shards] == [(16, 24)] * 4
    assert torch.equal(torch.cat(shards)[:45], tensors["lm_head.weight"])
    assert not torch.cat(shards)[45:].any()
    ((name, merged),) = weights.merge("output_layer.weight", shards)
    assert name == "lm_head.weight" and torch.equal(merged, tensors["lm_head.weight"])


def test_tied_head_is_not_listed_but_can_be_loaded_by_the_last_stage(tmp_path):
    config = CONFIGS["tied"]
    weights = WeightMap(spec_of(config, tmp_path))
    assert "output_layer.weight" not in weights.names()
    assert weights.hf_names("output_layer.weight") == ("model.embed_tokens.weight",)


def test_names_are_in_model_order(tmp_path):
    names = WeightMap(spec_of(CONFIGS["moe"], tmp_path)).names()
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[1] == "decoder.layers.0.input_layernorm.weight"
    assert names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")]
    assert layers == sorted(layers)


def test_only_the_needed_part_is_read(tmp_path):
    tensors, weights = random_tensors(CONFIGS["moe"]), WeightMap(spec_of(CONFIGS["moe"], tmp_path), vocab_multiple=2)
    read_elements = 0

    def read(name, slices):
        nonlocal read_elements
        part = tensors[name][slices]
        read_elements += part.numel()
        return part

    place = Place(0, 2, 1, 2, 0, 2)
    needed = sum(weights.local_tensor(name, read, place).numel() for name in weights.local_names(place))
    # Vocabulary 45 is padded to 46: rank 0 of embedding and head holds no padding, so nothing is made up.
    assert read_elements == needed


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(0, 4), ("actor.tensor_parallel 4", "linear_qkv")),
        (Place(0, 1, 0, 3), ("actor.expert_parallel 3", "4 experts")),
        (Place(0, 1, 0, 1, 0, 3), ("actor.expert_tensor_parallel 3", "linear_fc1")),
    ],
)
def test_a_place_that_does_not_divide_is_refused(tmp_path, place, words):
    weights = WeightMap(spec_of(CONFIGS["moe"], tmp_path), vocab_multiple=4)
    with pytest.raises(UserError) as error:
        for name in weights.local_names(place):
            weights.shard_shape(name, place)
    for word in words:
        assert word in str(error.value)


def test_unknown_names_and_wrong_shards_are_programming_errors(tmp_path):
    weights = WeightMap(spec_of(BASE, tmp_path))
    with pytest.raises(ValueError, match=r"decoder\.layers\.9"):
        weights.hf_names("decoder.layers.9.input_layernorm.weight")
    with pytest.raises(ValueError, match=r"shard 0 of .*linear_proj.* has shape \[2, 2\]"):
        weights.merge("decoder.layers.0.self_attention.linear_proj.weight", [torch.zeros(2, 2)])


@st.composite
def attention_shapes(draw):
    size, groups_per_rank, heads_per_group = (draw(st.integers(1, 3)) for _ in range(3))
    groups = size * groups_per_rank
    sizes = {"num_key_value_heads": groups, "num_attention_heads": groups * heads_per_group}
    return size, BASE | sizes | {"head_dim": draw(st.integers(1, 5)), "hidden_size": draw(st.integers(1, 7))}


@settings(deadline=None, max_examples=60)
@given(attention_shapes())
def test_qkv_of_any_gqa_shape_goes_round(case):
    size, config = case
    tensors, weights = random_tensors(config), WeightMap(dense_spec(config))
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    shards = [weights.local_tensor(name, reader(tensors), Place(rank, size)) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, naive_qkv(tensors, 1, config, rank, size))
    for hf_name, tensor in weights.merge(name, shards):
        assert torch.equal(tensor, tensors[hf_name])


def dense_spec(config):
    return ModelSpec(
        family="qwen3",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        eos_token_ids=(),
    )


def test_published_sizes_without_weights(tmp_path):
    """Qwen3-30B-A3B: 30.5 billion parameters, 18,867 tensors, counted on shapes alone."""
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [],
    }
    config = BASE | MOE | sizes
    write_directory(tmp_path, config, {"unused": torch.zeros(1)})
    weights = WeightMap(read_model_spec(tmp_path), vocab_multiple=512)
    shapes = weights.hf_shapes()
    assert shapes == hf_shapes(config)
    assert len(shapes) == 18867
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 30_532_122_624
    places_ = [Place(r % 4, 4, r, 64, 0, 1) for r in range(64)]
    held = sum(len([n for n in weights.local_names(p) if weights.is_expert(n)]) for p in places_)
    assert held == 48 * 128 * 2
