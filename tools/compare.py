"""Compare encodings with intervals. See --help, or megatron/commands/compare.py."""

import sys

from megatron.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
