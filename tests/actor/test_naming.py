import pytest

from megatron_rlvr.actor.naming import canonical_name

LAYER = "decoder.layers.1."


@pytest.mark.parametrize(
    ("local", "canonical"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("module.module.decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("output_layer.weight", "output_layer.weight"),
        (LAYER + "self_attention.linear_qkv.weight", "decoder.layers.5.self_attention.linear_qkv.weight"),
        (LAYER + "self_attention.q_layernorm.weight", "decoder.layers.5.self_attention.q_layernorm.weight"),
        (LAYER + "pre_mlp_layernorm.weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        (LAYER + "self_attention.linear_qkv.bias", "decoder.layers.5.self_attention.linear_qkv.bias"),
        (LAYER + "self_attention.linear_proj.bias", "decoder.layers.5.self_attention.linear_proj.bias"),
        (LAYER + "mlp.linear_fc1.bias", "decoder.layers.5.mlp.linear_fc1.bias"),
        (LAYER + "mlp.router.weight", "decoder.layers.5.mlp.router.weight"),
        (LAYER + "mlp.linear_fc2.weight", "decoder.layers.5.mlp.linear_fc2.weight"),
        # Transformer Engine: fused norms, grouped experts
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", "decoder.layers.5.input_layernorm.weight"),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        (LAYER + "mlp.experts.linear_fc1.weight3", "decoder.layers.5.mlp.experts.local_experts.19.linear_fc1.weight"),
        (LAYER + "mlp.experts.linear_fc2.weight0", "decoder.layers.5.mlp.experts.local_experts.16.linear_fc2.weight"),
        # local spec: one module per expert
        (
            LAYER + "mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.5.mlp.experts.local_experts.19.linear_fc1.weight",
        ),
    ],
)
def test_both_layer_specs_give_global_names(local, canonical):
    assert canonical_name(local, layer_offset=4, expert_offset=16) == canonical


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.weight1",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias",
        "decoder.layers.0.mlp.experts.linear_fc1.bias0",
        "embedding.position_embeddings.weight",
    ],
)
def test_parameters_without_a_counterpart_are_refused(name):
    with pytest.raises(ValueError, match=name):
        canonical_name(name)
