"""What a configuration means and what its run costs: see --help."""

import sys

from megatron.commands.explain_config import main

if __name__ == "__main__":
    sys.exit(main())
