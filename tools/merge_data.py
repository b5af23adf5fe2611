"""Merge several token files of one tokenizer.

python tools/merge_data.py data/a/a_text_document data/b/b_text_document -o data/both/both

The documents keep the order of the files. If the files differ in dtype, the result has the
narrowest one that holds all ids. The card lists the sources of all.
"""

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from megatron.cli_errors import command_parser, guarded
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.files import place_of, sha256_of

log = logging.getLogger(__name__)


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    """Write all documents of some token files, in this order.

    Raises UserError if the files are not of one tokenizer, or one cannot be read. Then nothing
    has changed on disk.
    """
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
    add(
        "--assume-same-tokenizer",
        action="store_true",
        help="also merge files without a card that names their tokenizer",
    )
    add("--overwrite", action="store_true", help="replace an earlier file of this name")
    words = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(words)
    prefixes, output = options.prefixes, options.output
    places = {place_of(prefix) for prefix in [*prefixes, output]}
    if len(prefixes) < 2 or len(places) <= len(prefixes):
        raise UserError(
            "merge_data.py: give two prefixes or more, each once, and for -o another place"
        )
    files = list(map(TokenFile.open, prefixes))
    tokenizer = {}
    for file in files:
        writer = file.meta.get("tokenizer", {})
        if not writer and not options.assume_same_tokenizer:
            raise UserError(
                f"{file.prefix}: has no .json that names its tokenizer - if it is that of the"
                " other files, add --assume-same-tokenizer"
            )
        if writer and tokenizer and writer.get("hash") != tokenizer.get("hash"):
            raise UserError(
                f"{file.prefix}: was written by another tokenizer ({writer.get('type')}"
                f" {writer.get('hash')}, not {tokenizer.get('type')} {tokenizer.get('hash')}),"
                " whose ids mean different text - prepare all of the text with one of them"
            )
        tokenizer = tokenizer or writer

    sources = []
    uses = Counter()  # how many of the files have a source, by its sha256
    dtype = np.result_type(*(file.dtype for file in files))
    with TokenWriter(output, dtype, overwrite=options.overwrite) as merged:
        for prefix in prefixes:
            # Ids of a file without a card must be in the vocabulary, too.
            file = TokenFile.open(prefix, vocab=tokenizer.get("vocab_size"))
            for document in range(len(file)):
                merged.add(file.read(document))
            sources_of_file = file.meta.get("sources")
            if not sources_of_file:
                path = Path(f"{prefix}.bin")
                size, sha256 = path.stat().st_size, sha256_of(path)
                sources_of_file = [{"path": str(path), "bytes": size, "sha256": sha256}]
            sources += sources_of_file
            uses.update({source["sha256"] for source in sources_of_file})
        if tokenizer:
            names = dict.fromkeys(file.meta.get("corpus") or file.prefix.name for file in files)
            merged.meta = {
                "corpus": " + ".join(names),
                "tokenizer": tokenizer,
                "sources": sources,
                "dtype": str(merged.dtype),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": ["merge_data.py", *words],
            }
            sizes = [file.text_bytes or 0 for file in files]
            if all(sizes):
                merged.meta["text_bytes"] = sum(sizes)
    shared = ", ".join(sha256[:12] for sha256, count in uses.items() if count > 1)
    if shared:
        log.warning(
            "several of the files were made from the same sources; documents that more than one of"
            " them took from there are there several times: %s",
            shared,
        )
    print(f"{output}: {merged.documents:,} documents, {merged.tokens:,} tokens ({merged.dtype})")
    if not tokenizer:
        print("no card was written, because none of the files has one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
