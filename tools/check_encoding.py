"""Check what every encoding must keep, for one encoding: see --help."""

import sys

from megatron.commands.check_encoding import main

if __name__ == "__main__":
    sys.exit(main())
