"""Verify and show the checkpoints of a run. See --help, or its file in megatron/commands."""

import sys

from megatron.commands.inspect_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
