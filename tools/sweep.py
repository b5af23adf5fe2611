"""Many runs from one file: encodings x corpora x seeds x sizes, trained, evaluated, collected in one results.jsonl: see --help, or megatron/commands/sweep.py."""

import sys

from megatron.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
