"""Bring a checkpoint from elsewhere in. See --help, or its file in megatron/commands."""

import sys

from megatron.commands.import_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
