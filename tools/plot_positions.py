"""Draw encodings, or what a checkpoint has learned of its encoding, as PNG and SVG: see --help, or megatron/commands/plot_positions.py."""

import sys

from megatron.commands.plot_positions import main

if __name__ == "__main__":
    sys.exit(main())
