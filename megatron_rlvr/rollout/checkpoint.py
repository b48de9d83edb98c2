"""Read what a Hugging Face directory promises: config.json values and the name and shape of every tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_rlvr.types import UserError


def read_config(model_path: Path) -> dict[str, Any]:
    """The parsed config.json. Raises UserError when it is missing or not JSON."""
    path = model_path / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; point model.path at a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None


def check_model_length(config: Mapping[str, Any], max_model_len: int) -> None:
    """Raise UserError when sequences of `max_model_len` tokens go beyond the positions that the model knows."""
    longest = config.get("max_position_embeddings")
    if longest is not None and max_model_len > longest:
        raise UserError(
            f"max_model_len {max_model_len} is more than the model's max_position_embeddings {longest}; "
            "lower data.max_prompt_length or rollout.max_response_length (of a suite: prompt.max_prompt_length or a "
            "benchmark's max_response_length)"
        )


def tensor_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the directory's safetensors files, by name; reads headers only.

    Raises UserError when there is no such file, or one is cut short.
    """
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{model_path} holds no *.safetensors file; save the model in that format")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); download the checkpoint again") from None
    return shapes


def num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values())
