"""Show results in one table and one plot. See --help, or megatron/commands/show_results.py."""

import sys

from megatron.commands.show_results import main

if __name__ == "__main__":
    sys.exit(main())
