"""Keep the problems that a model hardly ever solves: at most k successes in n samples (VSR: 1 in 32).

    python tools/hard_subset.py RUN.yaml --out HARD.jsonl [--samples 32] [--most 1] [section.key=value ...]

Model, problems (data.train), prompt format, engine, sampling and verifier are those of the run's config, so that `hard`
means hard for that run; overrides choose others, for example model.path=DIR data.train=PROBLEMS.jsonl. HARD.jsonl gets
the kept lines of the problem file, byte for byte; beside it are

    HARD.summary.json   successes as a histogram, share kept
    HARD.state.jsonl    what has been sampled, on the disk after every engine call

Killed and started again with the same settings, it goes on behind the last finished call and ends with the same files.
With all sampled, another --most only filters again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sampler import Sampler, identity, open_sampler, problem_file, read_prompts, responses_per_call, run_tool
from tqdm import tqdm

from megatron_rlvr.config.load import load_config
from megatron_rlvr.evaluation.journal import Journal
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import Prompt, UserError


def sample_successes(
    sampler: Sampler, prompts: Sequence[Prompt], samples: int, per_call: int, journal: Journal, *, progress: bool = True
) -> None:
    """Journal the successes of every problem in `samples` responses, `per_call` problems at a time.

    Each call has a random stream of its own, named by its first problem, so that order does not matter; calls that the
    journal holds are left out. Raises what Sampler.sample raises.
    """
    done = {row["first"] for row in journal.rows}
    finished = sum(len(row["successes"]) for row in journal.rows)
    with tqdm(
        total=len(prompts), initial=finished, desc="problems", unit="problem", dynamic_ncols=True, disable=not progress
    ) as bar:
        for first in range(0, len(prompts), per_call):
            if first in done:
                continue
            groups = sampler.sample(prompts[first : first + per_call], samples, 0, first)
            successes = [sum(t.score > 0 for t in group.trajectories) for group in groups]
            tokens = sum(t.response_length for group in groups for t in group.trajectories)
            journal.append({"first": first, "successes": successes, "tokens": tokens})
            bar.update(len(groups))


def successes_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Successes of each problem, in the order of the problems."""
    return [count for row in sorted(rows, key=lambda row: row["first"]) for count in row["successes"]]


def kept_lines(path: Path, prompts: Sequence[Prompt], successes: Sequence[int], most: int) -> bytes:
    """The lines of `path` that hold a problem with at most `most` successes, as they stand in it."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [prompt for prompt, count in zip(prompts, successes, strict=True) if count <= most]
    return b"".join(lines[int(prompt.id.rsplit(":", 1)[1]) - 1] for prompt in kept)


def summarise(rows: Sequence[dict[str, Any]], samples: int, most: int) -> dict[str, Any]:
    """Counts and shares; `histogram[s]` problems had s successes."""
    successes = np.array(successes_of(rows))
    kept = int((successes <= most).sum())
    return {
        "problems": len(successes),
        "kept": kept,
        "share_kept": kept / len(successes),
        "most_successes": most,
        "samples": samples,
        "mean_success": float(successes.mean() / samples),
        "mean_response_length": sum(row["tokens"] for row in rows) / (len(successes) * samples),
        "histogram": np.bincount(successes, minlength=samples + 1).tolist(),
    }


def show(summary: dict[str, Any]) -> str:
    """The summary for people: one bar for each number of successes that occurs."""
    largest = max(summary["histogram"])
    lines = [f"{'successes':>9} {'problems':>9}"]
    for successes, count in enumerate(summary["histogram"]):
        if count:
            lines.append(f"{successes:>9} {count:>9,} {'#' * max(1, round(40 * count / largest))}")
    lines.append(
        f"kept {summary['kept']:,} of {summary['problems']:,} problems ({summary['share_kept']:.1%}) with at most "
        f"{summary['most_successes']} successes in {summary['samples']} samples; mean success "
        f"{summary['mean_success']:.1%}, {summary['mean_response_length']:.1f} tokens a response"
    )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="RUN.yaml", type=Path)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--samples", type=int, default=32, help="n: responses to each problem (default 32)")
    parser.add_argument("--most", type=int, default=1, help="k: most successes of a kept problem (default 1)")
    parser.add_argument(
        "--responses-per-call",
        type=int,
        help="responses of one engine call, the most that a kill loses (default 4 * rollout.max_num_seqs); with n, "
        "every problem has its own random stream, whatever its neighbours",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample what is missing, then write the subset and its summary. Raises UserError."""
    chosen = parser().parse_intermixed_args(arguments)
    if not 0 <= chosen.most < chosen.samples:
        raise UserError(f"--most is {chosen.most}, which must be at least 0 and below --samples {chosen.samples}")
    config = load_config(chosen.config, chosen.overrides)
    state = chosen.out.with_suffix(".state.jsonl")
    if chosen.out.exists() and not state.exists():
        raise UserError(f"{chosen.out} exists and was not written by this tool; name another --out")
    prompts, decode = read_prompts(config)
    per_call = max(1, responses_per_call(config, chosen.responses_per_call) // chosen.samples)
    settings = {**identity(config), "samples": chosen.samples, "problems per call": per_call}
    with Journal(state, settings) as journal:
        if sum(len(row["successes"]) for row in journal.rows) < len(prompts):
            with open_sampler(config, decode) as sampler:
                sample_successes(sampler, prompts, chosen.samples, per_call, journal, progress=config.logging.progress)
        rows = journal.rows
        summary = summarise(rows, chosen.samples, chosen.most)
        write_whole(chosen.out, kept_lines(problem_file(config), prompts, successes_of(rows), chosen.most))
        written = json.dumps({**summary, "settings": settings}, indent=2) + "\n"
        write_whole(chosen.out.with_suffix(".summary.json"), written.encode())
    print(show(summary))


if __name__ == "__main__":
    sys.exit(run_tool(main))
