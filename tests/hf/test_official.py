"""From config.json alone: the tensors and the parameter count of every official model, against transformers."""

import pytest
from transformers import AutoConfig

from megatron_rlvr.hf import WeightMap, read_model_spec

from .official import FOLDER, NAMES, PUBLISHED_PARAMETERS, transformers_shapes


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_parameters_are_those_of_transformers(name):
    weights = WeightMap(read_model_spec(FOLDER / name))
    assert weights.hf_shapes() == transformers_shapes(name)
    assert weights.num_parameters() == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_says_what_transformers_reads(name):
    spec, theirs = read_model_spec(FOLDER / name), AutoConfig.from_pretrained(FOLDER / name)
    for field in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    ):
        assert getattr(spec, field) == getattr(theirs, field), field
    assert spec.num_layers == theirs.num_hidden_layers
    assert spec.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.rope_scaling == () or dict(spec.rope_scaling).items() <= theirs.rope_parameters.items()
    assert list(spec.eos_token_ids) in (theirs.eos_token_id, [theirs.eos_token_id])
    if spec.num_experts:
        assert all(spec.moe_layers) and spec.norm_topk_prob
        assert (spec.num_experts, spec.num_experts_per_tok) == (theirs.num_experts, theirs.num_experts_per_tok)
