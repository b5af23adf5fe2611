"""Write docs/positions.md and its pictures. See --help, or megatron/commands/document_positions.py."""

import sys

from megatron.commands.document_positions import main

if __name__ == "__main__":
    sys.exit(main())
