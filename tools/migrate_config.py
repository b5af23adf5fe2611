"""Rewrite published configuration files in today's spelling: see --help."""

import sys

from megatron.commands.migrate_config import main

if __name__ == "__main__":
    sys.exit(main())
