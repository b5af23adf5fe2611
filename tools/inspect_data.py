"""What is in a token file: lengths of documents, tokens in use, and some of its text.

python tools/inspect_data.py data/stdlib/stdlib_text_document
python tools/inspect_data.py PREFIX --vocab-file vocab.json --merge-file merges.txt --json out.json

Nothing is written but the file that --json names. In a large file every n-th document is asked for
its tokens (--most-tokens), and the text says how many; lengths are those of all.
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
from megatron.data.tokens import TokenFile
from megatron.errors import UserError, visible
from megatron.files import write_text

EVALUATED = (512, 1024, 2048, 4096, 8192, 16384)  # the lengths of KERPLE's and MEP's tables
LARGEST = 1 << 24  # ids that are counted: no known vocabulary has a tenth of it
LISTED = 10  # tokens
SHOWN = 400  # tokens of a document that are decoded
LEGEND = """\
documents: with at least that many tokens; their tokens: share of all tokens
tokens beyond: share of tokens with that many of their own document before them
windows inside: whole windows of that length that cross no border of documents"""


def lengths(sizes: NDArray, evaluated: Sequence[int] = EVALUATED) -> dict[str, Any]:
    """Facts about the sizes of documents, [documents] tokens, and what lies `beyond` each length.

    beyond: for each length, documents: with at least that many tokens, document_share: of all;
        token_share: of all tokens that are in these documents; context_share: of all tokens that
        have that many tokens of their own document before them; windows: whole ones inside
        documents
    """
    documents, tokens = len(sizes), max(int(sizes.sum(dtype=np.int64)), 1)
    beyond = []
    for length in sorted(set(evaluated)):
        long = sizes[sizes >= length].astype(np.int64)
        beyond.append(
            {
                "length": length,
                "documents": len(long),
                "document_share": len(long) / documents,
                "token_share": int(long.sum()) / tokens,
                "context_share": int((long - length).sum()) / tokens,
                "windows": int((long // length).sum()),
            }
        )
    return {
        "shortest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "mean": float(sizes.mean()),
        "longest": int(sizes.max()),
        "beyond": beyond,
    }


def usage(tokens: TokenFile, tokenizer: Tokenizer | None, most: int = 0) -> dict[str, Any]:
    """How often tokens occur: the most frequent, those that never do, and the unknown one.

    most: about so many tokens are read, of every n-th document; 0: all
    UserError for ids that no vocabulary has.
    """
    step = -(-tokens.tokens // most) if most else 1
    documents = range(0, len(tokens), step)
    entries = tokenizer.vocab_size if tokenizer else tokens.vocab_size
    counts = np.zeros(entries or 0, dtype=np.int64)
    for document in documents:
        for ids in tokens.pieces(document):
            if int(ids.max()) >= LARGEST or int(ids.min()) < 0:
                raise UserError(
                    f"{tokens.place}: document {document} holds the token {ids.max()} - it is not"
                    " a file of a tokenizer's ids"
                )
            of_piece = np.bincount(ids, minlength=len(counts))
            of_piece[: len(counts)] += counts
            counts = of_piece
    unused = np.flatnonzero(counts == 0)
    unknown = tokenizer.unknown if tokenizer else None
    return {
        "documents": len(documents),
        "entries": len(counts),
        "tokens": int(counts.sum()),
        "unused": len(unused),
        "unused_ids": unused[:: max(1, len(unused) // LISTED)][:LISTED].tolist(),
        "unknown": None if unknown is None else int(counts[unknown]),
        "most": {int(one): int(counts[one]) for one in np.argsort(-counts)[:LISTED]},
    }


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if min(options.lengths) < 1 or options.samples < 0 or options.most_tokens < 0:
        raise UserError(
            "inspect_data.py: --lengths are 1 or more, --samples and --most-tokens 0 or more"
        )
    tokens = TokenFile.open(options.prefix)
    tokenizer = _tokenizer(tokens, options)
    end = tokens.end_of_documents()
    sizes = np.maximum(tokens.sizes - 1, 0) if end is not None else tokens.sizes
    measured = lengths(sizes, options.lengths)
    used = usage(tokens, tokenizer, options.most_tokens)

    def text_of(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    writer = tokens.meta.get("tokenizer", {})
    lines = [
        f"{tokens.place} ({tokens.meta.get('corpus') or 'no card'})",
        f"{len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype}) of"
        f" {writer.get('type', 'a tokenizer that no card names')} {writer.get('hash', '')}",
        "No token is known to end every document."
        if end is None
        else f"Each document ends with token {end}, which no length below counts.",
    ]
    if tokens.text_bytes:
        ratio = tokens.text_bytes / max(int(sizes.sum(dtype=np.int64)), 1)
        lines.append(f"The text has {tokens.text_bytes:,} bytes: {ratio:.2f} bytes per token.")
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
    lines += [
        LEGEND,
        f"\nTokens of {used['documents']:,} of {len(tokens):,} documents: {used['unused']:,} of"
        f" {used['entries']:,} ids never occur ({used['unused'] / max(used['entries'], 1):.1%})",
    ]
    if used["unknown"] is not None:
        lines.append(f"the unknown token: {used['unknown']:,} times")
    for token, count in used["most"].items():
        lines.append(
            f"{token:>8} {count:>14,} {count / used['tokens']:>7.1%}  {text_of([token])!r}"
        )
    examples = ", ".join(repr(text_of([one])) for one in used["unused_ids"])
    lines.append(f"never used, for example: {examples}" if examples else "every id is used")
    for document in np.linspace(0, len(tokens) - 1, options.samples).astype(int).tolist():
        size = int(tokens.sizes[document])
        lines.append(f"\n--- document {document:,}, {size:,} tokens, begins ---")
        lines.append(text_of(tokens.read(document, 0, SHOWN).tolist()))
    print(visible("\n".join(lines)))
    if options.json:
        facts = {
            "prefix": tokens.place,
            "card": tokens.meta or None,
            "documents": len(tokens),
            "tokens": tokens.tokens,
            "end_of_document": end,
            "lengths": measured,
            "usage": used,
        }
        write_text(options.json, json.dumps(facts, indent=1) + "\n")
    return 0


def _tokenizer(tokens: TokenFile, options: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the options name, or the one beside the file, or None."""
    kind, vocab_file, merge_file = options.tokenizer_type, options.vocab_file, options.merge_file
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
    most = "read about so many to count tokens; 0: all (default: %(default)s)"
    add("--most-tokens", type=int, metavar="N", default=100_000_000, help=most)
    return parser


if __name__ == "__main__":
    sys.exit(main())
