"""Set a paper's table beside ours. See --help, or megatron/commands/reproduce.py."""

import signal
import sys

from megatron.commands.reproduce import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
