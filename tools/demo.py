"""Show how two encodings extrapolate, in minutes on a CPU: `make demo`."""

import sys

from megatron.commands.demo import main

if __name__ == "__main__":
    sys.exit(main())
