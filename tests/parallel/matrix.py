"""Which updates run in which layouts, all layouts of one world size in one launch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.parallel.models import rollout_batch, write_model
from tests.ranks import run_ranks

Layouts = dict[int, dict[str, dict[str, Any]]]

FEW_TOKENS = 40  # a micro-batch holds one or two sequences
LONE_RESPONSE = (36, 1)  # prompt and response of one sequence: alone in its micro-batch where those hold FEW_TOKENS

# Expert tensor parallelism: tensor_parallel where expert_parallel is 1, else 1, unless it is written out. With
# expert_parallel 1 nothing else is right in megatron-core 0.16.
_EP2_ETP2: dict[str, Any] = {"expert_parallel": 2, "expert_tensor_parallel": 2, "data_parallel": 2}
LAYOUTS: Layouts = {
    1: {
        "one": {},
        "padded": {"batch_layout": "padded"},
        "small_micro_batches": {"micro_batch_tokens": FEW_TOKENS},
        "recompute": {"recompute": "full"},
        "shuffled": {},
    },
    2: {
        "tp2_etp2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
        "tp2_padded": {"tensor_parallel": 2, "batch_layout": "padded"},
        "pp2": {"pipeline_parallel": 2},
        "pp2_vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
        "ep2": {"expert_parallel": 2, "data_parallel": 2},
        "dp2": {"data_parallel": 2},
        "dp2_shuffled_small_micro_batches": {"data_parallel": 2, "micro_batch_tokens": FEW_TOKENS},
        "dp2_distributed_optimizer": {"data_parallel": 2, "distributed_optimizer": True},
        "cp2": {"context_parallel": 2, "micro_batch_tokens": FEW_TOKENS},
        "cp2_padded": {"context_parallel": 2, "batch_layout": "padded"},
    },
    4: {
        "tp2_pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
        "tp2_ep2": {"tensor_parallel": 2, "expert_parallel": 2, "data_parallel": 2},
        "tp2_ep2_etp2": {"tensor_parallel": 2, **_EP2_ETP2},
        "cp2_ep2_etp2": {"context_parallel": 2, **_EP2_ETP2},
        "cp2_tp2_ep2": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
        "cp2_pp2": {"context_parallel": 2, "pipeline_parallel": 2},
        "cp4": {"context_parallel": 4},
    },
}
LOSSES: dict[str, dict[str, Any]] = {
    "respo": {"name": "respo"},
    "grpo": {"name": "grpo", "aggregation": "seq-mean-token-mean"},
    "grpo_decoupled": {"name": "grpo", "hyperparameters": {"clip_low": 0.1, "clip_high": 0.14}},
    "gspo": {"name": "gspo", "aggregation": "seq-mean-token-mean"},
    "vespo": {"name": "vespo", "aggregation": "seq-mean-token-sum"},
    "cispo": {"name": "cispo", "hyperparameters": {"weight_high": 1.1}},
    "pg": {"name": "pg"},
    "proximal_kl": {"name": "proximal_kl"},
    "proximal_kl_horizon": {"name": "proximal_kl", "hyperparameters": {"horizon": 8, "tail_decay": True}},
    "sft": {"name": "sft"},
}
WITH_REFERENCE = ("grpo_decoupled", "proximal_kl", "proximal_kl_horizon")

AUX_COEFFICIENT = 0.3
ONE_MICRO_BATCH, TWO_MICRO_BATCHES = 400, 160
_TWO: dict[str, Any] = {"data_parallel": 2, "micro_batch_tokens": TWO_MICRO_BATCHES}
# The load-balancing loss is a mean over micro-batches: layouts are compared where these hold the same sequences.
AUX_LAYOUTS: Layouts = {
    1: {
        "one": {},
        "two_micro_batches": {"micro_batch_tokens": TWO_MICRO_BATCHES},
        "padded": {"batch_layout": "padded"},
        "recompute": {"recompute": "full"},
    },
    2: {
        "tp2_etp2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
        "tp2_padded": {"tensor_parallel": 2, "batch_layout": "padded"},
        "cp2": {"context_parallel": 2},
        "pp2": {"pipeline_parallel": 2},
        "ep2": {"expert_parallel": 2, **_TWO},
    },
    4: {
        "tp2_ep2_etp2": {"tensor_parallel": 2, **_EP2_ETP2, **_TWO},
        "cp2_ep2_etp2": {"context_parallel": 2, **_EP2_ETP2, **_TWO},
        "cp2_tp2_ep2": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2},
        "tp2_pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    },
}
# Tokens scored under the truncated softmax: the nucleus spans tensor ranks, its tokens lie on context-parallel ones.
NUCLEUS = {"loss": {"logprob_temperature": 0.8}, "rollout": {"temperature": 0.8, "top_p": 0.7, "top_k": 40}}
NUCLEUS_LAYOUTS: Layouts = {
    1: {"one": {}},
    2: {"cp2": {"context_parallel": 2}, "pp2": {"pipeline_parallel": 2}},
    4: {"cp2_tp2": {"context_parallel": 2, "tensor_parallel": 2}},
}
COMPARED_WITH = ("one", "two_micro_batches")


@dataclass(frozen=True)
class Matrix:
    """Folders with a model, a batch and what every layout made of them (see `update_worker`)."""

    layouts: Path
    aux: Path
    nucleus: Path


def run_matrix(root: Path, names: Collection[str] | None = None) -> Matrix:
    """The layouts of both tests (or those of these names, and what they are compared with), a launch per world size."""
    matrix = Matrix(root / "layouts", root / "aux", root / "nucleus")
    write_model(matrix.layouts / "model", dense_layers=(1,))
    write_jobs(matrix.layouts, _chosen(LAYOUTS, names), LOSSES, {"micro_batch_tokens": 130}, extra=[LONE_RESPONSE])
    write_model(matrix.aux / "model")
    actor = {"micro_batch_tokens": ONE_MICRO_BATCH, "moe_aux_loss_coeff": AUX_COEFFICIENT}
    write_jobs(matrix.aux, _chosen(AUX_LAYOUTS, names), {"pg": LOSSES["pg"]}, actor, lack=1)
    write_model(matrix.nucleus / "model")
    write_jobs(matrix.nucleus, _chosen(NUCLEUS_LAYOUTS, names), {"pg": LOSSES["pg"]}, {}, count=6, sections=NUCLEUS)
    for world_size in LAYOUTS:
        jobs = [folder / f"job{world_size}.json" for folder in (matrix.layouts, matrix.aux, matrix.nucleus)]
        wanted = [str(job) for job in jobs if json.loads(job.read_text())["layouts"]]
        if wanted:
            run_ranks("tests.parallel.update_worker", world_size, *wanted, log_dir=root / f"logs{world_size}")
    return matrix


def _chosen(layouts: Layouts, names: Collection[str] | None) -> Layouts:
    return {
        size: {name: layout for name, layout in group.items() if names is None or name in {*names, *COMPARED_WITH}}
        for size, group in layouts.items()
    }


def write_jobs(
    folder: Path,
    layouts: Layouts,
    losses: Mapping[str, Any],
    actor: dict[str, Any],
    *,
    count: int = 12,
    lack: int | None = None,
    extra: Sequence[tuple[int, int]] = (),
    sections: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A rollout batch of the model in `folder` and one job for `update_worker` per world size."""
    model = folder / "model"
    (folder / "results").mkdir()
    with open(folder / "batch.pickle", "wb") as file:
        pickle.dump(rollout_batch(model, count=count, lack=lack, extra=extra), file)
    config = {
        "run_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"train": "unused"},
        "actor": {"dtype": "float32", **actor},
        "optimizer": {"lr": 1e-3},
        **sections,
    }
    job = {"config": config, "folder": str(folder), "losses": losses, "with_reference": WITH_REFERENCE}
    for world_size, group in layouts.items():
        (folder / f"job{world_size}.json").write_text(json.dumps({**job, "layouts": group}))


def load_batch(folder: Path) -> list:
    """The trajectories that every layout trained on."""
    with open(folder / "batch.pickle", "rb") as file:  # written above
        return pickle.load(file)
