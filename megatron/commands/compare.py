"""Are encodings different, and how sure is that? python tools/compare.py A.jsonl B.jsonl … [--against NAME] [-o out.md]

Pairs the losses of the same windows of the same text, as evaluate.py wrote them; the first encoding is the reference.
Several seeds of an encoding are one line; from three common seeds on the runs are compared by seed.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron.errors import UserError
from megatron.files import Beside
from megatron.results.comparison import Comparison, compared, encodings, tables
from megatron.results.files import read_results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="JSON lines that evaluate.py wrote"
    )
    parser.add_argument(
        "--against", metavar="NAME", help="the encoding to compare with; default: the first"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also as .md or .json")
    options = parser.parse_args(argv)
    try:
        found = compared(encodings(read_results(options.results)), options.against)
        if options.output:
            write(found, options.output)
        print(tables(found))
    except UserError as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


def write(found: list[Comparison], path: Path) -> None:
    """As Markdown or JSON, by the suffix."""
    if path.suffix not in (".md", ".json"):
        raise UserError(f"--output: {path} is neither .md nor .json - name it so")
    markdown = path.suffix == ".md"
    text = (
        tables(found, markdown=True)
        if markdown
        else json.dumps([one.plain() for one in found], indent=1)
    )
    with Beside(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
