from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling

ROOMS_WITH_ONE_FIXTURE = ("parallel", "rollout", "slurm")  # launches, engines, a cluster that all files share


class RoomScheduling(LoadScopeScheduling):
    """Tests that share an expensive fixture run in one process: those of a file, or of such a folder.

    pytest-xdist's own `--dist loadgroup` writes into node ids, which pytest 9.2 no longer lets it.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        folder = Path(path).parts[1]
        return folder if folder in ROOMS_WITH_ONE_FIXTURE else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RoomScheduling:
    config.option.loadscopereorder = False  # by count of tests, which would begin the longest last
    return RoomScheduling(config, log)


@pytest.fixture
def one_rank():
    """A default process group of this process alone, as every rank of a run has one."""
    if dist.is_initialized():  # an engine of an earlier test left it
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
