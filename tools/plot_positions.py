"""Draw encodings, what they learned and attention: see --help."""

import sys

from megatron.commands.plot_positions import main

if __name__ == "__main__":
    sys.exit(main())
