"""Train a tokenizer on your own text, or on a corpus that is known by name.

python tools/train_tokenizer.py stdlib --vocab-size 8192 -o tokenizers/stdlib/tokenizer.json
python tools/train_tokenizer.py --input texts more.jsonl.zst --vocab-size 32000 --model unigram \\
    -o tokenizers/mine.model

Without --model it is a byte-level BPE, as GPT-2's is; with it a SentencePiece model. Every
twentieth document is held out, and the bytes of it per token are printed. The same text gives the
same tokenizer.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron.cli_errors import guarded
from megatron.data.corpora.catalogue import corpus_names, named
from megatron.data.corpora.corpus import Corpus
from megatron.data.readers.files import Files
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokenizers.train import train_sentence_pieces, train_tokenizer
from megatron.errors import UserError
from megatron.files import atomic_write

HELD_OUT = 20  # one document of so many
PIECE = 100_000  # characters that are learned from, or measured, at a time
MEASURED = 20_000_000  # characters of held-out text at most
OF_BPE = ("HFTokenizer", ".json")
OF_SENTENCE_PIECES = ("SPMTokenizer", ".model")


class Measured(NamedTuple):
    """How well a tokenizer fits a text."""

    documents: int
    text_bytes: int
    tokens: int


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    kind, ending = OF_SENTENCE_PIECES if options.model else OF_BPE
    output: Path = options.output
    if output.suffix != ending:
        raise UserError(
            f"-o: {output} does not end with {ending}, as the file of {kind} does - rename it"
        )
    if output.exists() and not options.overwrite:
        raise UserError(f"-o: {output} exists already - choose another name, or add --overwrite")
    if options.characters < 1:
        raise UserError(f"--characters: {options.characters} is no text - use 1 or more")
    corpus = _corpus(options)
    with atomic_write(output) as temporary:
        temporary.write_bytes(_trained(corpus, options))
        tokenizer = build_tokenizer(kind, temporary)
        measured = _measured(corpus, tokenizer)
    print(_summary(output, kind, tokenizer, measured))
    return 0


def _corpus(options: argparse.Namespace) -> Corpus:
    if bool(options.corpus) == bool(options.input):
        raise UserError(
            "train_tokenizer.py: what is it to learn from? - name a corpus (stdlib), or give"
            " --input FILE"
        )
    if options.corpus:
        return named(options.corpus, options.data_dir)
    return Files("input", options.input, options.text_key)


def _trained(corpus: Corpus, options: argparse.Namespace) -> bytes:
    """The contents of the tokenizer's file."""
    found = 0

    def counted() -> Iterator[str]:
        nonlocal found
        for text in _limited(_texts(corpus, held_out=False), options.characters):
            found += len(text)
            yield text

    if options.model:
        content = train_sentence_pieces(counted(), options.vocab_size, options.model)
    else:
        content = train_tokenizer(counted(), options.vocab_size).encode()
    if not found:
        raise UserError(f"{corpus.name}: has no text to learn from - give files with text in them")
    return content


def _texts(corpus: Corpus, *, held_out: bool) -> Iterator[str]:
    """Documents that are held out, or all others; of a named corpus only those of the training."""
    documents = islice(corpus.documents(), corpus.to_train_on)
    for number, document in enumerate(documents, 1):
        if (number % HELD_OUT == 0) == held_out:
            yield document


def _limited(documents: Iterator[str], characters: int) -> Iterator[str]:
    """Pieces of the documents, until there were so many characters."""
    for document in documents:
        for start in range(0, len(document), PIECE):
            piece = document[start : start + min(PIECE, characters)]
            yield piece
            characters -= len(piece)
            if characters <= 0:
                return


def _measured(corpus: Corpus, tokenizer: Tokenizer) -> Measured:
    """Bytes and tokens of the held-out documents."""
    documents = text_bytes = tokens = 0
    for document in _texts(corpus, held_out=True):
        documents += 1
        text = document[:MEASURED]
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        tokens += sum(map(len, tokenizer.encode_batch(pieces)))
        text_bytes += len(text.encode())
        if text_bytes >= MEASURED:
            break
    return Measured(documents, text_bytes, tokens)


def _summary(output: Path, kind: str, tokenizer: Tokenizer, measured: Measured) -> str:
    lines = [f"{output}: {kind} {tokenizer.hash}, {tokenizer.vocab_size:,} entries"]
    if measured.tokens:
        lines.append(
            f"{measured.text_bytes / measured.tokens:.3f} bytes per token on {measured.documents:,}"
            f" held-out documents ({measured.text_bytes:,} bytes)"
        )
    else:
        lines.append(
            f"nothing was held out to measure it on: there are fewer than {HELD_OUT} documents"
        )
    lines += ["in your YAML:", f"  tokenizer_type: {kind}", f"  vocab_file: {output}"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("corpus", nargs="?", help=f"a corpus known by name: {', '.join(corpus_names())}")
    add("--input", nargs="+", metavar="FILE", help="your own text, or folders of it")
    add("--text-key", default="text", help="what holds the text in JSON lines (default: text)")
    add("-d", "--data-dir", type=Path, default=Path("data"), help="where downloads are (data)")
    add("--vocab-size", type=int, required=True, help="entries, such as 8192")
    add(
        "--model",
        choices=("bpe", "unigram"),
        help="train a SentencePiece model of this kind; without it a byte-level BPE",
    )
    add(
        "--characters",
        type=int,
        default=200_000_000,
        help="learn from so many characters at most (default: %(default)s); SentencePiece keeps"
        " all of them in memory",
    )
    add(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="tokenizer.json or a .model",
    )
    add("--overwrite", action="store_true", help="replace an earlier file of this name")
    return parser
