"""The command line: `python -m megatron_rlvr {train,eval,sft,convert,plan,plot,doctor} ...`.

A fault of the user's is one sentence on standard error and exit code 2; nothing is left behind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_rlvr.config.checks import Command, check_config, config_warnings
from megatron_rlvr.config.load import load_config, save_resolved
from megatron_rlvr.config.run_dir import RunDirectory, check_run_dir, check_sft_output, for_command, open_run_dir
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError

USER_ERROR = 2

_RUN_COMMANDS: tuple[tuple[Command, str], ...] = (
    ("train", "train a model from verifiable rewards"),
    ("eval", "evaluate a model on a suite of benchmarks, or a run's model on its held-out problems"),
    ("sft", "supervised warm-up on demonstrations"),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are UserErrors, like any other fault of the command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    parser = _Parser(
        prog="python -m megatron_rlvr",
        allow_abbrev=False,
        description="Reinforcement learning with verifiable rewards.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, meaning in _RUN_COMMANDS:
        command = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        source = "RUN.yaml|SUITE|rescore|compare" if name == "eval" else "RUN.yaml"
        command.add_argument("config", metavar=source, type=Path)
        command.add_argument("overrides", metavar="section.key=value", nargs="*")
        command.add_argument(
            "--overwrite", action="store_true", help="replace the run that run_dir holds, and sft.output"
        )
        if name == "train":
            command.add_argument(
                "--resume", action="store_true", help="go on from run_dir's newest checkpoint (checkpoint.resume=auto)"
            )
    _add_plan(commands.add_parser("plan", help="say whether a run fits on given GPUs, and how long it takes"))
    _add_convert(commands.add_parser("convert", help="Hugging Face checkpoints to Megatron's and back"))
    plot = commands.add_parser(
        "plot", help="draw curves and tables from run directories, seeds of one config as a band"
    )
    plot.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path)
    plot.add_argument("--output", type=Path, help="directory for the page on several runs (default: comparison)")
    plot.add_argument("--ema", type=float, default=0.1, help="weight of the newest value in averages (default: 0.1)")
    commands.add_parser("doctor", help="tell what this machine can run")
    return parser


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("config", metavar="RUN.yaml", type=Path)
    plan.add_argument("overrides", metavar="section.key=value", nargs="*")
    plan.add_argument("--gpu", required=True, help="a row of launch/plan/hardware.py: h100-80g, h200, ...")
    plan.add_argument("--nodes", type=int, default=1, help="nodes of eight GPUs (default: 1)")
    plan.add_argument(
        "--rollout-tensor-parallel", type=int, default=1, help="GPUs of a planned engine (default: 1, as train runs)"
    )
    plan.add_argument("--response-length", type=float, help="mean tokens of a response (default: half the cap)")
    plan.add_argument("--prompt-length", type=float, help="mean tokens of a prompt (default: a quarter of the cap)")


_CONVERSIONS = (
    ("hf-to-megatron", "HF_DIR", "write a sharded distributed checkpoint that any layout loads"),
    ("megatron-to-hf", "CHECKPOINT", "write a Hugging Face directory"),
)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    conversions = convert.add_subparsers(dest="conversion", required=True, metavar="CONVERSION", parser_class=_Parser)
    for name, source, meaning in _CONVERSIONS:
        command = conversions.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        command.add_argument("source", metavar=source, type=Path)
        command.add_argument("target", metavar="OUT", type=Path)
        command.add_argument(
            "overrides", metavar="actor.key=value", nargs="*", help="the layout that converts; default: one rank"
        )
        command.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
        if name == "megatron-to-hf":
            command.add_argument(
                "--max-shard-gb", type=float, help="size of a weight file (default: the files of the original model)"
            )
    _add_quantise(conversions)


def _add_quantise(conversions: Any) -> None:
    meaning = "write a Hugging Face directory in FP8"
    command = conversions.add_parser("quantise", help=meaning, description=meaning, allow_abbrev=False)
    command.add_argument("source", metavar="HF_DIR", type=Path)
    command.add_argument("target", metavar="OUT", type=Path)
    command.add_argument(
        "--to",
        required=True,
        choices=("fp8-block", "fp8-tensor"),
        help="one scale per 128x128 block, or one per tensor through NVIDIA ModelOpt",
    )
    command.add_argument("--pow2", action="store_true", help="fp8-block: scales that are powers of two")
    command.add_argument("--prompts", metavar="FILE.jsonl", type=Path, help="fp8-tensor: prompts to calibrate with")
    command.add_argument("--prompt-key", default="problem", help="fp8-tensor: key of a prompt (default: problem)")
    command.add_argument("--samples", type=int, default=128, help="fp8-tensor: prompts used (default: 128)")
    command.add_argument("--overwrite", action="store_true", help="replace what OUT holds")


def run(command: Command, config: RunConfig, *, overwrite: bool = False) -> int:
    """Check everything that can be checked here, then run `command` on all local ranks; returns their exit code.

    Raises UserError before anything is written.
    """
    config = for_command(config, command)
    in_place = command == "train" and goes_on_in_place(config)
    check_run(config, command, overwrite or in_place)
    _check_devices(config.actor.world_size)
    from launch.local import run_local
    from launch.nsys import rank_wrapper

    wrap = rank_wrapper(config) if command == "train" else None
    with open_run_dir(config.run_dir, in_place=in_place) as directory:
        save_resolved(config, directory.files.config)
        module = [sys.executable, "-m", "megatron_rlvr._rank"]
        arguments = [command, str(directory.files.config), str(directory.files.logs)]
        code = run_local(
            module + arguments,
            config.actor.world_size,
            threads=config.launch.threads,
            log_dir=directory.files.logs,
            wrap=wrap,
        )
        if code != USER_ERROR or _has_updates(directory):
            directory.keep()
    return code


def goes_on_in_place(config: RunConfig) -> bool:
    """True where the run continues the one that run_dir holds. Raises UserError for a checkpoint that does not fit."""
    from megatron_rlvr.checkpoint.finding import continues_in_place, find_checkpoint

    return continues_in_place(config, find_checkpoint(config))


def check_run(config: RunConfig, command: Command, overwrite: bool) -> None:
    """All checks that need no process group and no device: config, model, loss, run directory."""
    from megatron_rlvr.hf.spec import read_model_spec
    from megatron_rlvr.losses import check_hyperparameters
    from megatron_rlvr.rewards import load_function

    check_config(config, command=command)
    check_config(config, read_model_spec(config.model.path), command=command)
    if command != "sft" and config.rewards.function is not None:
        load_function(config.rewards.function)
    if command == "train":
        for warning in _data_warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
    if command == "train":
        warnings = check_hyperparameters(config.loss.name, config.loss.hyperparameters) + config_warnings(config)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        _check_reference(config)
    check_run_dir(config, overwrite)
    if command == "sft":
        check_sft_output(config, overwrite)


def _data_warnings(config: RunConfig) -> list[str]:
    """What is odd about the problems. Raises UserError where they cannot be read or one lacks its answer."""
    from megatron_rlvr.data import data_warnings, load_problems

    data = config.data
    held_out = [source.path for source in config.held_out_sets.values()]
    sources = [source for source in (data.train, *held_out) if source is not None]
    return data_warnings([(str(source), load_problems(source, data.prompt_key, data.answer_key)) for source in sources])


def _check_reference(config: RunConfig) -> None:
    from megatron_rlvr.losses import uses_reference

    horizons = config.loss.variance_horizons
    if not uses_reference(config.loss.name, config.reference.enabled) and horizons:
        raise UserError(
            f"loss.variance_horizons is {horizons}, but loss.name {config.loss.name} runs without a reference policy; "
            "set reference.enabled=true or leave loss.variance_horizons out"
        )


def _check_devices(world_size: int) -> None:
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and world_size > devices:
        raise UserError(
            f"the layout needs {world_size} ranks (actor.tensor_parallel times actor.pipeline_parallel times "
            f"actor.context_parallel times actor.data_parallel), but this machine has {devices} GPUs; make one of them "
            "smaller"
        )


def _has_updates(directory: RunDirectory) -> bool:
    """True once an update was reported: from then on a run directory is worth keeping whatever happened."""
    from megatron_rlvr.observability.series import read_metrics

    return directory.files.metrics.exists() and any(row["step"] > 0 for row in read_metrics(directory.files.root))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may stand on both sides of --overwrite, which argparse alone does not allow."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (rest[0].startswith("-") or "overrides" not in options):
        parser.error(f"{rest[0]} is not known")
    if rest:
        options.overrides += rest
    return options


def _dispatch(options: Any) -> int:
    if options.command == "doctor":
        from megatron_rlvr.doctor import main as doctor

        return doctor()
    if options.command == "plot":
        from megatron_rlvr.observability.report import plot

        for path in plot(options.run_dirs, options.output, options.ema):
            print(path)
        return 0
    if options.command == "plan":
        return _plan(options)
    if options.command == "convert":
        return _quantise(options) if options.conversion == "quantise" else _convert(options)
    if options.command == "eval" and _is_suite(str(options.config)):
        return _suite(options)
    resume = ["checkpoint.resume=auto"] if getattr(options, "resume", False) else []
    config = load_config(options.config, [*options.overrides, *resume])
    return run(options.command, config, overwrite=options.overwrite)


def _is_suite(source: str) -> bool:
    """Whether `eval SOURCE` is of suites. Raises UserError for a name that is neither a file nor a suite."""
    from megatron_rlvr.benchmark import is_command
    from megatron_rlvr.evaluation.suite import suite_names

    if is_command(source):
        return True
    if not Path(source).exists() and not Path(source).suffix:
        raise UserError(f"{source} is no suite; use {', '.join(suite_names())}, a suite's YAML file or a run's")
    return False


def _suite(options: Any) -> int:
    import torch.distributed as dist

    from megatron_rlvr.benchmark import run_command

    try:
        run_command(str(options.config), options.overrides, options.overwrite)
    finally:
        if dist.is_initialized():  # vLLM makes groups and leaves them
            dist.destroy_process_group()
    return 0


def _plan(options: Any) -> int:
    """Print the plan; 2 where the run does not fit."""
    from launch.plan import make_plan, render

    plan = make_plan(
        load_config(options.config, options.overrides),
        options.gpu,
        options.nodes,
        rollout_tensor_parallel=options.rollout_tensor_parallel,
        response_length=options.response_length,
        prompt_length=options.prompt_length,
    )
    print(render(plan))
    return 0 if plan.fits else USER_ERROR


def _convert(options: Any) -> int:
    from launch.local import run_local
    from megatron_rlvr.convert import start

    shard = getattr(options, "max_shard_gb", None)
    if shard is not None and not 0 < shard < float("inf"):
        raise UserError(f"--max-shard-gb is {shard}; give a positive number of gigabytes such as 5.")
    return start(
        options.conversion,
        options.source,
        options.target,
        options.overrides,
        launch=run_local,
        max_shard_bytes=None if shard is None else round(shard * 1e9),
        overwrite=options.overwrite,
    )


def _quantise(options: Any) -> int:
    block = options.to == "fp8-block"
    if block != (options.prompts is None):
        remedy = "leave --prompts out" if block else "name a JSONL file with --prompts"
        raise UserError(f"--to {options.to} {'needs no' if block else 'needs'} prompts to calibrate with; {remedy}.")
    if not block and (options.pow2 or options.samples < 1):
        fault = "--pow2" if options.pow2 else f"--samples {options.samples}"
        raise UserError(f"{fault} does not go with --to fp8-tensor; leave it out.")
    if block:
        from megatron_rlvr.hf.checkpoint import HFCheckpoint
        from megatron_rlvr.hf.quantise import quantise_fp8_block
        from megatron_rlvr.observability.progress import byte_bar

        with byte_bar(HFCheckpoint(options.source).tensor_bytes(), "quantise", shown=True) as bar:
            quantise_fp8_block(
                options.source, options.target, pow2=options.pow2, overwrite=options.overwrite, progress=bar.update
            )
        return 0
    from megatron_rlvr.hf.modelopt_export import quantise_fp8_tensor

    quantise_fp8_tensor(
        options.source,
        options.target,
        options.prompts,
        key=options.prompt_key,
        samples=options.samples,
        overwrite=options.overwrite,
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0, 1 after a crash, 2 after a fault of the user's."""
    try:
        return _dispatch(_parse(arguments))
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130
