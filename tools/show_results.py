"""Show results in one table and one plot. See --help, or megatron/commands/show_results.py."""

import signal
import sys

from megatron.commands.show_results import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
