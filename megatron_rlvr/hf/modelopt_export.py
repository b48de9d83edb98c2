"""`convert quantise --to fp8-tensor`: one scale per tensor, calibrated and exported by NVIDIA ModelOpt.

ModelOpt works on transformers' model in memory (one GPU's, or the host's). It is an optional dependency.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_rlvr.files import read_json_lines
from megatron_rlvr.hf.checkpoint import HFCheckpoint
from megatron_rlvr.hf.quantise import is_quantised
from megatron_rlvr.hf.skeleton import copy_companions
from megatron_rlvr.hf.spec import read_model_spec
from megatron_rlvr.hf.staging import check_target, staged_directory
from megatron_rlvr.types import UserError

SCALES = ("weight_scale", "input_scale")


def quantise_fp8_tensor(
    source: Path, target: Path, prompts: Path, *, key: str = "problem", samples: int = 128, overwrite: bool = False
) -> None:
    """Write `source` as `target` with one weight scale and one activation scale per layer (`hf_quant_config.json`).

    prompts   JSONL; the first `samples` lines' text under `key` calibrates the activation scales. The experts of a
              layer share them (the largest), so that an expert that no prompt visits has them too

    Raises UserError for a source that is not a complete unquantised model, a target that exists or has no room, prompts
    that cannot be used, a missing ModelOpt, and scales that came out zero or not finite.
    """
    checkpoint = HFCheckpoint(source)
    checkpoint.check_complete(read_model_spec(source))
    check_target(target, source, checkpoint.tensor_bytes(torch.bfloat16) * 2 // 3, overwrite)
    quantization, export = _import_modelopt()
    batches = calibration_tokens(source, prompts, key, samples)
    model = _load(source)

    def calibrate(model: Any) -> None:
        for ids in batches:
            model(ids.to(model.device))

    with torch.inference_mode():
        model = quantization.quantize(model, quantization.FP8_DEFAULT_CFG, calibrate)
        with staged_directory(target) as partial:
            copy_companions(source, partial)
            export.export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=partial)
            check_scales(partial, checkpoint)


def calibration_tokens(source: Path, prompts: Path, key: str, samples: int, longest: int = 2048) -> list[torch.Tensor]:
    """Token ids [1, n] of the first `samples` prompts, cut to `longest` tokens; UserError where there is none."""
    from transformers import AutoTokenizer

    texts = []
    for _, where, row in itertools.islice(read_json_lines(prompts), samples):
        if not isinstance(row.get(key), str) or not row[key]:
            raise UserError(f"{where} has no text under {key!r}; name the key of the prompts with --prompt-key.")
        texts.append(row[key])
    if not texts:
        raise UserError(f"{prompts} has no prompts to calibrate with; give a JSONL file with one prompt a line.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} has no tokenizer that can be read; copy it from the model's source.") from error
    return [torch.tensor([tokenizer(text)["input_ids"][:longest]]) for text in texts]


def check_scales(directory: Path, source: HFCheckpoint) -> None:
    """Refuse, naming the tensor, unless every quantised weight of `source` has two finite scales above zero there."""
    written = HFCheckpoint(directory)
    present = set(written.names())
    for name in filter(is_quantised, source.names()):
        for scale in (f"{name.removesuffix('weight')}{kind}" for kind in SCALES):
            if scale not in present:
                raise UserError(f"ModelOpt gave no {scale}; calibrate with more prompts or use --to fp8-block.")
            value = written.read(scale).float()
            if not torch.isfinite(value).all() or (value <= 0).any():
                raise UserError(
                    f"ModelOpt's {scale} is {value.flatten()[0].item()}; calibrate with more prompts or use "
                    "--to fp8-block."
                )


def _load(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _import_modelopt() -> tuple[Any, Any]:
    try:
        with _quiet():
            from modelopt.torch import export, quantization
    except ImportError as error:
        raise UserError(
            f"--to fp8-tensor needs NVIDIA ModelOpt, which cannot be imported ({error}); install "
            "requirements-modelopt.txt or use --to fp8-block."
        ) from error
    return quantization, export


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without ModelOpt's remarks on import: which transformers it was tested with, which plugins it has no use for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
