"""prepare_data.py: from text to token files, with the tokenizer that wrote them beside."""

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron.data.corpora import CORPORA, Corpus, named
from megatron.data.readers import READERS, Files
from megatron.data.tokenizer import KINDS, Tokenizer, build_tokenizer, train_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter, dtype_for
from megatron.errors import UserError

BATCH_CHARACTERS = (
    4_000_000  # encoded at once: the library holds some 150 bytes per token meanwhile
)
TRAINING_CHARACTERS = 200_000_000  # a tokenizer learns from this much of a corpus at most


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer to use; without files a byte-level BPE of vocab_size entries is trained on the corpus."""

    kind: str = "HFTokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int = 4096

    @property
    def trained(self) -> bool:
        return self.kind == "HFTokenizer" and self.vocab_file is None


def run(arguments: Sequence[str]) -> str:
    """What `python prepare_data.py` does; returns the summary to print, raises UserError for what the user can mend."""
    # GPT-NeoX spells its options with underscores.
    args = _parser().parse_args(
        [re.sub(r"^--\w+", lambda m: m[0].replace("_", "-"), a) for a in arguments]
    )
    if args.workers is not None:
        if args.workers < 1:
            raise UserError(
                f"--workers: {args.workers} cannot work - use 1 or more, or leave it away for all cores"
            )
        os.environ["RAYON_NUM_THREADS"] = str(
            args.workers
        )  # read when the library starts its threads, at first use
    choice = _choice(args)
    return prepare(_corpus(args), Path(args.data_dir), choice, overwrite=args.overwrite)


def prepare(
    corpus: Corpus, data_dir: Path, choice: TokenizerChoice, *, overwrite: bool = False
) -> str:
    """Write DATA_DIR/NAME/NAME_text_document.{bin,idx,json}; returns the summary. A fault changes nothing."""
    folder = data_dir / corpus.name
    prefix = folder / f"{corpus.name}_text_document"
    if not overwrite and prefix.with_name(prefix.name + ".idx").exists():
        return "already prepared\n" + _summary(_same(corpus, prefix, choice), choice)
    with _new_folder(folder):
        _write(corpus, prefix, choice, overwrite)
    return _summary(TokenFile.open(prefix), choice)


def _write(corpus: Corpus, prefix: Path, choice: TokenizerChoice, overwrite: bool) -> None:
    trained = prefix.with_name("tokenizer.json")
    beside = trained.with_name(f"tokenizer.json.{os.getpid()}.tmp")
    try:
        if choice.trained:
            texts = _first(corpus.documents(), TRAINING_CHARACTERS)
            beside.write_text(train_tokenizer(texts, choice.vocab_size), encoding="utf-8")
        tokenizer = build_tokenizer(
            choice.kind, beside if choice.trained else choice.vocab_file, choice.merge_file
        )
        with TokenWriter(prefix, dtype_for(tokenizer.vocab_size), overwrite=overwrite) as writer:
            _encode(corpus, tokenizer, writer)
            writer.meta = _facts(corpus, tokenizer, choice)
        if choice.trained:
            os.replace(beside, trained)
    finally:
        beside.unlink(missing_ok=True)


def _encode(corpus: Corpus, tokenizer: Tokenizer, writer: TokenWriter) -> None:
    """Add every document and the token that ends it; documents without text are left out, as in GPT-NeoX."""
    columns = (
        TextColumn(f"{corpus.name}: {{task.completed}} documents, {{task.fields[tokens]}} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(
        SpinnerColumn(), *columns, console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("", total=None, tokens="0")
        for texts in _batches(corpus.documents(), BATCH_CHARACTERS):
            for ids in filter(None, tokenizer.encode_batch(texts)):
                writer.add([*ids, tokenizer.eod])
            progress.update(task, advance=len(texts), tokens=f"{writer.tokens:,}")
    if not writer.documents:
        raise UserError(
            f"{corpus.name}: the input has no documents with text in them - nothing was written"
        )


def _batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _facts(corpus: Corpus, tokenizer: Tokenizer, choice: TokenizerChoice) -> dict[str, Any]:
    """The sidecar: what these tokens are."""
    known = {
        "type": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    trained = {"trained_for": choice.vocab_size} if choice.trained else {}
    return {
        "corpus": corpus.name,
        "tokenizer": known | trained,
        "sources": corpus.sources(),
        "skipped": corpus.skipped,
    }


def _same(corpus: Corpus, prefix: Path, choice: TokenizerChoice) -> TokenFile:
    """The token file that is there, if prepared from the same sources with the same tokenizer; else UserError."""
    try:
        tokens = TokenFile.open(prefix)
    except UserError as error:
        raise UserError(f"{error} (with --overwrite)") from None
    written = tokens.meta.get("tokenizer", {})
    if choice.trained:
        path = prefix.with_name("tokenizer.json")
        same = path.is_file() and written.get("trained_for") == choice.vocab_size
        same = same and build_tokenizer("HFTokenizer", path).hash == written["hash"]
    else:
        same = build_tokenizer(
            choice.kind, choice.vocab_file, choice.merge_file
        ).hash == written.get("hash")
    differs = [] if same else ["with another tokenizer"]
    if [s["sha256"] for s in tokens.meta.get("sources", [])] != [
        s["sha256"] for s in corpus.sources()
    ]:
        differs.append("from other sources")
    if differs:
        raise UserError(
            f"{prefix}: is there already, prepared {' and '.join(differs)} - take another --name or -d, or --overwrite"
        )
    return tokens


def _summary(tokens: TokenFile, choice: TokenizerChoice) -> str:
    """What there is, and the lines for a YAML file."""
    known, skipped = tokens.meta["tokenizer"], tokens.meta["skipped"]
    trained = ", trained on this text" if choice.trained else ""
    lines = [
        f"{tokens.meta['corpus']}: {len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype})",
        f"tokenizer: {known['type']} {known['hash']}, {known['vocab_size']:,} entries{trained}",
    ]
    if skipped:
        lines.append(f"left out: {skipped} files that cannot be decoded")
    vocab_file = tokens.prefix.with_name("tokenizer.json") if choice.trained else choice.vocab_file
    keys = {
        "data_path": tokens.prefix,
        "tokenizer_type": known["type"],
        "vocab_file": vocab_file,
        "merge_file": choice.merge_file,
    }
    return "\n".join(
        [*lines, "in your YAML:", *(f"  {key}: {value}" for key, value in keys.items() if value)]
    )


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; after a fault those that are new are gone again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = error.filename or folder
        raise UserError(
            f"{where}: {error.strerror or error} - check permissions and free space, or choose -d DIR"
        ) from None
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # not empty, where all went well
                path.rmdir()


def _corpus(args: argparse.Namespace) -> Corpus:
    if bool(args.corpus) == bool(args.input):
        raise UserError(
            "prepare_data.py: what is to be prepared? - name a corpus (stdlib), or give --input FILE --name NAME"
        )
    if args.corpus:
        if args.name:
            raise UserError(
                f"--name: the corpus {args.corpus} has its name already - leave --name away"
            )
        return named(args.corpus)
    if not args.name:
        raise UserError(
            "--name: is missing - with --input give the corpus a name, such as --name mytext"
        )
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", args.name):
        raise UserError(
            f"--name: '{args.name}' cannot be a folder's name - use letters, digits, '_', '-' and '.'"
        )
    return Files(args.name, args.input, args.text_key)


def _choice(args: argparse.Namespace) -> TokenizerChoice:
    kind = args.tokenizer_type or ("GPT2BPETokenizer" if args.merge_file else "HFTokenizer")
    choice = TokenizerChoice(
        kind, args.vocab_file, args.merge_file, args.vocab_size or TokenizerChoice.vocab_size
    )
    if args.vocab_size and not choice.trained:
        raise UserError(
            f"--vocab-size: is for a tokenizer that is trained here, {kind} has its own - leave it away"
        )
    if args.merge_file and kind != "GPT2BPETokenizer":
        raise UserError(
            f"--merge-file: {kind} has none - leave it away, or use --tokenizer-type GPT2BPETokenizer"
        )
    return choice


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Turn text into token files: DIR/NAME/NAME_text_document.bin, .idx and .json.",
        allow_abbrev=False,
    )
    parser.add_argument("corpus", nargs="?", help=f"a corpus known by name: {', '.join(CORPORA)}")
    parser.add_argument(
        "-d", "--data-dir", default="data", metavar="DIR", help="where data goes (default: data)"
    )
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help=f"your own text, or folders of it: {', '.join(READERS)}",
    )
    parser.add_argument("--name", help="how your own corpus is called")
    parser.add_argument(
        "--text-key",
        default="text",
        help="what holds the text in JSON lines and tables (default: text)",
    )
    parser.add_argument("-t", "--tokenizer-type", metavar="TYPE", help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "--vocab-file",
        type=Path,
        help="vocab.json (GPT2BPETokenizer) or tokenizer.json (HFTokenizer)",
    )
    parser.add_argument("--merge-file", type=Path, help="merges.txt (GPT2BPETokenizer)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help=f"entries of the BPE trained where no file is given (default: {TokenizerChoice.vocab_size})",
    )
    parser.add_argument("--workers", type=int, help="threads that encode (default: all cores)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what was prepared before under this name"
    )
    return parser
