from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

ROOMS_WITH_ONE_FIXTURE = ("parallel", "rollout")  # launches and engines that all files of the folder share


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, tests that share an expensive fixture run in one process: those of a file, or of such a folder."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        name = folder if folder in ROOMS_WITH_ONE_FIXTURE else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture
def one_rank():
    """A default process group of this process alone, as every rank of a run has one."""
    if dist.is_initialized():  # an engine of an earlier test left it
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
