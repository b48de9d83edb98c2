from __future__ import annotations

import pytest
import torch

from megatron_rlvr.refresh.refresher import Refresher
from megatron_rlvr.rollout.engine import RefreshReport


class Model:
    version = 0

    def weights(self):
        yield "b", [torch.ones(2)]
        yield "a", [torch.zeros(1), torch.full((1,), 5.0)]


class Map:
    def merge(self, name, shards):
        return [(f"hf.{name}", torch.cat(shards))]


class Engine:
    version = 0

    def __init__(self):
        self.received = []

    def update_weights(self, tensors, version):
        self.received.append({name: tensor.tolist() for name, tensor in tensors})
        self.version = version
        return RefreshReport(version, 2, 16, 0.5, "digest")


@pytest.mark.parametrize("interval", [1, 3])
def test_pushes_every_interval_updates_and_not_between(one_rank, interval):
    model, engine = Model(), Engine()
    refresher = Refresher(model, engine, Map(), interval)
    published = []
    for version in range(1, 7):
        model.version = version
        if metrics := refresher.push_if_due():
            published.append(int(metrics["rollout/weight_version"]))
        assert refresher.lag < interval
    assert published == list(range(interval, 7, interval))
    assert engine.received[0] == {"hf.b": [1, 1], "hf.a": [0, 5]}
