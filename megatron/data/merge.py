"""Several token files of one tokenizer as one, document after document."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron.address import is_address, place_of
from megatron.data.inspect.pick import pieces_of
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError

log = logging.getLogger(__name__)

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
    assume_same_tokenizer: take files whose card is missing; where no file has one, none is written
    command: words of the command line, for the card
    Raises UserError where the files are not of one tokenizer, or one cannot be read. Then nothing
    has changed on disk.
    """
    _check_places(prefixes, output)
    files = [TokenFile.open(prefix) for prefix in prefixes]
    _check_tokenizers(files, assume=assume_same_tokenizer)
    tokenizer = _tokenizer_of(files)
    vocab = tokenizer.get("vocab_size")  # ids of a file without a card must be below it, too
    with TokenWriter(output, _dtype_for_all(files), overwrite=overwrite) as writer:
        for file in files:
            _copy(TokenFile.open(file.place, vocab=vocab), writer)
        if tokenizer:
            writer.meta = merged_card(files, name) | {
                "dtype": str(writer.dtype),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": list(command),
            }
    return TokenFile.open(output)


def _check_places(prefixes: Sequence[str | Path], output: str | Path) -> None:
    if len(prefixes) < 2:
        raise UserError("merge_data.py: one file cannot be merged - give two prefixes or more")
    if is_address(str(output)):
        raise UserError(
            f"-o: {output} is an address - give a place on this machine, and upload the files after"
            " that"
        )
    places = set()
    for prefix in prefixes:
        place = place_of(str(prefix))
        if place in places:
            raise UserError(
                f"{prefix}: is given twice, so each of its documents would be there twice - give"
                " it once"
            )
        places.add(place)
    if place_of(str(output)) in places:
        raise UserError(f"-o: {output} is one of the files to merge - choose another name")


def _check_tokenizers(files: Sequence[TokenFile], *, assume: bool) -> None:
    """Raise UserError unless one tokenizer wrote all files, as far as their cards say."""
    with_card = [file for file in files if file.meta.get("tokenizer")]
    without = [file for file in files if not file.meta.get("tokenizer")]
    if without and not assume:
        raise UserError(
            f"{without[0].place}: has no .json that names its tokenizer - if it is that of the"
            " other files, add --assume-same-tokenizer"
        )
    if len({file.meta["tokenizer"].get("hash") for file in with_card}) > 1:
        lines = ["merge_data.py: these files were written by several tokenizers, whose ids mean"]
        lines[0] += " different text - prepare all of the text with one of them"
        for file in with_card:
            writer = file.meta["tokenizer"]
            lines.append(f"{file.place}: {writer.get('type')} {writer.get('hash')}")
        raise UserError("\n  ".join(lines))


def _tokenizer_of(files: Sequence[TokenFile]) -> dict[str, Any]:
    """What the cards say of the tokenizer; {} where there is no card."""
    known = [file.meta["tokenizer"] for file in files if file.meta.get("tokenizer")]
    return known[0] if known else {}


def _dtype_for_all(files: Sequence[TokenFile]) -> np.dtype:
    """The dtype of the files, or the narrowest that holds the ids of each."""
    return np.result_type(*(file.dtype for file in files))


def _copy(file: TokenFile, writer: TokenWriter) -> None:
    """Append every document of a file, some tokens at a time."""
    for document in range(len(file)):
        for ids in pieces_of(file, document):
            writer.extend(ids)
        writer.end_document()


def merged_card(files: Sequence[TokenFile], name: str | None) -> dict[str, Any]:
    """What PREFIX.json says of the merged file, beside the numbers that its writer knows.

    A sum is left out where some file does not have that number.
    """
    names = dict.fromkeys(file.meta.get("corpus") or file.prefix.name for file in files)
    card: dict[str, Any] = {
        "corpus": name or " + ".join(names),
        "tokenizer": _tokenizer_of(files),
        "sources": [source for file in files for source in _sources(file)],
        "merged": [_part(file) for file in files],
    }
    _warn_of_repeated(card["sources"])
    for key in COUNTS:
        numbers = [count for file in files if (count := _count(file.meta.get(key))) is not None]
        if len(numbers) == len(files):
            card[key] = sum(numbers)
    skips = _skips(files)
    if skips:
        card["skips"] = skips
    return card


def _sources(file: TokenFile) -> list[dict[str, Any]]:
    """What the text of a file was read from; without a card the file itself."""
    sources = file.meta.get("sources")
    if sources:
        return sources
    digest = hashlib.sha256()
    for document in range(len(file)):
        for ids in pieces_of(file, document):
            digest.update(ids.tobytes())
    size = file.tokens * file.dtype.itemsize
    return [{"path": f"{file.place}.bin", "bytes": size, "sha256": digest.hexdigest()}]


def _part(file: TokenFile) -> dict[str, Any]:
    """One of the merged files: where its documents end in the whole follows from the order."""
    facts = {"prefix": file.place, "documents": len(file), "tokens": file.tokens}
    for key in ("corpus", "recipe", "sha256"):
        if key in file.meta:
            facts[key] = file.meta[key]
    return facts


def _warn_of_repeated(sources: Sequence[dict[str, Any]]) -> None:
    counted = Counter(source["sha256"] for source in sources)
    repeated = [sha256 for sha256, count in counted.items() if count > 1]
    if repeated:
        log.warning(
            "sources with the same sha256 are in several of the files, so their documents are"
            " there several times: %s",
            ", ".join(sha256[:12] for sha256 in repeated),
        )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _skips(files: Sequence[TokenFile]) -> dict[str, int]:
    """How many documents were skipped for each reason, over all files."""
    total: Counter[str] = Counter()
    for file in files:
        skips = file.meta.get("skips")
        if isinstance(skips, dict):
            for reason, count in skips.items():
                total[reason] += _count(count) or 0
    return dict(total)
