"""Write a Qwen3-MoE of a chosen size with random bfloat16 weights, tensor by tensor, as a Hugging Face directory.

    python tools/make_synthetic_checkpoint.py OUT [--size-gb 8] [--layers 6] [--experts 128] [--hidden 2048] ...

For measurements of loading and export, not for training: the sizes are Qwen3-30B-A3B's with fewer layers and a smaller
vocabulary, and the width of the experts is chosen so that all tensors together have the asked size. Memory: one tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from megatron_rlvr.hf import ExportPlan, PartWriter, Skeleton, WeightMap, read_model_spec
from megatron_rlvr.hf.byte_ranges import whole
from megatron_rlvr.hf.checkpoint import SINGLE_FILE
from megatron_rlvr.hf.safetensors_file import build_header
from megatron_rlvr.hf.staging import check_target, staged_directory
from megatron_rlvr.observability.progress import byte_bar
from megatron_rlvr.types import UserError

BLOCK = 1 << 24  # random numbers that are drawn; every tensor is made of them from another place on


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """config.json with the expert width that brings the tensors nearest to --size-gb; a multiple of 16."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "num_experts": args.experts,
        "num_experts_per_tok": min(8, args.experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    attention = 2 * args.hidden * args.head_dim * (args.heads + args.kv_heads)
    others = 2 * args.vocab * args.hidden + args.layers * (attention + args.experts * args.hidden)
    each = 3 * args.hidden * args.experts * args.layers
    width = 16 * round((args.size_gb * 1e9 / 2 - others) / each / 16)
    if width < 16:
        raise UserError(
            f"--size-gb is {args.size_gb:g}, but the model has {2 * others / 1e9:.2f} GB without its experts' width; "
            "raise it or lower --vocab, --layers or --hidden."
        )
    return {**config, "moe_intermediate_size": width}


def write(args: argparse.Namespace) -> int:
    """Write the directory args.out; returns the bytes of its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        companions = Path(folder)
        (companions / "config.json").write_text(json.dumps(config_of(args), indent=2) + "\n")
        (companions / "generation_config.json").write_text('{\n  "eos_token_id": 1\n}\n')
        shapes = WeightMap(read_model_spec(companions)).hf_shapes()
        header = build_header({name: (torch.bfloat16, shape) for name, shape in shapes.items()})
        plan = ExportPlan.of(
            Skeleton(companions, {SINGLE_FILE: header}), max_shard_bytes=round(args.max_shard_gb * 1e9)
        )
        check_target(args.out, companions, plan.tensor_bytes)
        random = torch.randn(BLOCK, generator=torch.Generator().manual_seed(args.seed)).mul_(0.02).bfloat16()
        with (
            staged_directory(args.out) as partial,
            byte_bar(plan.tensor_bytes, "write", shown=sys.stderr.isatty()) as bar,
        ):
            plan.create(partial)
            with PartWriter(plan, partial) as writer:
                for name, shape in shapes.items():
                    bar.update(writer.write(name, whole(shape), _values(name, shape, random)))
    return plan.tensor_bytes


def _values(name: str, shape: tuple[int, ...], random: torch.Tensor) -> torch.Tensor:
    """Ones for a norm; else the random block from a place that the name decides, repeated as often as needed."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    start = zlib.crc32(name.encode()) % len(random)
    if start + count <= len(random):
        return random[start : start + count].view(shape)
    repeats = -(-(start + count) // len(random))
    parts = [random[start:], *[random] * (repeats - 2), random[: start + count - (repeats - 1) * len(random)]]
    return torch.cat(parts).view(shape)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a large random Qwen3-MoE for measurements.")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--size-gb", type=float, default=8.0, help="all tensors together, 1e9 bytes; default 8")
    sizes = {"layers": 6, "experts": 128, "hidden": 2048, "heads": 32, "kv-heads": 4, "head-dim": 128, "vocab": 32768}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a weight file; default 5")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    args = parser().parse_args()
    try:
        print(f"{args.out}: {write(args) / 1e9:.2f} GB")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
