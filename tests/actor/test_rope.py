"""Frequencies and attention factor against transformers' own rotary modules, for every variant and both notations."""

import json
import math

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_rlvr.actor.rope import inverse_frequencies, softmax_scale
from megatron_rlvr.hf import read_model_spec

SIZES = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
VARIANTS = {
    "default": {},
    "llama3": LLAMA3,
    "llama3_other_bands": LLAMA3 | {"factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
    "yarn": YARN,
    "yarn_old_name": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_length_of_the_model": {"rope_type": "yarn", "factor": 2.5},
    "yarn_untruncated": YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2},
    "yarn_attention_factor": YARN | {"attention_factor": 0.9},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_mscale_alone": YARN | {"mscale": 0.7},
    "yarn_ends_meet": YARN | {"original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_equals_transformers(tmp_path, name, place):
    config = SIZES | ({place: VARIANTS[name]} if VARIANTS[name] else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    ours = inverse_frequencies(spec)
    assert ours.shape == (64,) and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=2.4e-7, atol=0)  # two units in the last place
    assert (ours - theirs.inv_freq).abs().max() < 1e-7
    # cosines and sines of q and of k carry the factor
    found = softmax_scale(spec) or 1 / math.sqrt(spec.head_dim)
    assert found == pytest.approx(theirs.attention_scaling**2 / math.sqrt(128), rel=1e-7)


def test_variants_differ_from_default_where_they_should(tmp_path):
    frequencies = {}
    for name in ("default", "llama3", "yarn"):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | {"rope_scaling": VARIANTS[name] or None}))
        frequencies[name] = inverse_frequencies(read_model_spec(tmp_path))
    for name, factor in (("llama3", 32.0), ("yarn", 4.0)):
        ratio = frequencies["default"] / frequencies[name]
        assert ratio[0] == 1 and ratio[-1] == factor
        assert ((ratio > 1) & (ratio < factor)).any() and (ratio.diff() >= -1e-6).all()
