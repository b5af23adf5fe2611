"""Make one HTML page of results. See --help, or megatron/commands/report.py."""

import signal
import sys

from megatron.commands.report import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
