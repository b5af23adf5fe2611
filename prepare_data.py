"""Turn text into token files: python prepare_data.py stdlib, or --input FILE --name NAME (see --help)."""

import sys

from megatron.data.prepare import run
from megatron.errors import UserError

if __name__ == "__main__":
    try:
        print(run(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
