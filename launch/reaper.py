"""A small process that outlives a killed launcher by a moment, to end what the launcher started.

It reads process-group ids from standard input, one a line. When the input ends without the line `done`, the launcher
was killed, and every group is killed too: the ranks and whatever they started. A plain script: no imports of ours.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its input, and only then
    groups = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
