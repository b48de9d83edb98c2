from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.slurm.mini import MiniSlurm, missing
from tests.slurm.runs import NODES


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
