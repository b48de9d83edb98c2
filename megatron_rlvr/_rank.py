"""One rank of a run: `python -m megatron_rlvr._rank COMMAND CONFIG.yaml LOG_DIR`, started by the launcher.

For the command `convert` the second argument is a job file instead of a config.

A failure is left in LOG_DIR for the launcher to show; the exit code is 2 for a fault of the user's, 1 for a crash, and
75 for a run that SIGUSR1 stopped at a checkpoint and that wants to be started again.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from launch.failure import write_error
from megatron_rlvr.checkpoint.stop import REQUEUE, StopRequest
from megatron_rlvr.config.load import load_config
from megatron_rlvr.config.tree import RunConfig
from megatron_rlvr.types import UserError


def run_command(command: str, file: Path, stop: StopRequest) -> int:
    """Do this rank's part of `command`, which `file` describes; the exit code."""
    if command == "convert":
        from megatron_rlvr.convert import run_job

        run_job(file)
        return 0
    return run_config(command, load_config(file), stop)


def run_config(command: str, config: RunConfig, stop: StopRequest) -> int:
    """Do this rank's part of a run; the exit code."""
    if command == "sft":
        from megatron_rlvr.sft import sft

        sft(config)
    elif command == "eval":
        from megatron_rlvr.trainer import evaluate

        evaluate(config)
    else:
        from megatron_rlvr.trainer import train

        return 0 if train(config, stop) else REQUEUE
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run one rank; 0 or 75, or 1 or 2 after the error was written."""
    command, config, log_dir = arguments
    rank = int(os.environ["RANK"])
    stop = StopRequest()
    stop.listen()
    try:
        return run_command(command, Path(config), stop)
    except UserError as error:
        write_error(Path(log_dir), rank, " ".join(str(error).split()), user_error=True)
        return 2
    except Exception:
        write_error(Path(log_dir), rank, traceback.format_exc(), user_error=False)
        return 1


if __name__ == "__main__":
    faulthandler.enable()
    # On a CPU that is as it should be, and `doctor` says it for every machine.
    warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
    code = main(sys.argv[1:])
    if code not in (0, REQUEUE):  # a failed rank must not wait for threads, engines or peers on its way out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
