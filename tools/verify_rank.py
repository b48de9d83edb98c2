"""One rank of `verify_conversion.py`: `python tools/verify_rank.py JOB.json LOG_DIR`, started by the launcher.

JOB is a list of cases of this world size: {config, reference, activations, result}. Rank 0 writes each result: per
tensor what is wrong with it, per probe how far Megatron is from transformers.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from verify_parameters import compare_parameters, compare_rotary, merge_findings
from verify_reference import FREQUENCIES, LOGITS, probe_names

from launch.failure import write_error
from megatron_rlvr.actor import platform
from megatron_rlvr.actor.context import zigzag_index
from megatron_rlvr.actor.naming import named_parameters
from megatron_rlvr.actor.weights_only import WeightsOnly
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.hf import HFCheckpoint, WeightMap, read_model_spec
from megatron_rlvr.refresh import load_weights
from megatron_rlvr.types import ModelSpec, UserError


class Activations:
    """Megatron's activations at the probes, gathered from the ranks that computed each part of them."""

    def __init__(self, model: WeightsOnly, spec: ModelSpec, tokens: torch.Tensor) -> None:
        from megatron.core import parallel_state as state

        self.model, self.spec, self.tokens = model, spec, tokens
        self.tensor_rank, tensor_size = model.place.tensor_rank, model.place.tensor_size
        group = state.get_context_parallel_group()
        # Replicas compute the same again: only the first one's parts count.
        self.counts = state.get_data_parallel_rank() == 0
        self.positions = zigzag_index([0, tokens.shape[1]], group.size(), group.rank())
        self.my_positions = self.positions.chunk(tensor_size)[self.tensor_rank]  # sequence parallel
        self.local: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def run(self) -> None:
        """One forward pass through Megatron's schedule, over all pipeline stages."""
        from megatron.core import parallel_state as state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks: list[Any] = self.model.chunks
        hooks = [hook for chunk in chunks for hook in self._hooks(chunk.eval())]
        interleaved = len(chunks) > 1
        # The interleaved schedule wants as many micro-batches as stages: the same tokens again, which change nothing.
        count = state.get_pipeline_model_parallel_world_size() if interleaved else 1
        results = get_forward_backward_func()(
            forward_step_func=self._step,
            data_iterator=[iter((None,) * count) for _ in chunks] if interleaved else iter((None,)),
            model=chunks if interleaved else chunks[0],
            num_microbatches=count,
            seq_length=self.tokens.shape[1],
            micro_batch_size=self.tokens.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
        if results:
            self.local[LOGITS] = results[0]
        for hook in hooks:
            hook.remove()

    def whole(self, name: str) -> torch.Tensor:
        """Float32 [B, S, features] of a probe, on the CPU of every rank; a collective.

        Raises RuntimeError unless every position came from exactly one rank.
        """
        batch, length = self.tokens.shape
        logits = name == LOGITS
        width = self._padded_vocabulary() if logits else self.spec.hidden_size
        result = torch.zeros(batch, length, width, device=platform.device())
        written = torch.zeros(length, width, dtype=torch.int32, device=platform.device())
        if self.counts and name in self.local:
            local = self.local[name].float()
            positions, columns = self.positions if logits else self.my_positions, slice(None)
            if logits:
                columns = slice(self.tensor_rank * local.shape[2], (self.tensor_rank + 1) * local.shape[2])
            result[:, positions, columns] = local
            written[positions, columns] += 1
        dist.all_reduce(result)
        dist.all_reduce(written)
        if not (written == 1).all():
            raise RuntimeError(
                f"{name}: the ranks' parts cover {written.min()} to {written.max()} times what they should"
            )
        return result[:, :, : self.spec.vocab_size if logits else None].cpu()

    def _step(self, iterator: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        next(iterator)
        tokens = self.tokens[:, self.positions].to(platform.device())
        positions = self.positions.expand_as(tokens.cpu()).to(platform.device())
        return chunk(tokens, positions, None), lambda output, non_loss_data=True: output.detach()

    def _hooks(self, chunk: Any) -> list[Any]:
        modules = {}
        if chunk.pre_process:
            modules["model.embed_tokens"] = chunk.embedding
        for layer in chunk.decoder.layers:
            name = f"model.layers.{layer.layer_number - 1}"
            modules |= {f"{name}.self_attn": layer.self_attention, f"{name}.mlp": layer.mlp, name: layer}
        if chunk.post_process:
            modules["model.norm"] = chunk.decoder.final_layernorm
        return [module.register_forward_hook(self._keep(name)) for name, module in modules.items()]

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor, extra = output if isinstance(output, tuple) else (output, None)
            if not name.rsplit(".", 1)[-1].isdigit() and extra is not None:
                tensor = tensor + extra  # a bias that the layer adds after the block
            self.local[name] = tensor.detach().transpose(0, 1).clone()  # megatron-core adds the residual in place

        return hook

    def _padded_vocabulary(self) -> int:
        size = self.model.place.tensor_size
        return -(-self.spec.vocab_size // size) * size


def verify(case: dict[str, Any]) -> None:
    """Load the model in the case's layout and compare it; rank 0 writes case["result"]."""
    config = RunConfig.model_validate(case["config"])
    path = config.model.path
    spec = read_model_spec(path)
    model = WeightsOnly(spec, config.actor)
    load_weights(model, HFCheckpoint(path), WeightMap(spec, vocab_multiple=config.actor.tensor_parallel))
    tensors = compare_tensors(model, spec, HFCheckpoint(case["reference"]))
    with safe_open(case["activations"], framework="pt") as file:
        expected_frequencies = file.get_tensor(FREQUENCIES)
        rotary = compare_rotary(model.chunks[0].rotary_pos_emb.inv_freq.float().cpu(), expected_frequencies)
        activations = Activations(model, spec, file.get_tensor("tokens"))
        activations.run()
        real = file.get_tensor("real")
        probes = {}
        for name in probe_names(spec.num_layers):
            found = activations.whole(name)
            if dist.get_rank() == 0:
                probes[name] = distance(found, file.get_tensor(name), real)
    if dist.get_rank() == 0:
        Path(case["result"]).write_text(json.dumps({"tensors": tensors, "rotary": rotary, "probes": probes}))
    dist.barrier()
    model.close(keep_process_group=True)


def compare_tensors(model: WeightsOnly, spec: ModelSpec, reference: HFCheckpoint) -> dict[str, str]:
    """Hugging Face name -> what is wrong with it on any rank, "" where nothing is; a collective."""

    def read(name: str) -> torch.Tensor:
        if name not in known:
            raise KeyError(name)
        return reference.read(name)

    known = set(reference.names())
    mine = compare_parameters(dict(named_parameters(model.chunks)), spec, model.place, read)
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return merge_findings(everyone, known - {"lm_head.weight"} if spec.tie_word_embeddings else known)


def distance(found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> dict[str, float]:
    """How far apart two [B, S, features] are where `real` [B, S] holds.

    max, mean   of |found - expected|
    relative    mean over the root mean square of `expected`; infinite where `found` is not finite
    top1        share of positions with the same largest feature
    """
    found, expected = found[real], expected[real]
    apart = (found - expected).abs().double().nan_to_num(nan=torch.inf)
    return {
        "max": apart.max().item(),
        "mean": apart.mean().item(),
        "relative": (apart.mean() / expected.double().square().mean().sqrt()).item(),
        "top1": (found.argmax(-1) == expected.argmax(-1)).double().mean().item(),
    }


def main(arguments: list[str]) -> int:
    """Run all cases of a job; 0, or 1 or 2 after the error was written."""
    job, log_dir = arguments
    try:
        for case in json.loads(Path(job).read_text()):
            verify(case)
        dist.destroy_process_group()
    except UserError as error:
        write_error(Path(log_dir), int(os.environ["RANK"]), " ".join(str(error).split()), user_error=True)
        return 2
    except Exception:
        write_error(Path(log_dir), int(os.environ["RANK"]), traceback.format_exc(), user_error=False)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
