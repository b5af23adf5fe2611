"""Many runs from one file, trained, evaluated, collected: see --help, or commands/sweep.py."""

import sys

from megatron.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
