"""Are encodings different, and how sure is that? python tools/compare.py A.jsonl B.jsonl … [--against NAME] [-o out.md]: see --help, or megatron/commands/compare.py."""

import signal
import sys

from megatron.commands.compare import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
