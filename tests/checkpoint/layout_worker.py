"""One rank: python -m tests.checkpoint.layout_worker FOLDER.

megatron-core's writers import the main module anew in a helper process, so this one imports nothing by itself.
"""

import sys
from pathlib import Path


def main() -> None:
    from tests.checkpoint.moving import move

    move(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
