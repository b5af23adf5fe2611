"""Check what every encoding must keep, for one encoding. See --help, or megatron/commands/check_encoding.py."""

import sys

from megatron.commands.check_encoding import main

if __name__ == "__main__":
    sys.exit(main())
