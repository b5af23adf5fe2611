"""Merge several token files that were made with the same tokenizer.

python tools/merge_data.py data/a/a_text_document data/b/b_text_document -o data/both/both

Documents keep the order of the files. If the files differ in dtype, the result has the smallest
dtype that can store all ids. The card lists all sources.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from megatron.cli_errors import command_parser, guarded
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.files import place_of


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add(
        "prefixes",
        type="path",
        nargs="+",
        metavar="PREFIX",
        help="token files, without .bin and .idx",
    )
    add("-o", "--output", type="path", required=True, metavar="PREFIX", help="the merged file")
    add("--overwrite", action="store_true", help="replace an existing file with this name")
    words = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(words)
    output = options.output
    files = list(map(TokenFile, options.prefixes))
    if place_of(output) in map(place_of, options.prefixes):
        raise UserError(f"-o: {output} is one of the files to merge - choose another place")
    tokenizers = [file.meta.get("tokenizer", {}) for file in files]
    for file, tokenizer in zip(files, tokenizers, strict=True):
        if tokenizer.get("hash") != tokenizers[0].get("hash"):
            named = f"{tokenizer.get('type')} {tokenizer.get('hash')}" if tokenizer else "no card"
            raise UserError(
                f"{file.prefix}: was not written by the tokenizer of {files[0].prefix} ({named}) -"
                " prepare all text with the same tokenizer"
            )

    dtype = np.result_type(*(file.dtype for file in files))
    with TokenWriter(output, dtype, overwrite=options.overwrite) as merged:
        for file in files:
            for document in range(len(file)):
                merged.add(file.read(document))
        names = dict.fromkeys(file.meta.get("corpus") or file.prefix.name for file in files)
        card = {
            "corpus": " + ".join(names),
            "tokenizer": tokenizers[0],
            "sources": [source for file in files for source in file.meta.get("sources", [])],
            "dtype": str(merged.dtype),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": ["merge_data.py", *words],
        }
        sizes = [file.text_bytes or 0 for file in files]
        if all(sizes):
            card["text_bytes"] = sum(sizes)
        merged.meta = card if tokenizers[0] else {}
    print(f"{output}: {merged.documents:,} documents, {merged.tokens:,} tokens ({merged.dtype})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
