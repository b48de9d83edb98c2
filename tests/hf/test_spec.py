import json

import pytest

from megatron_rlvr.hf import read_model_spec
from megatron_rlvr.types import UserError

from .checkpoints import BASE, MOE

YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN2 = {"model_type": "qwen2", "head_dim": None}
LLAMA = {"model_type": "llama", "head_dim": None}


def write_config(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return path


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


def test_dense_fields(tmp_path):
    spec = read_model_spec(write_config(tmp_path, BASE))
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.head_dim) == ("qwen3", 3, 24, 6)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.vocab_size) == (4, 2, 45)
    assert (spec.rope_theta, spec.rope_scaling, spec.eos_token_ids) == (1000.0, (), (1,))
    assert spec.qk_norm and not spec.attention_bias and not spec.tie_word_embeddings
    assert spec.num_experts == 0 and spec.moe_layers == ()


def test_moe_fields(tmp_path):
    spec = read_model_spec(write_config(tmp_path, BASE | MOE))
    assert spec.moe_layers == (True, False, True)
    assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size) == (4, 2, 8)
    assert spec.norm_topk_prob


def test_expert_count_under_its_newer_name(tmp_path):
    config = without(BASE | MOE, "num_experts") | {"num_local_experts": 4}
    assert read_model_spec(write_config(tmp_path, config)).num_experts == 4


def test_decoder_sparse_step_counts_layers_from_one(tmp_path):
    config = BASE | MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_model_spec(write_config(tmp_path, config)).moe_layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e6},
        {"rope_theta": 5e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    ],
)
def test_rope_theta_in_old_and_new_place(tmp_path, rope):
    spec = read_model_spec(write_config(tmp_path, without(BASE, "rope_parameters") | rope))
    assert (spec.rope_theta, spec.rope_scaling) == (5e6, ())


def test_head_dim_defaults_differ_between_families(tmp_path):
    assert read_model_spec(write_config(tmp_path, without(BASE, "head_dim"))).head_dim == 128
    assert read_model_spec(write_config(tmp_path, without(BASE | MOE, "head_dim"))).head_dim == 6


@pytest.mark.parametrize(
    ("change", "biases", "qk_norm"),
    [
        ({}, (False, False, False), True),
        ({"attention_bias": True}, (True, True, False), True),
        (MOE | {"attention_bias": True}, (True, True, False), True),
        (QWEN2, (True, False, False), False),
        (QWEN2 | {"attention_bias": False}, (True, False, False), False),  # transformers' Qwen2 asks no such key
        (LLAMA, (False, False, False), False),
        (LLAMA | {"attention_bias": True}, (True, True, False), False),
        (LLAMA | {"mlp_bias": True}, (False, False, True), False),
    ],
)
def test_biases_and_qk_norm_are_the_family_s(tmp_path, change, biases, qk_norm):
    spec = read_model_spec(write_config(tmp_path, BASE | change))
    assert (spec.attention_bias, spec.output_bias, spec.mlp_bias) == biases
    assert spec.qk_norm == qk_norm and spec.head_dim == 6


def test_rope_variants_come_with_their_defaults(tmp_path):
    spec = read_model_spec(write_config(tmp_path, BASE | {"rope_parameters": YARN}))
    assert dict(spec.rope_scaling) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": pytest.approx(1.1386294361),  # 0.1 ln 4 + 1
    }
    old = without(BASE, "rope_parameters") | {"rope_theta": 5e5, "rope_scaling": without(LLAMA3, "rope_theta")}
    spec = read_model_spec(write_config(tmp_path, old | {"original_max_position_embeddings": 32}))
    assert spec.rope_theta == 5e5
    assert dict(spec.rope_scaling) == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def test_only_llama_may_leave_out_the_key_value_heads(tmp_path):
    config = without(BASE, "num_key_value_heads")
    assert read_model_spec(write_config(tmp_path, config | LLAMA)).num_key_value_heads == 4
    with pytest.raises(UserError, match="has no num_key_value_heads"):
        read_model_spec(write_config(tmp_path, config))


@pytest.mark.parametrize("layers", [[3], ["1"], 1])
def test_dense_layers_that_do_not_exist_are_refused(tmp_path, layers):
    with pytest.raises(UserError, match=r"mlp_only_layers .* from 0 to 2"):
        read_model_spec(write_config(tmp_path, BASE | MOE | {"mlp_only_layers": layers}))


def test_several_end_tokens(tmp_path):
    assert read_model_spec(write_config(tmp_path, BASE | {"eos_token_id": [1, 7]})).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ("model_type", "'gpt2'", "qwen3_moe")),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}}, ("rope_type", "'dynamic'")),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_type", "'linear'")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_scaling", "rope_parameters")),
        ({"rope_parameters": [1]}, ("rope_parameters", "[1]")),
        ({"rope_parameters": YARN | {"factor": None}}, ("factor", "None")),
        ({"rope_parameters": YARN | {"factor": "4"}}, ("factor", "'4'")),
        ({"rope_parameters": YARN | {"beta_fats": 32}}, ("beta_fats", "yarn")),
        ({"rope_parameters": YARN | {"beta_slow": 40}}, ("beta_fast", "32", "40")),
        ({"rope_parameters": YARN | {"truncate": 1}}, ("truncate", "1")),
        ({"rope_parameters": YARN | {"attention_factor": -1.0}}, ("attention_factor", "-1.0")),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0.5}}, ("original_max", "0.5")),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, ("high_freq_factor", "1.0")),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, ("low_freq_factor", "None")),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 1, 1]}}, ("mrope_section", "default")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        (QWEN2 | {"head_dim": 8}, ("head_dim", "8", "6")),
        ({"attention_bias": "yes"}, ("attention_bias", "'yes'")),
        ({"use_sliding_window": True}, ("use_sliding_window",)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"hidden_size": "24"}, ("hidden_size", "'24'")),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path, change, words):
    with pytest.raises(UserError) as error:
        read_model_spec(write_config(tmp_path, BASE | change))
    message = str(error.value)
    assert "config.json" in message and "\n" not in message
    for word in words:
        assert word in message


def test_more_experts_chosen_than_there_are(tmp_path):
    with pytest.raises(UserError, match=r"num_experts_per_tok 5 .* 4 experts"):
        read_model_spec(write_config(tmp_path, BASE | MOE | {"num_experts_per_tok": 5}))


def test_missing_and_broken_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        read_model_spec(tmp_path)
