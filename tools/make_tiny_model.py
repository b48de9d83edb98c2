"""Write a tiny model with its own small tokenizer as a Hugging Face directory.

    python tools/make_tiny_model.py OUT [--family qwen3_moe] [--layers 4] [--experts 8] [--hidden 64] [--seed 0]

Random weights, for tests and the quickstart: it has to be trained before it says anything. Needs no network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

# Not qwen2: beside that model type transformers replaces the rules by which this tokenizer cuts text.
FAMILIES = ("qwen3_moe", "qwen3", "llama")
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
# Numbers below 100 and the opening of the box are one token each, as large vocabularies group digits and frequent text.
BOX = "\\boxed{"
NUMBERS = tuple(str(n) for n in range(100))
CHARACTERS = " \n+-*/=,.:;()[]{}^\\boxed"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Numbers, the characters of generated arithmetic and the box; text made of them decodes to itself."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, BOX, *NUMBERS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = Regex(r"\\boxed\{|[1-9][0-9]|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """The model's sizes; an explicit head_dim and fewer key-value than query heads, as the published models have."""
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": args.max_positions,
        # Positions of the task end at 30: a published theta would leave most of the head turning too slowly to matter.
        "rope_theta": 100.0,
        "tie_word_embeddings": args.tied,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if args.family == "qwen3_moe":
        shared |= {
            "num_experts": args.experts,
            "num_experts_per_tok": args.top_k,
            "moe_intermediate_size": args.moe_intermediate,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
        }
    return AutoConfig.for_model(args.family, **shared)


@torch.no_grad()
def initialise(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight; transformers' 0.02 is made for wide models and would leave the routing of this one flat."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
            continue
        weight.copy_(torch.randn(weight.shape, generator=generator) * _standard_deviation(name, weight.shape[-1]))


def _standard_deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 0.5
    if "mlp.gate.weight" in name:
        return 2.0 * fan_in**-0.5
    writes_to_residual = "o_proj" in name or "down_proj" in name
    return (0.5 if writes_to_residual else 1.0) * fan_in**-0.5


def make_tiny_model(args: argparse.Namespace) -> int:
    """Write the directory args.out and return the number of parameters."""
    tokenizer = build_tokenizer()
    config = build_config(args, tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    initialise(model, args.seed)
    model.to(getattr(torch, args.dtype)).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    return sum(weight.numel() for weight in model.parameters())


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a tiny checkpoint with random weights.")
    parser.add_argument("out", type=Path, help="directory to write")
    sizes = {
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "kv-heads": 2,
        "head-dim": 32,
        "intermediate": 128,
        "experts": 8,
        "top-k": 2,
        "moe-intermediate": 32,
        "max-positions": 256,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe", help="model_type; default qwen3_moe")
    parser.add_argument("--tied", action="store_true", help="output layer tied to the embedding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = parser().parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} already exists; choose another directory or remove it.")
    print(f"{args.out}: {make_tiny_model(args):,} parameters")


if __name__ == "__main__":
    main()
