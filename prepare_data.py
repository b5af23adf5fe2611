"""Turn text into token files: DIR/NAME/NAME_text_document.bin, .idx and .json.

python prepare_data.py --list
python prepare_data.py openwebtext2
python prepare_data.py pile --set ArXiv --from-dir downloads
python prepare_data.py hf:HuggingFaceFW/fineweb-edu --config sample-10BT --documents 100000
python prepare_data.py --input texts more.jsonl.zst --name mytext --vocab-size 8192
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import guarded
from megatron.data.corpora.catalogue import (
    HUB,
    corpus_names,
    is_downloaded,
    listing,
    named,
    of_hub,
)
from megatron.data.corpora.corpus import Corpus
from megatron.data.corpora.from_recipe import Wishes
from megatron.data.corpora.hub_stream import Wanted
from megatron.data.corpora.tokenizer_files import gpt2_files
from megatron.data.prepare.prepare import TokenizerChoice, Way, prepare
from megatron.data.readers.files import READERS, Files
from megatron.data.readers.unpack import MB, Limits
from megatron.data.tokenizers.build import KINDS
from megatron.data.tokens import verify
from megatron.errors import UserError

OF_HUB = ("split", "config", "revision")  # options


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    print(run(sys.argv[1:] if argv is None else argv))
    return 0


def run(words: Sequence[str]) -> str:
    """Prepare what the words of a command line ask for; returns the summary to print.

    Raises UserError for what the user can mend.
    """
    options = _parser().parse_args([_dashed(word) for word in words])
    if options.verify:
        return verify(options.verify)
    if options.list:
        return listing()
    if options.tokenizer_files:
        return "\n".join(map(str, gpt2_files(options.data_dir, options.from_dir)))
    way = Way(_workers(options.workers), command=["prepare_data.py", *words])
    corpus = _corpus(options)
    choice = _choice(options)
    return prepare(corpus, options.data_dir, choice, overwrite=options.overwrite, way=way)


def _dashed(word: str) -> str:
    """GPT-NeoX spells its options with underscores: --vocab_file=x means --vocab-file=x."""
    return re.sub(r"^--\w+", lambda match: match[0].replace("_", "-"), word)


def _workers(count: int | None) -> int:
    """How many processes encode: as many as asked for, else one for each core that is ours."""
    if count is None:
        return len(os.sched_getaffinity(0))
    if count < 1:
        raise UserError(
            f"--workers: {count} cannot work - use 1 or more, or leave it away for all cores"
        )
    # The library reads this when it starts its threads, at first use.
    os.environ["RAYON_NUM_THREADS"] = str(count)
    return count


def _corpus(options: argparse.Namespace) -> Corpus:
    if bool(options.corpus) == bool(options.input):
        raise UserError(
            "prepare_data.py: what is to be prepared? - name a corpus (--list shows them), or give "
            "--input FILE --name NAME"
        )
    if options.name and not re.fullmatch(r"[\w.-]*\w[\w.-]*", options.name):
        raise UserError(
            f"--name: '{options.name}' cannot be a folder's name - use letters, digits, '_', '-' "
            "and '.'"
        )
    if options.documents is not None and options.documents < 1:
        raise UserError(f"--documents: {options.documents} is no corpus - use 1 or more")
    if options.input:
        return _own_files(options)
    if options.corpus.startswith(HUB):
        _refuse(options, ("set", "skip_bad"), "a data set of the hub")
        return _of_hub(options)
    _refuse(options, ("name", "text_key", *OF_HUB), f"the corpus {options.corpus}")
    wishes = Wishes(options.from_dir, options.set, options.documents, bool(options.skip_bad))
    return named(options.corpus, options.data_dir, wishes, _limits(options))


def _own_files(options: argparse.Namespace) -> Corpus:
    _refuse(options, ("from_dir", "set", "documents", *OF_HUB), "--input")
    if not options.name:
        raise UserError(
            "--name: is missing - with --input give the corpus a name, such as --name mytext"
        )
    key = options.text_key or "text"
    limits = _limits(options)
    return Files(options.name, options.input, key, limits, skip_bad=bool(options.skip_bad))


def _of_hub(options: argparse.Namespace) -> Corpus:
    defaults = Wanted(options.corpus.removeprefix(HUB))
    wanted = Wanted(
        defaults.dataset,
        options.split or defaults.split,
        options.text_key or defaults.text_key,
        options.config,
        options.revision or defaults.revision,
        options.documents,
    )
    return of_hub(options.name, wanted, options.from_dir)


def _refuse(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Raise UserError for an option that means nothing for what is prepared."""
    for name in names:
        if getattr(options, name) is not None:
            spelling = name.replace("_", "-")
            raise UserError(f"--{spelling}: is not for {where} - leave it away")


def _limits(options: argparse.Namespace) -> Limits:
    for name in ("max_document_mb", "max_unpack_ratio"):
        if getattr(options, name) < 1:
            spelling = name.replace("_", "-")
            raise UserError(
                f"--{spelling}: {getattr(options, name)} lets nothing in - use 1 or more"
            )
    return Limits(options.max_document_mb * MB, options.max_unpack_ratio)


def _choice(options: argparse.Namespace) -> TokenizerChoice:
    of_user = (options.tokenizer_type, options.vocab_file, options.merge_file, options.vocab_size)
    if options.corpus and is_downloaded(options.corpus) and not any(of_user):
        options.vocab_file, options.merge_file = gpt2_files(options.data_dir, options.from_dir)
    default = "GPT2BPETokenizer" if options.merge_file else "HFTokenizer"
    choice = TokenizerChoice(
        kind=options.tokenizer_type or default,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=options.vocab_size or TokenizerChoice.vocab_size,
    )
    if options.vocab_size and not choice.trained:
        raise UserError(
            f"--vocab-size: is for a tokenizer that is trained here, {choice.kind} has its own "
            "- leave it away"
        )
    if options.merge_file and choice.kind != "GPT2BPETokenizer":
        raise UserError(
            f"--merge-file: {choice.kind} has none - leave it away, or use "
            "--tokenizer-type GPT2BPETokenizer"
        )
    return choice


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "corpus",
        nargs="?",
        help=f"a corpus known by name: {', '.join(corpus_names())}; or hf:OWNER/NAME, a data set of"
        " the Hugging Face hub that is read as a stream",
    )
    add("--list", action="store_true", help="show the corpora, and where each comes from")
    add(
        "-d",
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="where data goes (default: data); DIR/download keeps what is downloaded",
    )
    add(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="take the corpus from files at hand, and download nothing",
    )
    add("--set", metavar="PART", help="a part of the corpus, such as ArXiv of pile")
    add(
        "--documents",
        type=int,
        metavar="N",
        help="take the first N documents, and download no more files than they need",
    )
    add("--split", help="hf: which split (default: train)")
    add("--config", help="hf: which configuration of the data set")
    add("--revision", help="hf: a branch, tag or commit (default: main)")
    add(
        "--tokenizer-files",
        action="store_true",
        help="prepare nothing: bring GPT-2's gpt2-vocab.json and gpt2-merges.txt into -d",
    )
    kinds = ", ".join(READERS)
    add(
        "--input",
        nargs="+",
        metavar="FILE",
        help=f"your own text, or folders of it: {kinds}; other UTF-8 files are one document each",
    )
    add("--name", help="how your own corpus is called")
    add(
        "--text-key",
        "--jsonl-keys",
        help="what holds the text in JSON lines and tables (default: text)",
    )
    add(
        "--max-document-mb",
        type=int,
        metavar="MB",
        default=Limits.document // MB,
        help="refuse longer documents and lines of JSON: they must fit into memory several times"
        " (default: %(default)s)",
    )
    add(
        "--skip-bad",
        action="store_true",
        default=None,
        help="count damaged lines, rows and text files of --input, instead of ending with an error",
    )
    add(
        "--max-unpack-ratio",
        type=int,
        metavar="N",
        default=Limits.ratio,
        help="refuse a packed file that grows by more than this (default: %(default)s)",
    )
    add("-t", "--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(KINDS)}")
    add(
        "--vocab-file",
        type=Path,
        help="vocab.json (GPT2BPETokenizer), tokenizer.json or its folder (HFTokenizer), a"
        " SentencePiece model (SPMTokenizer), a .tiktoken file (TiktokenTokenizer)",
    )
    add("--merge-file", type=Path, help="merges.txt (GPT2BPETokenizer)")
    size = TokenizerChoice.vocab_size
    add(
        "--vocab-size",
        type=int,
        help=f"entries of the BPE trained where no file is given (default: {size})",
    )
    add("--append-eod", action="store_true", help="of GPT-NeoX: an end token is always written")
    add("--workers", type=int, help="processes that encode (default: one for each core)")
    add(
        "--verify",
        metavar="PREFIX",
        help="prepare nothing: compare these token files with their sha256 and their vocabulary",
    )
    add("--overwrite", action="store_true", help="replace an earlier corpus of this name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
