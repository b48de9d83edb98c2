"""What ranks and servers do in jobs without training: `rank.py BEHAVIOUR [CONFIG LOG_DIR]`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from megatron_rlvr.checkpoint.stop import REQUEUE, StopRequest

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def _say_and_leave(number: int, frame: object) -> None:
    print("ended by SIGTERM", flush=True)
    sys.exit(9)


def main(behaviour: str) -> int:
    rank = int(os.environ["RANK"])
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    )
    place = {name: os.environ.get(name) for name in names}
    print(json.dumps({**place, "node": os.uname().nodename, "pid": os.getpid()}), flush=True)
    stop = StopRequest()
    stop.listen()
    if behaviour == "crash-of-rank-1" and rank == 1:
        print("the disk is full", flush=True)
        os._exit(7)
    stopped = Path(sys.argv[2]).with_name("stopped")
    if behaviour == "finish-once-stopped" and stopped.exists():
        return 0
    if behaviour == "finish-at-second-start" and int(os.environ.get("SLURM_RESTART_COUNT", "0")):
        return 0
    if behaviour == "finish":
        return 0
    if behaviour == "finish-after-servers":
        while sum("{" in log.read_text() for log in Path(sys.argv[3]).parent.glob("rollout/rank*.log")) < 2:
            time.sleep(0.1)
        return 0
    signal.signal(signal.SIGTERM, _say_and_leave if behaviour == "serve" else signal.SIG_DFL)
    for _ in range(3000):
        time.sleep(0.1)
        if behaviour == "finish-once-stopped" and (stop.requested or stopped.exists()):  # one tells the other
            stopped.touch()
            return REQUEUE
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
