"""Several token files of one tokenizer as one.

python tools/merge_data.py data/a/a_text_document data/b/b_text_document -o data/both/both

The documents stand in the order of the files. Where the files differ in dtype, the result has the
narrowest one that holds the ids of all. The card lists the sources of all.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.cli_errors import guarded
from megatron.data.merge import merge
from megatron.errors import CONTROL, UserError


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(words)
    if options.name and CONTROL.search(options.name):
        raise UserError(f"--name: {options.name!r} has a control character - choose another")
    merged = merge(
        options.prefixes,
        options.output,
        name=options.name,
        assume_same_tokenizer=options.assume_same_tokenizer,
        overwrite=options.overwrite,
        command=["merge_data.py", *words],
    )
    print(f"{options.output}: {len(merged):,} documents, {merged.tokens:,} tokens ({merged.dtype})")
    if not merged.meta:
        print("no card was written, because none of the files has one")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prefixes", nargs="+", metavar="PREFIX", help="token files, without .bin and .idx")
    add("-o", "--output", required=True, metavar="PREFIX", help="the merged file")
    add("--name", help="how the merged corpus is called; default: the names of all, joined")
    add(
        "--assume-same-tokenizer",
        action="store_true",
        help="also take files without a card that names their tokenizer",
    )
    add("--overwrite", action="store_true", help="replace an earlier file of this name")
    return parser
