"""The quickstart: make a tiny Qwen3-MoE, warm it up on partly wrong demonstrations, train it with ReSPO, show the gain.

    python examples/quickstart.py [--dir runs/quickstart] [section.key=value ...]

Every step is a command that you could type yourself; they are printed as they run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
CONFIG = EXAMPLES / "quickstart.yaml"
PARTS = ("init", "data", "warm", "run")  # of the directory; an earlier quickstart's are replaced


def run(*command: str | Path) -> float:
    """Run one command, shown first; returns its seconds and leaves with its exit code when it fails."""
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(words)}", flush=True)
    start = time.monotonic()
    code = subprocess.run([sys.executable, *words[1:]]).returncode
    if code:
        sys.exit(code)
    return time.monotonic() - start


def clear(root: Path) -> None:
    """Remove an earlier quickstart from `root`; leaves with exit code 2 where it holds anything else."""
    names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    if (names and not {"init"} <= names <= set(PARTS)) or root.is_file():
        print(f"--dir {root} holds something else than a quickstart; name a directory of its own", file=sys.stderr)
        sys.exit(2)
    for part in PARTS:
        shutil.rmtree(root / part, ignore_errors=True)


def held_out_accuracies(metrics: Path) -> list[float]:
    """Held-out accuracy at every evaluation of a run, in order."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [value for row in rows for name, value in row.items() if name.startswith("val-core/")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all steps in a fresh directory and print held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"), help="everything is written here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to quickstart.yaml")
    options = parser.parse_args(arguments)
    root = options.dir
    clear(root)
    paths = [
        f"run_dir={root}/run",
        f"data.train={root}/data/train.jsonl",
        f"data.validation={root}/data/heldout.jsonl",
        f"sft.demonstrations={root}/data/demonstrations.jsonl",
        f"sft.output={root}/warm",
        *options.overrides,
    ]
    run("python", EXAMPLES.parent / "tools/make_tiny_model.py", root / "init")
    run("python", EXAMPLES / "arithmetic.py", "--out", root / "data")
    warm_up = run("python", "-m", "megatron_rlvr", "sft", CONFIG, f"model.path={root}/init", *paths)
    training = run("python", "-m", "megatron_rlvr", "train", CONFIG, f"model.path={root}/warm", *paths)
    before, *_, after = held_out_accuracies(root / "run/metrics.jsonl")
    print(
        f"\nheld-out accuracy, sampled at temperature 1: {before:.1%} before, {after:.1%} after "
        f"({100 * (after - before):+.1f} points); warm-up {warm_up:.0f} s, training {training:.0f} s\n"
        f"report: {root}/run/report.md   reward curve: {root}/run/plots/   model: {root}/run/model"
    )


if __name__ == "__main__":
    main()
