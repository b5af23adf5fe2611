"""Turn text into token files: DIR/NAME/NAME_text_document.bin, .idx and .json.

python prepare_data.py --list
python prepare_data.py openwebtext2
python prepare_data.py arxiv --from-dir downloads
python prepare_data.py hf:HuggingFaceFW/fineweb-edu --config sample-10BT --documents 100000
python prepare_data.py --input texts more.jsonl.zst --name mytext --vocab-size 8192
python prepare_data.py --input texts --name mytext --vocab-file tokenizer.json --part 1/4
python prepare_data.py task:copy --documents 1000

A task needs no preparation (docs/tasks.md). The last command writes problems to read them or to use
them elsewhere: DIR/copy/copy.jsonl.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli_errors import CommandParser, guarded
from megatron.data import tasks
from megatron.data.corpora.hub_stream import HubStream
from megatron.data.corpora.recipes import MADE_HERE, corpus_names, gpt2_files, listing, named
from megatron.data.prepare import TokenizerChoice, prepare
from megatron.data.readers import MB, READERS, Corpus, Files, Limits
from megatron.data.tokenizers.build import KINDS
from megatron.data.tokens import verify
from megatron.errors import UserError
from megatron.files import write_output
from megatron.parallel.machine import total_memory
from megatron.splits import PARTS, TASK_PREFIX
from megatron.strict_yaml import parse

HUB = "hf:"  # before the name of a data set
OF_HUB = ("split", "config", "revision")
OF_TASK = ("length", "task_args")
OF_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "vocab_size")
# Options that mean nothing for a kind of corpus.
NOT_FOR = {
    "--input": ("from_dir", "documents", *OF_HUB, *OF_TASK),
    "a data set of the hub": ("from_dir", "part", *OF_TASK),
    "a corpus that is known by name": ("name", "text_key", *OF_HUB, *OF_TASK),
    "a task": ("from_dir", "part", "text_key", "config", "revision", *OF_TOKENIZER),
}
LENGTH = 64  # tokens
MARK = b'"question": '  # in every file of problems
ENCODER = 25_000_000  # bytes of a process that encodes, at least
POSITIVE = ("workers", "documents", "length", "max_document_mb", "max_unpack_ratio")


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    print(run(sys.argv[1:] if argv is None else argv))
    return 0


def run(words: Sequence[str]) -> str:
    """Prepare what the words of a command line ask for; returns the summary to print.

    Raises UserError for what the user can mend.
    """
    options = _parser().parse_args(words)
    if options.verify:
        return verify(options.verify)
    if options.list:
        return f"{listing()}\n\n{tasks.listing()}"
    if options.tokenizer_files:
        return "\n".join(map(str, gpt2_files(options.data_dir, options.from_dir)))
    for name in POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{_spelled(name)}: {value} is too small - use 1 or more")
    workers = options.workers or len(os.sched_getaffinity(0))
    most = total_memory() // ENCODER
    if workers > most:
        raise UserError(
            f"--workers: {workers} processes do not fit into memory, which holds {most} at most -"
            " leave it out for one on each core"
        )
    if not str(options.data_dir).isprintable():
        raise UserError(
            f"--data-dir: {str(options.data_dir)!r} has what no YAML file can name - choose another"
        )
    if options.workers:
        # The library reads this when it starts its threads, at first use.
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    kind = _kind(options)
    if kind == "a task":
        return _write_problems(options)
    part = re.fullmatch(r"(\d{1,6})/(\d{1,6})", options.part or "1/1")
    number, parts = map(int, part.groups()) if part else (0, 0)
    if not 1 <= number <= parts:
        raise UserError(
            f"--part: {options.part!r} is no part - write --part 2/4 for the second of four"
        )
    if options.part and options.documents:
        raise UserError("--part: is of all documents - leave --documents out")
    corpus = _corpus(options, kind)
    if options.part and not isinstance(corpus, Files):
        raise UserError(f"--part: {corpus.name} has no files to divide - leave it out")
    corpus.part = (number, parts)

    is_chosen = any(getattr(options, name) for name in OF_TOKENIZER)
    if options.corpus and options.corpus not in MADE_HERE and not is_chosen:
        options.vocab_file, options.merge_file = gpt2_files(options.data_dir, options.from_dir)
    default = "GPT2BPETokenizer" if options.merge_file else "HFTokenizer"
    choice = TokenizerChoice(
        options.tokenizer_type or default,
        options.vocab_file,
        options.merge_file,
        options.vocab_size or TokenizerChoice.vocab_size,
    )
    if options.part and choice.trained:
        raise UserError(
            "--part: each part would train another tokenizer - train one before, with --vocab-size"
            " and fewer --documents or files, and give its tokenizer.json as --vocab-file"
        )
    if options.vocab_size and not choice.trained:
        raise UserError(
            f"--vocab-size: is for a tokenizer that is trained here, {choice.kind} has its own "
            "- leave it out"
        )
    if options.merge_file and choice.kind != "GPT2BPETokenizer":
        raise UserError(
            f"--merge-file: {choice.kind} has none - leave it out, or use "
            "--tokenizer-type GPT2BPETokenizer"
        )
    return prepare(
        corpus,
        options.data_dir,
        choice,
        overwrite=options.overwrite,
        workers=workers,
        command=["prepare_data.py", *words],
    )


def _kind(options: argparse.Namespace) -> str:
    """What is to be prepared: a key of NOT_FOR. UserError for options that are not for it."""
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
    kind = "a corpus that is known by name"
    if options.input:
        kind = "--input"
    elif options.corpus.startswith(HUB):
        kind = "a data set of the hub"
    elif options.corpus.startswith(TASK_PREFIX):
        kind = "a task"
    for name in NOT_FOR[kind]:
        if getattr(options, name) is not None:
            raise UserError(f"{_spelled(name)}: is not for {kind} - leave it out")
    return kind


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _write_problems(options: argparse.Namespace) -> str:
    """Write problems of a task as JSON lines, those that a training with the default seed reads."""
    from megatron.config.schema import Training  # imports torch, which no corpus needs

    try:
        task_args = dict(parse(options.task_args or "{}"))
    except (TypeError, ValueError) as fault:
        raise UserError(f"--task-args: {fault} - write such as '{{group: S3}}'") from None
    text = tasks.TaskText(options.corpus.removeprefix(TASK_PREFIX), task_args)
    part, count = options.split or "train", options.documents
    if part not in PARTS or count is None:
        raise UserError(
            f"{text.prefix}: of which part, and how many problems? - give --documents N, and as"
            f" --split one of {', '.join(PARTS)}"
        )
    name = options.name or text.name
    file = options.data_dir / name / f"{name}.jsonl"
    seed = Training.model_fields["seed"].default
    lines = text.lines(part, options.length or LENGTH, seed, count)
    content = (f"{line}\n".encode() for line in lines)
    write_output(file, content, MARK if options.overwrite else None)
    return f"{file}: {count:,} {part} problems of {text.prefix}"


def _corpus(options: argparse.Namespace, kind: str) -> Corpus:
    limits = Limits(options.max_document_mb * MB, options.max_unpack_ratio)
    if kind == "--input":
        if not options.name:
            raise UserError(
                "--name: is missing - with --input give the corpus a name, such as --name mytext"
            )
        return Files(options.name, options.input, options.text_key or ["text"], limits)
    if kind == "a data set of the hub":
        owner, _, dataset = options.corpus.removeprefix(HUB).partition("/")
        if not owner or not dataset or "/" in dataset:
            raise UserError(f"{options.corpus}: is not a name of a data set - write hf:OWNER/NAME")
        return HubStream(
            options.name or dataset,
            f"{owner}/{dataset}",
            options.split or "train",
            options.text_key or ["text"],
            options.config,
            options.revision or "main",
            options.documents,
        )
    return named(
        options.corpus,
        options.data_dir,
        from_dir=options.from_dir,
        documents=options.documents,
        limits=limits,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="prepare_data.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    limits = Limits()
    add(
        "corpus",
        nargs="?",
        help=f"a corpus known by name: {', '.join(corpus_names())}; or hf:OWNER/NAME, a data set of"
        " the hub as a stream; or task:NAME",
    )
    add("--list", action="store_true", help="show the corpora and their sources, and the tasks")
    add(
        "-d",
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="folder of the data (default: data); downloads are kept in DIR/download",
    )
    add(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="take the corpus from files in this folder, and download nothing",
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        help="take the first N documents, and download no more files than they need",
    )
    add(
        "--part",
        metavar="I/N",
        help="only the I-th of N parts, in DIR/NAME-I-of-N; tools/merge_data.py makes them one"
        " (docs/data.md)",
    )
    add("--split", help="hf: which split; a task: which part (default: train)")
    add("--config", help="hf: which configuration of the data set")
    add("--revision", help="hf: a branch, tag or commit (default: main)")
    add(
        "--length",
        type=int,
        metavar="L",
        help=f"a task: problems that fit into windows of L tokens (default: {LENGTH})",
    )
    add("--task-args", metavar="YAML", help="a task: its options, such as '{group: S3}'")
    add(
        "--tokenizer-files",
        action="store_true",
        help="only download GPT-2's gpt2-vocab.json and gpt2-merges.txt into -d",
    )
    add(
        "--input",
        type="path",
        nargs="+",
        metavar="FILE",
        help=f"your own text, or folders of it: {', '.join(READERS)}; other UTF-8 files are one"
        " document each",
    )
    add("--name", help="name of your own corpus")
    add(
        "--text-key",
        "--jsonl-keys",
        action="append",
        metavar="KEY",
        help="key of the text in JSON and tables (default: text), meta.text inside an object; given"
        " several times: the first key that an entry has",
    )
    add(
        "--max-document-mb",
        type=int,
        metavar="MB",
        default=limits.document // MB,
        help="refuse longer documents and lines of JSON: they must fit into memory several times"
        " (default: %(default)s)",
    )
    add(
        "--max-unpack-ratio",
        type=int,
        metavar="N",
        default=limits.ratio,
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
    add(
        "--vocab-size",
        type=int,
        help="entries of the BPE that is trained if no file is given (default:"
        f" {TokenizerChoice.vocab_size})",
    )
    add(
        "--append-eod",
        action="store_true",
        help="accepted as in GPT-NeoX: an end token is always written",
    )
    add("--workers", type=int, help="processes that encode (default: one for each core)")
    add(
        "--verify",
        type="path",
        metavar="PREFIX",
        help="only compare these token files with their sha256 and their vocabulary",
    )
    add("--overwrite", action="store_true", help="replace an earlier corpus of this name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
