"""Turn text into token files: see --help, or megatron/commands/prepare_data.py."""

import sys

from megatron.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
