"""Turn text into token files, and train a tokenizer if you want one.

python prepare_data.py --list
python prepare_data.py openwebtext2
python prepare_data.py arxiv --from-dir downloads
python prepare_data.py hf:HuggingFaceFW/fineweb-edu --config sample-10BT --documents 100000
python prepare_data.py --input texts more.jsonl.zst --name mytext --vocab-size 8192
python prepare_data.py --input texts --name mytext --vocab-file tokenizer.json

A task needs no preparation (docs/tasks.md).
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import CommandParser, guarded
from megatron.data import tasks
from megatron.data.corpora.hub import HubStream
from megatron.data.corpora.recipes import MADE_HERE, corpus_names, gpt2_files, listing, named
from megatron.data.encoding import TokenizerFiles
from megatron.data.prepare import VOCAB_SIZE, prepare
from megatron.data.readers import READERS, Corpus, Files
from megatron.data.tokenizers.build import KINDS
from megatron.data.tokens import verify
from megatron.errors import UserError

HUB = "hf:"  # prefix of a data set's name
OF_HUB = ("split", "config", "revision")
OF_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "vocab_size")
# Options that have no meaning for a kind of corpus.
NOT_FOR = {
    "--input": ("from_dir", "documents", *OF_HUB),
    "a data set on the hub": ("from_dir",),
    "a named corpus": ("name", "text_key", *OF_HUB),
}


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    print(run(sys.argv[1:] if argv is None else argv))
    return 0


def run(words: Sequence[str]) -> str:
    """Prepare what a command line requests; returns the summary to print.

    Raises UserError for mistakes that the user can fix.
    """
    options = _parser().parse_args(words)
    if options.verify:
        return verify(options.verify)
    if options.list:
        return f"{listing()}\n\n{tasks.listing()}"
    for name in ("workers", "documents"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}: {value} is too small - use 1 or more")
    workers = options.workers or len(os.sched_getaffinity(0))
    if options.workers:
        # The library reads this at first use, when it starts its threads.
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    corpus = _corpus(options)

    is_chosen = any(getattr(options, name) for name in OF_TOKENIZER)
    if options.corpus and options.corpus not in MADE_HERE and not is_chosen:
        options.vocab_file, options.merge_file = gpt2_files(options.data_dir)
    default = "GPT2BPETokenizer" if options.merge_file else "HFTokenizer"
    kind = options.tokenizer_type or default
    files = TokenizerFiles(kind, options.vocab_file, options.merge_file)
    if options.vocab_size and not files.trained:
        raise UserError(
            f"--vocab-size: is for training a tokenizer, but {kind} already has a vocabulary -"
            " remove it"
        )
    return prepare(
        corpus,
        options.data_dir,
        files,
        options.vocab_size or VOCAB_SIZE,
        overwrite=options.overwrite,
        workers=workers,
        command=["prepare_data.py", *words],
    )


def _corpus(options: argparse.Namespace) -> Corpus:
    """The corpus to prepare. UserError for options that don't apply to it."""
    if bool(options.corpus) == bool(options.input):
        raise UserError(
            "prepare_data.py: there is nothing to prepare - name a corpus (--list shows them), or"
            " give --input FILE --name NAME"
        )
    kind = "a named corpus"
    if options.input:
        kind = "--input"
    elif options.corpus.startswith(HUB):
        kind = "a data set on the hub"
    for name in NOT_FOR[kind]:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: cannot be used for {kind} - remove it")
    if kind == "a named corpus":
        return named(
            options.corpus,
            options.data_dir,
            from_dir=options.from_dir,
            documents=options.documents,
        )
    dataset = (options.corpus or "").removeprefix(HUB)
    name = options.name or dataset.rpartition("/")[2]
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        raise UserError(
            f"--name: '{name}' cannot be a folder name - give the corpus a name of letters,"
            " digits, '_', '-' and '.', such as --name mytext"
        )
    keys = options.text_key or ["text"]
    if options.input:
        return Files(name, options.input, keys)
    return HubStream(
        name,
        dataset,
        options.split or "train",
        keys,
        options.config,
        options.revision or "main",
        options.documents,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="prepare_data.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "corpus",
        nargs="?",
        help=f"a named corpus: {', '.join(corpus_names())}; or hf:OWNER/NAME, a data set on the"
        " hub, read as a stream",
    )
    add("--list", action="store_true", help="list the corpora with their sources, and the tasks")
    add(
        "-d",
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="folder for the data (default: data); downloads are kept in DIR/download",
    )
    add(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="use files in this folder, and download nothing",
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        help="use the first N documents, and download no more files than they need",
    )
    add("--split", help="hf: which split (default: train)")
    add("--config", help="hf: which configuration of the data set")
    add("--revision", help="hf: a branch, tag or commit (default: main)")
    add(
        "--input",
        type="path",
        nargs="+",
        metavar="FILE",
        help=f"your own text files or folders: {', '.join(READERS)}; other UTF-8 files are one"
        " document each",
    )
    add("--name", help="name of your own corpus")
    add(
        "--text-key",
        "--jsonl-keys",
        action="append",
        metavar="KEY",
        help="key of the text in JSON and tables (default: text), or meta.text inside an object;"
        " may be repeated: the first key that an entry has is used",
    )
    add("-t", "--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(KINDS)}")
    add(
        "--vocab-file",
        type=Path,
        help="vocab.json (GPT2BPETokenizer), tokenizer.json or its folder (HFTokenizer), a"
        " SentencePiece model (SPMTokenizer), a .tiktoken file (TiktokenTokenizer)",
    )
    add("--merge-file", type=Path, help="merges.txt (GPT2BPETokenizer)")
    add(
        "--vocab-size",
        type=int,
        help=f"if no file is given, train a BPE with this many entries (default: {VOCAB_SIZE})",
    )
    add(
        "--append-eod",
        action="store_true",
        help="accepted for GPT-NeoX's command lines: an end token is always written",
    )
    add("--workers", type=int, help="number of processes that encode (default: one per core)")
    add(
        "--verify",
        type="path",
        metavar="PREFIX",
        help="only check these token files against their sha256 and vocabulary",
    )
    add("--overwrite", action="store_true", help="replace an existing corpus with this name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
