"""Print docs/positions.md from the registry; --write renews it and its pictures (`make docs`).

python tools/document_positions.py --from my_encoding.py    the sections of a file of yours
"""

import sys
from collections.abc import Sequence

from megatron.cli_errors import command_parser, guarded
from megatron.positions import REGISTRY, load_file
from megatron.report.catalogue import page, renew, sections


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--write", action="store_true", help="renew docs/positions.md and docs/positions/*.svg"
    )
    choice.add_argument(
        "--from",
        dest="file",
        type="path",
        metavar="FILE",
        help="a Python file of yours: print what it registers, and nothing else",
    )
    options = parser.parse_args(argv)
    if options.write:
        renew()
        return 0
    if not options.file:
        print(page())
        return 0
    ours = set(REGISTRY)
    load_file(options.file)
    print(sections(REGISTRY.keys() - ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
