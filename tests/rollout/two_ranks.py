"""Run by test_vllm_engine under torch.distributed.run: a trainer's process group and an engine on every rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rlvr.rollout import SamplingSettings
from tests.rollout.conftest import make_engine
from tests.rollout.models import contexts, gap, ids_of, tensors_of


def check_collectives() -> None:
    rank = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(rank)
    assert rank.item() == 3


def main() -> None:
    models = [Path(argument) for argument in sys.argv[1:]]
    dist.init_process_group("gloo")
    check_collectives()
    engine = make_engine("vllm", models[0])
    given = contexts(4, seed=40)
    check_collectives()
    groups = engine.generate(given, 2, SamplingSettings(20, seed=dist.get_rank()))
    assert gap(models[0], given, groups) < 1e-5
    everyone = [None, None]
    dist.all_gather_object(everyone, ids_of(groups))
    assert everyone[0] != everyone[1]
    if dist.get_rank() == 0:  # pushes and rollouts are not collective
        engine.update_weights(tensors_of(models[1]).items(), 1)
        assert gap(models[1], given, engine.generate(given, 2, SamplingSettings(20))) < 1e-5
    check_collectives()
    engine.close()
    check_collectives()
    dist.destroy_process_group()
    print("rank done", flush=True)


if __name__ == "__main__":
    main()
