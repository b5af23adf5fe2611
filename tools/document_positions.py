"""Print docs/positions.md from the registry; --write renews it and its pictures (`make docs`): see --help, or megatron/commands/document_positions.py."""

import sys

from megatron.commands.document_positions import main

if __name__ == "__main__":
    sys.exit(main())
