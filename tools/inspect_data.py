"""What is in a token file: lengths of documents, tokens in use, and some of its text.

python tools/inspect_data.py data/stdlib/stdlib_text_document
python tools/inspect_data.py PREFIX --vocab-file vocab.json --merge-file merges.txt --json out.json

Nothing is written but the file that --json names. In a large file a sample of the documents is
asked for their tokens (--most-tokens), and the text says how many; lengths are those of all.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.cli_errors import guarded
from megatron.data.tokenizers.build import KINDS, build_tokenizer, needs_files
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import LONGEST, TokenFile
from megatron.errors import UserError, visible
from megatron.files import write_text

EVALUATED = (512, 1024, 2048, 4096, 8192, 16384)  # the lengths of KERPLE's and MEP's tables
SEED = 1234  # of the sample of documents
LARGEST = 1 << 24  # ids that are counted: no known vocabulary has a tenth of it
LISTED = 10  # tokens
SHOWN = 400  # tokens of a document that are decoded


def lengths(
    sizes: NDArray, evaluated: Sequence[int] = EVALUATED, *, with_end: bool = False
) -> dict[str, Any]:
    """Facts about the sizes of documents, [documents] tokens, and what lies `beyond` each length.

    evaluated: lengths of windows; with_end: one token of each document ends it and does not count
    beyond: for each length, documents: with at least that many tokens, document_share: of all;
        token_share: of all tokens that are in these documents; context_share: of all tokens that
        have that many tokens of their own document before them; windows: whole ones inside
        documents
    """
    # The different sizes are few, also where there are many millions of documents.
    values, counts = np.unique(sizes, return_counts=True)
    values = values.astype(np.int64)
    if with_end:
        values = np.maximum(values - 1, 0)
    documents, tokens = int(counts.sum()), int(values @ counts)
    ends = np.cumsum(counts)
    middle = [(documents - 1) // 2, documents // 2]
    beyond = []
    for length in sorted(set(evaluated)):
        is_long = values >= length
        long, of_long = values[is_long], counts[is_long]
        many, in_long = int(of_long.sum()), int(long @ of_long)
        beyond.append(
            {
                "length": length,
                "documents": many,
                "document_share": many / documents,
                "token_share": in_long / max(tokens, 1),
                "context_share": (in_long - many * length) / max(tokens, 1),
                "windows": int((long // length) @ of_long),
            }
        )
    return {
        "documents": documents,
        "tokens": tokens,
        "shortest": int(values[0]),
        "median": float(values[np.searchsorted(ends, middle, side="right")].mean()),
        "mean": tokens / documents,
        "longest": int(values[-1]),
        "beyond": beyond,
    }


def usage(tokens: TokenFile, tokenizer: Tokenizer | None, most: int = 0) -> dict[str, Any]:
    """How often tokens occur: the most frequent, those that never do, and the unknown one.

    most: tokens of the documents that are read; 0: all. Whole documents are drawn, each as likely
    as any other. UserError for ids that no vocabulary has.
    """
    documents = np.arange(len(tokens))
    read = f"all {len(tokens):,} documents"
    if 0 < most < tokens.tokens:
        order = np.random.default_rng(SEED).permutation(documents)
        before = np.cumsum(tokens.sizes[order], dtype=np.int64)
        fitting = int(np.searchsorted(before, most, side="right"))
        documents = np.sort(order[: max(1, fitting)])
        read = f"a sample of {len(documents):,} of {len(tokens):,} documents, seed {SEED}"
    entries = tokenizer.vocab_size if tokenizer else tokens.vocab_size
    counts = np.zeros(min(entries or 0, LARGEST), dtype=np.int64)
    for document in documents.tolist():
        for ids in tokens.pieces(document):
            if int(ids.max()) >= LARGEST or int(ids.min()) < 0:
                raise UserError(
                    f"{tokens.place}: document {document} holds the token {ids.max()} - it is not"
                    " a file of a tokenizer's ids"
                )
            of_piece = np.bincount(ids, minlength=len(counts))
            of_piece[: len(counts)] += counts
            counts = of_piece
    frequent = np.argsort(-counts, kind="stable")[:LISTED]
    unused = np.flatnonzero(counts == 0)
    unknown = tokenizer.unknown if tokenizer else None
    return {
        "read": read,
        "entries": len(counts),
        "tokens": int(counts.sum()),
        "unused": len(unused),
        "unused_ids": unused[:: max(1, len(unused) // LISTED)][:LISTED].tolist(),
        "unknown": None if unknown is None else int(counts[unknown]),
        "most": [{"id": one, "count": int(counts[one])} for one in frequent.tolist()],
    }


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    wrong = [length for length in given.lengths if not 1 <= length <= LONGEST]
    if wrong or given.samples < 0 or given.most_tokens < 0:
        raise UserError(
            f"inspect_data.py: lengths are 1 to {LONGEST} tokens, and --samples and --most-tokens"
            " 0 or more - give such numbers"
        )
    tokens = TokenFile.open(given.prefix)
    tokenizer = _tokenizer(tokens, given)
    end = tokens.end_of_documents()
    facts: dict[str, Any] = {
        "prefix": tokens.place,
        "card": tokens.meta or None,
        "documents": len(tokens),
        "tokens": tokens.tokens,
        "dtype": str(tokens.dtype),
        "end_of_document": end,
        "text_bytes": tokens.text_bytes,
        "lengths": lengths(tokens.sizes, given.lengths, with_end=end is not None),
        "usage": usage(tokens, tokenizer, given.most_tokens),
    }

    def text_of(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    lines = _summary(facts)
    used = facts["usage"]
    for one in used["most"]:
        share = one["count"] / used["tokens"]
        lines.append(f"{one['id']:>8} {one['count']:>14,} {share:>7.1%}  {text_of([one['id']])!r}")
    examples = ", ".join(repr(text_of([one])) for one in used["unused_ids"])
    lines.append(f"never used, for example: {examples}" if examples else "every id is used")
    for document in np.linspace(0, len(tokens) - 1, given.samples).astype(int).tolist():
        size = int(tokens.sizes[document])
        lines.append(f"\n--- document {document:,}, {size:,} tokens, begins ---")
        lines.append(text_of(tokens.read(document, 0, SHOWN).tolist()))
    print(visible("\n".join(lines)))
    if given.json:
        write_text(given.json, json.dumps(facts, indent=1) + "\n")
    return 0


def _tokenizer(tokens: TokenFile, given: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the options name, or the one beside the file, or None."""
    kind, vocab_file, merge_file = given.tokenizer_type, given.vocab_file, given.merge_file
    if kind or vocab_file or merge_file:
        kind = kind or ("GPT2BPETokenizer" if merge_file else "HFTokenizer")
        tokenizer = build_tokenizer(kind, vocab_file, merge_file)
        tokens.check_tokenizer(tokenizer)
        return tokenizer
    writer = tokens.meta.get("tokenizer", {})
    kind = writer.get("type", "HFTokenizer")
    beside = tokens.prefix.with_name("tokenizer.json")
    try:
        tokenizer = build_tokenizer(kind, beside if needs_files(kind) else None)
    except UserError:
        return None
    return tokenizer if tokenizer.hash == writer.get("hash") else None


def _summary(facts: dict[str, Any]) -> list[str]:
    """The card, the lengths and the head of the tokens."""
    meta, measured, used = facts["card"] or {}, facts["lengths"], facts["usage"]
    writer = meta.get("tokenizer", {})
    end = facts["end_of_document"]
    lines = [
        f"{facts['prefix']} ({meta.get('corpus') or 'no card'})",
        f"{facts['documents']:,} documents, {facts['tokens']:,} tokens ({facts['dtype']}) of"
        f" {writer.get('type', 'a tokenizer that no card names')} {writer.get('hash', '')}",
        "No token is known to end every document."
        if end is None
        else f"Each document ends with token {end}, which no length below counts.",
    ]
    if facts["text_bytes"]:
        ratio = facts["text_bytes"] / max(measured["tokens"], 1)
        lines.append(f"The text has {facts['text_bytes']:,} bytes: {ratio:.2f} bytes per token.")
    lines += [
        f"\nLengths: shortest {measured['shortest']:,}, median {measured['median']:,.0f}, mean"
        f" {measured['mean']:,.0f}, longest {measured['longest']:,} tokens",
        "length  documents   of all  their tokens  tokens beyond  windows inside",
    ]
    for one in measured["beyond"]:
        lines.append(
            f"{one['length']:<6}  {one['documents']:>9,}  {one['document_share']:>7.1%}"
            f"  {one['token_share']:>12.1%}  {one['context_share']:>13.1%}  {one['windows']:>14,}"
        )
    share = used["unused"] / max(used["entries"], 1)
    unknown = (
        f", the unknown token {used['unknown']:,} times" if used["unknown"] is not None else ""
    )
    return [
        *lines,
        "documents: with at least that many tokens; their tokens: share of all tokens",
        "tokens beyond: share of tokens with that many of their own document before them",
        "windows inside: whole windows of that length that cross no border of documents",
        f"\nTokens ({used['read']}): {used['unused']:,} of {used['entries']:,} ids never occur"
        f" ({share:.1%}){unknown}",
        "      id          times  of all",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="token files, without .bin and .idx")
    add("--json", type=Path, metavar="FILE", help="the numbers as JSON")
    windows = "lengths of an evaluation (default: 512 to 16384)"
    add("--lengths", type=int, nargs="+", metavar="L", default=EVALUATED, help=windows)
    add("-t", "--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(KINDS)}")
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json, tokenizer.json, its folder …")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt (GPT2BPETokenizer)")
    add("--samples", type=int, metavar="N", default=2, help="documents that are shown (default: 2)")
    most = "read at most so many to count tokens; 0: all (default: %(default)s)"
    add("--most-tokens", type=int, metavar="N", default=100_000_000, help=most)
    return parser


if __name__ == "__main__":
    sys.exit(main())
