"""Compare the Megatron model that a Hugging Face directory becomes with what transformers makes of it.

    python tools/verify_conversion.py HF_DIR [--layout tensor_parallel=2 ...]... [--reference HF_DIR] [--tokens FILE]

For every --layout (default: one rank) it starts the ranks on this machine, loads the model as a run does, and compares
every tensor that a rank holds, the rotary frequencies, the hidden states around every layer, and the logits. Exit code
0: the same; 1: something differs, the first such tensor and layer are named; 2: the directory cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verify_reference import LOGITS, reference_activations

from megatron_rlvr.config.checks import check_known_faults, check_layout, check_model, installed_version
from megatron_rlvr.config.load import build_config, with_overrides
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import HFCheckpoint, read_model_spec
from megatron_rlvr.types import UserError

# Relative mean difference of a probe. bf16: rounding adds up over the layers, and some tokens reach other experts.
TOLERANCES = {"float32": 1e-5, "bf16": 0.03}


def check_files(path: Path) -> HFCheckpoint:
    """Open a directory and refuse, naming the tensor, files that are not the whole model of config.json."""
    checkpoint, spec = HFCheckpoint(path), read_model_spec(path)
    checkpoint.check_complete(spec)
    if spec.tie_word_embeddings and "lm_head.weight" in checkpoint.names():
        head, embedding = (checkpoint.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        rows = (head != embedding).any(1)
        if rows.any():
            raise UserError(
                f"{path}: lm_head.weight differs from model.embed_tokens.weight in {int(rows.sum())} of {len(rows)} "
                "rows, but config.json ties them; set tie_word_embeddings to false or remove the head."
            )
    return checkpoint


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for an option that nothing can be done with."""
    for name in ("sequences", "length", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; give a positive integer.")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise UserError(f"--tolerance is {args.tolerance}; give a number that is not negative, such as 1e-5.")
    kind = args.device.split(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device is {args.device}, which this machine does not have; use --device cpu.")


def check_same_sizes(path: Path, reference: Path) -> None:
    """Raise UserError unless both models give activations of one shape at the same layers."""
    mine, other = read_model_spec(path), read_model_spec(reference)
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if getattr(mine, name) != getattr(other, name):
            raise UserError(
                f"{reference} has {name} {getattr(other, name)} but {path} has {getattr(mine, name)}; let --reference "
                "name a checkpoint of the same model."
            )


def read_tokens(args: argparse.Namespace, vocab_size: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids [B, S], True where real [B, S]): the file's, or random ones; S is a multiple of `multiple`."""
    sequences = _token_file(args.tokens, vocab_size) if args.tokens else _random(args, vocab_size)
    length = -(-max(map(len, sequences)) // multiple) * multiple
    tokens, real = torch.zeros(len(sequences), length, dtype=torch.int64), torch.zeros(len(sequences), length).bool()
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], real[row, : len(sequence)] = torch.tensor(sequence), True
    return tokens, real


def _random(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.sequences, args.length)
    return torch.randint(0, vocab_size, shape, generator=generator).tolist()


def _token_file(file: Path, vocab_size: int) -> list[list[int]]:
    try:
        sequences = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error}); give a list of lists of token ids.") from error
    rows = sequences if isinstance(sequences, list) else []
    for row in rows:
        ids = row if isinstance(row, list) and row else [None]
        bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if bad:
            raise UserError(f"{file} has {bad[0]!r} where a token id below {vocab_size} must stand; correct the file.")
    if not rows:
        raise UserError(f"{file} holds no sequences; give a list of lists of token ids.")
    return rows


def layout_config(path: Path, layout: Sequence[str], dtype: str) -> RunConfig:
    """The run configuration of one layout, checked against the model."""
    tree: dict[str, Any] = {"run_dir": str(path), "model": {"path": str(path)}, "data": {}, "actor": {"dtype": dtype}}
    config = build_config(with_overrides(tree, [f"actor.{override}" for override in layout]))
    spec = read_model_spec(path)
    check_layout(config.actor)
    check_model(config, spec, "sft")
    check_known_faults(config.actor, spec, installed_version("megatron-core"))
    return config


def prepare(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Check the directories, let transformers compute, and describe one case per layout."""
    check_arguments(args)
    path, reference = args.hf_dir.absolute(), (args.reference or args.hf_dir).absolute()
    configs = [layout_config(path, layout, args.dtype) for layout in args.layout or [[]]]
    for directory in {path, reference}:
        check_files(directory)
    check_same_sizes(path, reference)
    multiple = math.lcm(*(c.actor.sequence_multiple * c.actor.tensor_parallel for c in configs))
    tokens, real = read_tokens(args, read_model_spec(reference).vocab_size, multiple)
    file = folder / "activations.safetensors"
    activations = reference_activations(reference, tokens, args.dtype, args.device)
    save_file({**activations, "tokens": tokens, "real": real}, file)
    return [
        {
            "name": " ".join(layout) or "one rank",
            "config": config.model_dump(mode="json"),
            "reference": str(reference),
            "activations": str(file),
            "result": str(folder / f"result{number}.json"),
        }
        for number, (layout, config) in enumerate(zip(args.layout or [[]], configs, strict=True))
    ]


def launch(cases: Sequence[dict[str, Any]], folder: Path, threads: int) -> int:
    """Run the cases, those of one world size in one launch; the first exit code that is not 0."""
    from launch.local import run_local

    sizes: dict[int, list[dict[str, Any]]] = {}
    for case in cases:
        sizes.setdefault(RunConfig.model_validate(case["config"]).actor.world_size, []).append(case)
    for size, group in sizes.items():
        job = folder / f"job{size}.json"
        job.write_text(json.dumps(group))
        command = [sys.executable, str(Path(__file__).with_name("verify_rank.py")), str(job), str(folder)]
        code = run_local(command, size, threads=threads, log_dir=folder)
        if code:
            return code
    return 0


def first_divergence(probes: dict[str, dict[str, float]], tolerance: float) -> str | None:
    """The first probe of the forward pass whose relative difference is above `tolerance`."""
    return next((name for name, found in probes.items() if not found["relative"] <= tolerance), None)


def report(result: dict[str, Any], tolerance: float) -> list[str]:
    """What a person wants to read of one case; the faults last, none where nothing differs."""
    logits, wrong = result["probes"][LOGITS], [text for text in result["tensors"].values() if text]
    lines = [
        f"  tensors: {len(result['tensors']) - len(wrong)} equal, {len(wrong)} not",
        f"  logits: max difference {logits['max']:.3g}, mean {logits['mean']:.3g}; top-1 equal {logits['top1']:.2%}",
    ]
    first = first_divergence(result["probes"], tolerance)
    if first is None:
        largest = max(result["probes"], key=lambda name: result["probes"][name]["relative"])
        lines.append(f"  no layer differs; largest: {largest}, {result['probes'][largest]['relative']:.3g} in the mean")
    return lines + [f"  WRONG {text}" for text in faults(result, tolerance)]


def faults(result: dict[str, Any], tolerance: float) -> list[str]:
    """One sentence per thing that differs, tensors first; where all tensors are equal, the layer has to do."""
    found = [text for text in result["tensors"].values() if text]
    found += [result["rotary"]] if result["rotary"] else []
    first = first_divergence(result["probes"], tolerance)
    if first is not None:
        apart = result["probes"][first]
        found.append(
            f"{first}: first divergence in the forward pass, max {apart['max']:.3g}, mean {apart['mean']:.3g} "
            f"({apart['relative']:.3g} of the activations' size, allowed {tolerance:g})"
        )
    return found


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("hf_dir", metavar="HF_DIR", type=Path, help="directory that Megatron loads")
    options.add_argument("--reference", type=Path, help="directory that transformers loads (default: HF_DIR)")
    options.add_argument(
        "--layout", nargs="+", action="append", metavar="key=value", help="keys of the actor section; may be repeated"
    )
    options.add_argument("--tokens", type=Path, help="JSON file with a list of lists of token ids (default: random)")
    for name, default in (("sequences", 2), ("length", 64), ("seed", 0), ("threads", 1)):
        options.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32", help="default float32")
    options.add_argument("--device", default="cpu", help="where transformers computes (default: cpu)")
    options.add_argument("--tolerance", type=float, help=f"of the relative mean difference (default: {TOLERANCES})")
    return options


def run(args: argparse.Namespace) -> int:
    """All layouts of one command line; prints the report and returns the exit code."""
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    with tempfile.TemporaryDirectory(prefix="verify_conversion_") as name:
        cases = prepare(args, Path(name))
        code = launch(cases, Path(name), args.threads)
        if code:
            return code
        results = [json.loads(Path(case["result"]).read_text()) for case in cases]
    for case, result in zip(cases, results, strict=True):
        print(f"{args.hf_dir} [{case['name']}]", *report(result, tolerance), sep="\n")
    return 1 if any(faults(result, tolerance) for result in results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the same, 1: something differs, 2: a fault of the user's, in one sentence."""
    try:
        return run(parser().parse_args(arguments))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
