"""Make one HTML page of results. See --help, or megatron/commands/report.py."""

import sys

from megatron.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
