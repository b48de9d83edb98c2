from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.mini import MiniSlurm, missing
from tests.slurm.runs import NODES, make_inputs


@pytest.fixture(scope="session")
def cluster():
    """A real SLURM cluster of five false eight-GPU nodes."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as root:
        mini = MiniSlurm(Path(root), NODES)
        try:
            mini.up()
            yield mini
        finally:
            mini.down()


@pytest.fixture(scope="module")
def root(cluster: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model and data on the cluster; this process stands on its login node."""
    path = tmp_path_factory.mktemp("jobs")
    make_inputs(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environment[name])
        yield path
