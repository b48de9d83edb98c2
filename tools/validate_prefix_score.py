"""Does sigma-hat know how uncertain the outcome of a prefix is? Predicted against measured, for one model.

    python tools/validate_prefix_score.py RUN.yaml --out DIR [--problems 50] [--group-size 8] [--samples 16]
                                          [--experts EXPERTS.jsonl] [section.key=value ...]
    python tools/validate_prefix_score.py --rescore --out DIR

Model, problems (data.train), prompt format, engine, sampling and verifier are those of the run's config. Problems are
sampled in a shuffled order until enough have right and wrong answers. One success and one failure of each are cut at
25, 50 and 75 % of their tokens (the success also at 0 and 100 %, where the closing token is left off), and each prefix
is continued anew. DIR gets

    report.md       correlations, failed prefixes, hint-ratio curve; plots beside it
    result.json     the same numbers, and every prefix with its prediction and outcome
    samples.jsonl   initial groups and continuations, on the disk after every engine call
    config.yaml     the run's config with the overrides

Killed and started again with the same settings, it goes on behind the last finished call. --rescore computes everything
from samples.jsonl again and needs no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefix_analysis import Bootstrap, analyse
from prefix_report import draw, report
from prefix_states import (
    ORDER,
    SHORTEST,
    Plan,
    Response,
    State,
    sample_continuations,
    sample_initial,
    states_of,
)
from sampler import Decode, Sampler, file_digest, identity, open_sampler, read_prompts, responses_per_call, run_tool
from tqdm import tqdm

from megatron_rlvr.config.load import load_config, save_resolved
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.data import load_demonstrations, load_tokenizer
from megatron_rlvr.evaluation.journal import Journal, read_journal
from megatron_rlvr.files import write_whole
from megatron_rlvr.types import Prompt, UserError

Experts = list[tuple[Prompt, Response]]


def read_experts(path: Path, config: RunConfig, prompts: Sequence[Prompt], most: int) -> Experts:
    """At most `most` of the expert trajectories that solve one of `prompts` within the response limit, by the seed.

    Lines for other problems, longer ones, and earlier ones for the same problem are left out. Raises UserError for a
    faulty line, and where nothing is left.
    """
    trajectories = load_demonstrations(
        path,
        load_tokenizer(config.model.path),
        prompt_key=config.data.prompt_key,
        response_key=config.replay.response_key,
        **config.data.prompt_options,
    )
    solved: dict[tuple[int, ...], tuple[int, ...]] = {}
    for trajectory in trajectories:
        mask = trajectory.action_mask
        solved[tuple(trajectory.token_ids[~mask].tolist())] = tuple(trajectory.token_ids[mask].tolist())
    limit = config.rollout.max_response_length
    order = np.random.default_rng([config.seed, ORDER]).permutation(len(prompts))
    found = [(prompt, solved[prompt.token_ids]) for i in order if (prompt := prompts[i]).token_ids in solved]
    fitting = [(prompt, Response(tokens, True)) for prompt, tokens in found if SHORTEST <= len(tokens) <= limit]
    if not fitting:
        raise UserError(
            f"{path} holds no trajectory of {SHORTEST} to {limit} tokens for a problem of data.train; name the file "
            "that belongs to these problems or raise rollout.max_response_length"
        )
    return fitting[:most]


def collect(
    sampler: Sampler, prompts: Sequence[Prompt], experts: Experts, plan: Plan, journal: Journal, *, progress: bool
) -> list[State]:
    """Sample all that the journal lacks; the states whose continuations it then holds. Raises UserError."""
    with tqdm(
        total=plan.problems, desc="problems with mixed outcomes", dynamic_ncols=True, disable=not progress
    ) as bar:
        mixed = sample_initial(sampler, prompts, plan, journal, lambda found: bar.update(found - bar.n))
    states = list(states_of(mixed, experts, sampler.sampling.max_response_length))
    with tqdm(total=len(states), desc="prefixes", unit="prefix", dynamic_ncols=True, disable=not progress) as bar:
        sample_continuations(sampler, states, plan, journal, bar.update)
    return states


def write_results(out: Path, settings: dict[str, Any], rows: Sequence[dict[str, Any]], bootstrap: Bootstrap) -> str:
    """Compute and write report, numbers and plots; the report's text. Raises UserError where there are no samples."""
    result = analyse(rows, bootstrap)
    plots = draw(result, out)
    text = report(result, settings) + "\n".join(f"![{plot.stem}]({plot.name})\n" for plot in plots)
    written = json.dumps({**result, "settings": settings}, indent=1, allow_nan=False) + "\n"
    write_whole(out / "result.json", written.encode())
    write_whole(out / "report.md", text.encode())
    return text


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="RUN.yaml", type=Path, nargs="?")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--problems", type=int, default=50, help="problems with mixed outcomes (default 50)")
    parser.add_argument(
        "--group-size", type=int, help="responses to each problem at first (default rollout.group_size)"
    )
    parser.add_argument("--samples", type=int, default=16, help="continuations of each prefix (default 16)")
    parser.add_argument("--experts", type=Path, help="JSONL of right responses for a second hint-ratio curve")
    parser.add_argument(
        "--responses-per-call",
        type=int,
        help="responses of one engine call, the most that a kill loses (default 4 * rollout.max_num_seqs)",
    )
    parser.add_argument("--resamples", type=int, default=10_000, help="bootstrap resamples (default 10,000)")
    parser.add_argument("--rescore", action="store_true", help="only compute again from DIR/samples.jsonl")
    return parser


def validate(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Sample what is missing; the journal's settings and rows. Raises UserError."""
    if chosen.config is None:
        raise UserError("no config is named; give RUN.yaml, or --rescore to use the samples in --out")
    config = load_config(chosen.config, chosen.overrides)
    per_call = responses_per_call(config, chosen.responses_per_call)
    plan = Plan(chosen.problems, chosen.group_size or config.rollout.group_size, chosen.samples, per_call)
    if min(plan.problems, plan.samples, plan.responses_per_call) < 1 or plan.group_size < 2:
        raise UserError(f"{plan} cannot be sampled; every number must be at least 1, and the group size 2")
    prompts, decode = read_prompts(config)
    experts = [] if chosen.experts is None else read_experts(chosen.experts, config, prompts, plan.problems)
    settings = _settings(config, plan, chosen.experts)
    with Journal(chosen.out / "samples.jsonl", settings) as journal:
        _sample(config, decode, prompts, experts, plan, journal)
        save_resolved(config, chosen.out / "config.yaml")
        return settings, journal.rows


def _settings(config: RunConfig, plan: Plan, experts: Path | None) -> dict[str, Any]:
    digest = None if experts is None else file_digest(experts)
    return {**identity(config), **vars(plan), "experts": digest}


def _sample(
    config: RunConfig, decode: Decode, prompts: Sequence[Prompt], experts: Experts, plan: Plan, journal: Journal
) -> None:
    with open_sampler(config, decode) as sampler:
        collect(sampler, prompts, experts, plan, journal, progress=config.logging.progress)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, or with --rescore only read, then write and print the report. Raises UserError."""
    chosen = parser().parse_intermixed_args(arguments)
    if chosen.resamples < 1:
        raise UserError(f"--resamples is {chosen.resamples}; it must be at least 1")
    settings, rows = read_journal(chosen.out / "samples.jsonl") if chosen.rescore else validate(chosen)
    print(write_results(chosen.out, settings, rows, Bootstrap(chosen.resamples)), end="")


if __name__ == "__main__":
    sys.exit(run_tool(main))
