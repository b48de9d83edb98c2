"""Against the library itself: what transformers writes is read, what is written here transformers computes with."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_rlvr.hf import HFCheckpoint, WeightMap, read_model_spec, write_checkpoint
from megatron_rlvr.types import Place

SIZES = {
    "vocab_size": 45,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}


def build(kind):
    torch.manual_seed(0)
    if kind == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied"))


def through_shards(weights, checkpoint, size):
    """Every tensor cut for `size` ranks (tensor and expert tensor) and merged again."""
    for name in weights.names():
        shards = []
        for rank in range(size):
            expert = int(name.split("local_experts.")[1].split(".")[0]) // 2 if weights.is_expert(name) else 0
            place = Place(rank, size, expert, 2 if weights.spec.num_experts else 1, rank, size)
            shards.append(weights.local_tensor(name, checkpoint.read, place))
        yield from weights.merge(name, shards)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_saved_cut_merged_written_and_loaded(tmp_path, kind):
    model = build(kind)
    model.save_pretrained(tmp_path / "source")
    spec, checkpoint = read_model_spec(tmp_path / "source"), HFCheckpoint(tmp_path / "source")
    checkpoint.check_complete(spec)
    stream = through_shards(WeightMap(spec, vocab_multiple=2), checkpoint, size=2)
    write_checkpoint(tmp_path / "out", tmp_path / "source", stream, max_shard_bytes=20_000)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(0, 45, (2, 11), generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert HFCheckpoint(tmp_path / "out").stored_shapes() == checkpoint.stored_shapes()


def test_spec_agrees_with_the_config_that_transformers_wrote(tmp_path):
    config = build("moe").config
    config.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.rope_theta == 5000.0 and spec.head_dim == config.head_dim == 16
    assert (spec.num_experts, spec.num_experts_per_tok) == (config.num_experts, config.num_experts_per_tok)
    assert spec.moe_layers == (True, False, True)
