"""Run many trainings and evaluations from one file. See --help, or megatron/commands/sweep.py."""

import sys

from megatron.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
