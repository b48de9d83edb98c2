from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank():
    """A default process group of this process alone, as every rank of a run has one."""
    if dist.is_initialized():  # an engine of an earlier test left it
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
