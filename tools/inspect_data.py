"""Show a token file: lengths of documents, tokens in use, and some of its text.

python tools/inspect_data.py data/pure_python/pure_python_text_document
python tools/inspect_data.py PREFIX --vocab-file vocab.json --merge-file merges.txt

In a large file the tokens of every n-th document are counted, and the output says how many; lengths
are those of all documents.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.cli_errors import command_parser, guarded
from megatron.data.samples import split_in_words
from megatron.data.tokenizers.build import KINDS, build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import LONGEST, TokenFile
from megatron.errors import UserError, visible
from megatron.splits import SPLIT

EVALUATED = (512, 1024, 2048, 4096, 8192, 16384)  # the lengths of KERPLE's and MEP's tables
COUNTED = 100_000_000  # about so many tokens are counted at most
LARGEST = 1 << 24  # ids that are counted: no known vocabulary has a tenth of it
LISTED = 10  # tokens
SHOWN = 400  # tokens of a document that are decoded
LEGEND = """\
documents: with at least that many tokens; their tokens: share of all tokens
tokens beyond: share of tokens with that many of their own document before them
windows inside: whole windows of that length that cross no border of documents"""


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("prefix", type="path", metavar="PREFIX", help="token files, without .bin and .idx")
    add(
        "--lengths",
        type=int,
        nargs="+",
        metavar="L",
        default=EVALUATED,
        help="lengths of an evaluation (default: 512 to 16384)",
    )
    add("--split", default=SPLIT, help="as in the configuration (default: %(default)s)")
    add("-t", "--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(KINDS)}")
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.json, tokenizer.json, its folder …")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt (GPT2BPETokenizer)")
    add("--samples", type=int, metavar="N", default=2, help="documents that are shown (default: 2)")
    options = parser.parse_args(argv)
    if min(options.lengths) < 1 or max(options.lengths) > LONGEST or options.samples < 0:
        raise UserError(f"inspect_data.py: --lengths are 1 to {LONGEST}, --samples 0 or more")
    tokens = TokenFile.open(options.prefix)
    tokenizer = _tokenizer(tokens, options)
    lines = [*lengths(tokens, options.lengths), f"\n{split_in_words(tokens, options.split)}"]
    lines += usage(tokens, tokenizer)
    evenly_spread = np.linspace(0, len(tokens) - 1, min(options.samples, len(tokens)), dtype=int)
    for document in evenly_spread.tolist():
        lines.append(f"\n--- document {document:,}, {tokens.sizes[document]:,} tokens, begins ---")
        lines.append(_text(tokenizer, tokens.read(document, 0, SHOWN).tolist()))
    print(visible("\n".join(lines)))
    return 0


def lengths(tokens: TokenFile, evaluated: Sequence[int]) -> list[str]:
    """Lines: how many documents there are, how long they are, and what lies beyond each length."""
    writer = tokens.meta.get("tokenizer", {})
    end = tokens.end_of_documents()
    sizes = tokens.sizes.astype(np.int64)
    ends = "No token is known to end every document."
    if end is not None:
        sizes = np.maximum(sizes - 1, 0)
        ends = f"Each document ends with token {end}, which no length below counts."
    total = max(sizes.sum(), 1)
    lines = [
        f"{tokens.prefix} ({tokens.meta.get('corpus') or 'no card'})",
        f"{len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype}) of"
        f" {writer.get('type', 'a tokenizer that no card names')} {writer.get('hash', '')}",
        ends,
    ]
    if size := tokens.text_bytes:
        lines.append(f"The text has {size:,} bytes: {size / total:.2f} bytes per token.")
    lines += [
        f"\nLengths: shortest {sizes.min():,}, median {np.median(sizes):,.0f}, mean"
        f" {sizes.mean():,.0f}, longest {sizes.max():,} tokens",
        "length  documents   of all  their tokens  tokens beyond  windows inside",
    ]
    for length in sorted({*evaluated}):
        long = sizes[sizes >= length]
        beyond = (long - length).sum() / total
        lines.append(
            f"{length:<6}  {len(long):>9,}  {len(long) / len(sizes):>7.1%}"
            f"  {long.sum() / total:>12.1%}  {beyond:>13.1%}  {(long // length).sum():>14,}"
        )
    return [*lines, LEGEND]


def usage(tokens: TokenFile, tokenizer: Tokenizer | None) -> list[str]:
    """Lines: how many tokens never occur, the unknown one, and the most frequent.

    UserError for ids that no vocabulary has.
    """
    documents = range(0, len(tokens), -(-tokens.tokens // COUNTED))
    entries = tokenizer.vocab_size if tokenizer else tokens.vocab_size
    counts = np.zeros(entries or 0, dtype=np.int64)
    for document in documents:
        ids = tokens.read(document)
        if len(ids) == 0:
            continue
        if ids.max() >= LARGEST or ids.min() < 0:
            raise UserError(
                f"{tokens.prefix}: document {document} holds the token {ids.max()} - it is not"
                " a file of a tokenizer's ids"
            )
        before, counts = counts, np.bincount(ids, minlength=len(counts))
        counts[: len(before)] += before
    unused = (counts == 0).sum()
    lines = [
        f"\nTokens of {len(documents):,} of {len(tokens):,} documents: {unused:,} of"
        f" {len(counts):,} ids never occur ({unused / len(counts):.1%})"
    ]
    if tokenizer and tokenizer.unknown is not None:
        lines.append(f"the unknown token: {counts[tokenizer.unknown]:,} times")
    for token in np.argsort(-counts)[:LISTED].tolist():
        text = _text(tokenizer, [token])
        share = counts[token] / counts.sum()
        lines.append(f"{token:>8} {counts[token]:>14,} {share:>7.1%}  {text!r}")
    return lines


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


def _tokenizer(tokens: TokenFile, options: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the options name, or the one beside the file, or None."""
    kind, vocab_file, merge_file = options.tokenizer_type, options.vocab_file, options.merge_file
    if kind or vocab_file or merge_file:
        kind = kind or ("GPT2BPETokenizer" if merge_file else "HFTokenizer")
        tokenizer = build_tokenizer(kind, vocab_file, merge_file)
        tokens.check_tokenizer(tokenizer)
        return tokenizer
    writer = tokens.meta.get("tokenizer", {})
    try:
        beside = tokens.prefix.with_name("tokenizer.json")
        tokenizer = build_tokenizer(writer.get("type", "HFTokenizer"), beside)
    except UserError:
        return None
    return tokenizer if tokenizer.hash == writer.get("hash") else None


if __name__ == "__main__":
    sys.exit(main())
