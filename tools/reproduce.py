"""Set a paper's table beside ours. See --help, or megatron/commands/reproduce.py."""

import sys

from megatron.commands.reproduce import main

if __name__ == "__main__":
    sys.exit(main())
