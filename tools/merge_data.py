"""Several token files of one tokenizer as one.

python tools/merge_data.py data/a/a_text_document data/b/b_text_document -o data/both/both

The documents stand in the order of the files. Where the files differ in dtype, the result has the
narrowest one that holds the ids of all. The card lists the sources of all.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron.address import is_address, place_of
from megatron.cli_errors import guarded
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import CONTROL, UserError

COUNTS = ("text_bytes", "blank", "only_space", "skipped")  # of a card; a merged one has their sums


def merge(
    prefixes: Sequence[str | Path],
    output: str | Path,
    *,
    name: str | None = None,
    assume_same_tokenizer: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
) -> TokenFile:
    """Write all documents of some token files, in this order, as OUTPUT.bin, .idx and .json.

    name: of the corpus in the card; None: the names of the corpora, joined
    assume_same_tokenizer: take files whose card is missing; if no file has one, none is written
    command: words of the command line, for the card
    Raises UserError if the files are not of one tokenizer, or one cannot be read. Then nothing
    has changed on disk.
    """
    if len(prefixes) < 2:
        raise UserError("merge_data.py: one file cannot be merged - give two prefixes or more")
    if is_address(str(output)):
        raise UserError(f"-o: {output} is an address - give a place on this machine")
    places = [place_of(str(prefix)) for prefix in [*prefixes, output]]
    if len(set(places)) < len(places):
        raise UserError(
            "merge_data.py: a file is given twice, or is also the output - give each once, and"
            " choose another name for the output"
        )
    files = [TokenFile.open(prefix) for prefix in prefixes]
    writers = [file.meta.get("tokenizer", {}) for file in files]
    hashes = {writer.get("hash") for writer in writers if writer}
    if not all(writers) and not assume_same_tokenizer:
        without = files[writers.index({})]
        raise UserError(
            f"{without.place}: has no .json that names its tokenizer - if it is that of the"
            " other files, add --assume-same-tokenizer"
        )
    if len(hashes) > 1:
        several = [
            f"{file.place}: {writer.get('type')} {writer.get('hash')}"
            for file, writer in zip(files, writers, strict=True)
        ]
        raise UserError(
            "merge_data.py: these files were written by several tokenizers, whose ids mean"
            " different text - prepare all of the text with one of them\n  " + "\n  ".join(several)
        )
    tokenizer: dict[str, Any] = next(filter(None, writers), {})
    vocab = tokenizer.get("vocab_size")  # ids of a file without a card must be below it, too
    dtype = np.result_type(*(file.dtype for file in files))
    sources: list[dict[str, Any]] = []
    with TokenWriter(output, dtype, overwrite=overwrite) as writer:
        for prefix in prefixes:
            file = TokenFile.open(prefix, vocab=vocab)
            digest = hashlib.sha256()
            for document in range(len(file)):
                for ids in file.pieces(document):
                    writer.extend(ids)
                    digest.update(ids.tobytes())
                writer.end_document()
            itself = {
                "path": f"{file.place}.bin",
                "bytes": file.tokens * file.dtype.itemsize,
                "sha256": digest.hexdigest(),
            }
            sources += file.meta.get("sources") or [itself]
        if tokenizer:
            names = dict.fromkeys(file.meta.get("corpus") or file.prefix.name for file in files)
            writer.meta = {
                "corpus": name or " + ".join(names),
                "tokenizer": tokenizer,
                "sources": sources,
                "merged": [_part(file) for file in files],
                **_sums(files),
                "dtype": str(writer.dtype),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": list(command),
            }
    repeated = [key for key, n in Counter(one["sha256"] for one in sources).items() if n > 1]
    if repeated:
        print(
            "warning: sources with the same sha256 are in several of the files, so their documents"
            f" are there several times: {', '.join(one[:12] for one in repeated)}",
            file=sys.stderr,
        )
    return TokenFile.open(output)


def _part(file: TokenFile) -> dict[str, Any]:
    """One of the merged files: where its documents end in the whole follows from the order."""
    facts = {"prefix": file.place, "documents": len(file), "tokens": file.tokens}
    known = {key: file.meta[key] for key in ("corpus", "recipe", "sha256") if key in file.meta}
    return facts | known


def _sums(files: Sequence[TokenFile]) -> dict[str, Any]:
    """Counts over all files; one that some file lacks is left out."""
    sums: dict[str, Any] = {}
    for key in COUNTS:
        numbers = [file.meta.get(key) for file in files]
        if all(type(number) is int for number in numbers):
            sums[key] = sum(number for number in numbers if number)
    skips: Counter[str] = Counter()
    for file in files:
        skips.update(file.meta.get("skips") or {})
    if skips:
        sums["skips"] = dict(skips)
    return sums


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
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
    options = parser.parse_args(words)
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


if __name__ == "__main__":
    sys.exit(main())
