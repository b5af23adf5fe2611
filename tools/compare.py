"""Compare encodings with intervals. See --help, or megatron/commands/compare.py."""

import signal
import sys

from megatron.commands.compare import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
