"""Start a worker module on real gloo ranks through the project's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_ranks(module: str, world_size: int, *arguments: str, log_dir: Path, timeout: int = 600) -> str:
    """Run `python -m module arguments` on `world_size` ranks; returns what they printed, fails the test on an error."""
    launch = (
        "import sys; from pathlib import Path; from launch.local import run_local\n"
        f"sys.exit(run_local([sys.executable, '-m', {module!r}, *{list(arguments)!r}], {world_size}, threads=1, "
        f"log_dir=Path({str(log_dir)!r})))"
    )
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONWARNINGS="ignore", HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, "-c", launch],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    logs = "".join(path.read_text()[-3000:] for path in sorted(log_dir.glob("*.log")))
    assert done.returncode == 0, (
        f"{module} on {world_size} ranks:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}\n{logs}"
    )
    return done.stdout + logs
