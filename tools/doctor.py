"""Whether this machine can run a training: see --help."""

import sys

if sys.hexversion < 0x030B0000:  # before anything that an older Python cannot read
    sys.exit(f"python: {sys.version.split()[0]} is too old - use Python 3.11 or newer")

from megatron.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
