"""Try on one encoding what every encoding must keep, and report it; exit status 1 where something fails: see --help, or megatron/commands/check_encoding.py."""

import sys

from megatron.commands.check_encoding import main

if __name__ == "__main__":
    sys.exit(main())
