"""Write docs/positions.md and its pictures: see --help."""

import sys

from megatron.commands.document_positions import main

if __name__ == "__main__":
    sys.exit(main())
