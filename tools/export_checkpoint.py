"""Write a checkpoint for transformers. See --help, or its file in megatron/commands."""

import sys

from megatron.commands.export_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
