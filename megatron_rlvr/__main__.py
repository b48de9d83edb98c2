"""`python -m megatron_rlvr`."""

import sys

from megatron_rlvr.cli import main

if __name__ == "__main__":
    sys.exit(main())
