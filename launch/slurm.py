"""Runs as SLURM jobs: `python -m launch.slurm RUN.yaml --cluster PROFILE.yaml [--submit|--follow] [key=value ...]`.

Everything is rendered into RUN_DIR/slurm and checked there. Without --submit or --follow that is all (--dry-run); the
script can then be submitted by hand. --follow submits, or finds the job that was submitted before, and shows it until
it ends; its exit code is the job's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from launch.cluster import load_profile
from launch.follow import follow
from launch.jobs import KINDS, Request, prepare
from launch.render import TEMPLATES
from launch.secrets import refuse_secrets
from launch.submission import SubmissionFiles, active, submit
from megatron_rlvr.config.load import load_config, read_tree
from megatron_rlvr.config.run_dir import RunFiles
from megatron_rlvr.types import UserError

USER_ERROR = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The options of `python -m launch.slurm`."""
    parser = _Parser(prog="python -m launch.slurm", allow_abbrev=False, description="Runs as SLURM jobs.")
    parser.add_argument("config", metavar="RUN.yaml", type=Path)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*")
    parser.add_argument("--cluster", metavar="PROFILE.yaml", type=Path, required=True, help="see slurm/clusters")
    parser.add_argument("--job", choices=sorted(KINDS), default="train", help="which template (default: train)")
    parser.add_argument("--nodes", type=_positive, help="default: as few as hold the layout")
    parser.add_argument("--dry-run", action="store_true", help="render, check and print the plan (the default)")
    parser.add_argument("--submit", action="store_true", help="and submit")
    parser.add_argument("--follow", action="store_true", help="and submit, and show the job until it ends")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that run_dir holds")
    parser.add_argument("--resume", action="store_true", help="go on from run_dir's newest checkpoint")
    parser.add_argument("--chain", type=_positive, default=1, help="submit so many jobs that take turns")
    parser.add_argument("--sweep", metavar="key=v1,v2", action="append", default=[], help="--job sweep: values to try")
    parser.add_argument("--at-once", type=_positive, help="--job sweep: runs that may run at the same time")
    parser.add_argument("--rollout-nodes", type=_positive, default=1, help="--job disaggregated: nodes of vLLM servers")
    parser.add_argument("--rollout-tensor-parallel", type=_positive, default=1, help="GPUs of a vLLM server")
    parser.add_argument("--conversion", choices=("hf-to-megatron", "megatron-to-hf"), default="hf-to-megatron")
    parser.add_argument("--source", type=Path, help="--job convert: default: model.path")
    parser.add_argument("--target", type=Path, help="--job convert: default: RUN_DIR/convert/CONVERSION")
    parser.add_argument("--templates", type=Path, default=TEMPLATES, help="a directory with templates of your own")
    parser.add_argument("--poll", type=float, default=5.0, help="--follow: seconds between looks at the queue")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may stand on both sides of them."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and rest[0].startswith("-"):
        parser.error(f"{rest[0]} is not known")
    if options.dry_run and (options.submit or options.follow):
        parser.error("--dry-run submits nothing; leave it or --submit and --follow out")
    options.overrides += rest
    return options


def _request(options: argparse.Namespace) -> Request:
    refuse_secrets(read_tree(options.config), str(options.config))
    refuse_secrets(options.overrides, "the command line")
    resume = ["checkpoint.resume=auto"] if options.resume else []
    return Request(
        kind=options.job,
        config=load_config(options.config, [*options.overrides, *resume]),
        profile=load_profile(options.cluster),
        nodes=options.nodes,
        overwrite=options.overwrite,
        sweep=tuple(options.sweep),
        at_once=options.at_once,
        rollout_nodes=options.rollout_nodes,
        rollout_tensor_parallel=options.rollout_tensor_parallel,
        conversion=options.conversion,
        source=options.source,
        target=options.target,
        chain=options.chain,
        templates=options.templates,
        submit=options.submit or options.follow,
    )


def submit_rendered(run_dir: Path, chain: int = 1) -> tuple[str, ...]:
    """Submit what was rendered; the ids. A chain of jobs shares one name, of which one runs at a time."""
    files = SubmissionFiles(run_dir)
    options = ["--dependency=singleton"] if chain > 1 else []
    ids = tuple(submit(files.script, *options) for _ in range(chain))
    files.write_job(replace(files.read_job(), ids=ids))
    print(f"submitted: job {', '.join(ids)}")
    return ids


def run(options: argparse.Namespace) -> int:
    """Do what the command line says; the exit code."""
    request = _request(options)
    files = SubmissionFiles(request.run_dir)
    busy = active(files.read_job()) if files.job.exists() else None
    if busy and options.follow:
        return follow(request.run_dir, options.poll)
    if busy:
        raise UserError(
            f"run_dir {request.run_dir} belongs to {busy}; watch it with --follow, end it with scancel, or name another"
        )
    for line in prepare(request):
        print(line)
    if not request.submit:
        by_hand = "" if RunFiles(request.run_dir).metrics.exists() else f", or by hand: sbatch {files.script}"
        print(f"nothing was submitted; add --submit or --follow{by_hand}")
        return 0
    submit_rendered(request.run_dir, request.chain)
    return follow(request.run_dir, options.poll) if options.follow else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """One command line; 0, 2 for a fault of the user's, with --follow the job's exit code."""
    try:
        return run(_parse(arguments))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("the job goes on; the same command with --follow shows it again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
