"""Small checkpoints written by hand: their names and shapes are spelled out here, not taken from the package."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 45,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


def hf_shapes(config):
    """Every tensor of a Qwen3 or Qwen3-MoE checkpoint, as transformers names them."""
    h, d, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        shapes |= {p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)}
        shapes |= {p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h)}
        shapes |= {p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q)}
        if config["model_type"] == "qwen3_moe" and i not in config["mlp_only_layers"]:
            shapes[p + "mlp.gate.weight"] = (config["num_experts"], h)
            blocks, width = (
                [f"{p}mlp.experts.{e}." for e in range(config["num_experts"])],
                config["moe_intermediate_size"],
            )
        else:
            blocks, width = [p + "mlp."], ffn
        for b in blocks:
            shapes |= {b + "gate_proj.weight": (width, h), b + "up_proj.weight": (width, h)}
            shapes[b + "down_proj.weight"] = (h, width)
    return shapes


def random_tensors(config, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in hf_shapes(config).items()}


def write_directory(path: Path, config, tensors, shards=1):
    """A checkpoint directory with tokenizer and generation files; an index when shards > 1."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def fuse(config, tensors):
    """The same tensors with the experts of each layer in two fused tensors."""
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}.mlp.experts."
        if p + "0.gate_proj.weight" not in tensors:
            continue
        n = range(config["num_experts"])
        both = [torch.cat([tensors[f"{p}{e}.gate_proj.weight"], tensors[f"{p}{e}.up_proj.weight"]]) for e in n]
        fused[p + "gate_up_proj"] = torch.stack(both)
        fused[p + "down_proj"] = torch.stack([tensors[f"{p}{e}.down_proj.weight"] for e in n])
    return fused


CONFIGS = {
    "dense": BASE,
    "tied": BASE | {"tie_word_embeddings": True},
    "moe": BASE | MOE,
}
