"""From text to token files, with the tokenizer that wrote them beside."""

import contextlib
import hashlib
import json
import logging
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.data.corpora.corpus import Corpus, Downloaded, Followed
from megatron.data.prepare.batches import batches_of, pieces_of
from megatron.data.prepare.encoder import TokenizerFiles
from megatron.data.prepare.progress import ShownProgress
from megatron.data.prepare.unfinished import SHARD, Unfinished, remove_published, unfinished_folder
from megatron.data.prepare.workers import encode_in_order
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.data.tokens import TokenFile, dtype_for
from megatron.errors import UserError
from megatron.files import atomic_write
from megatron.folder_lock import owned_folder

log = logging.getLogger(__name__)

TRAINING_CHARACTERS = 200_000_000  # a tokenizer learns from this much of a corpus at most


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer to use.

    Without files a byte-level BPE of vocab_size entries is trained on the corpus.
    """

    kind: str = "HFTokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int = 4096

    @property
    def trained(self) -> bool:
        return self.kind == "HFTokenizer" and self.vocab_file is None


@dataclass(frozen=True)
class Way:
    """How the work is done; none of it changes the tokens.

    workers: processes that encode; 1: the one that reads and writes does it too
    shard: bytes of text that an interruption may cost; command: words for PREFIX.json
    """

    workers: int = 1
    shard: int = SHARD
    command: Sequence[str] = ()


def prepare(
    corpus: Corpus,
    data_dir: Path,
    choice: TokenizerChoice,
    *,
    overwrite: bool = False,
    way: Way | None = None,
) -> str:
    """Write DATA_DIR/NAME/NAME_text_document.{bin,idx,json} and return the summary to print.

    Raises UserError for what the user can mend. A fault changes nothing that was there. After an
    interruption the same call continues, see `unfinished`.
    """
    folder = data_dir / corpus.name
    prefix = folder / f"{corpus.name}_text_document"
    index = prefix.with_name(prefix.name + ".idx")
    if not index.exists() or overwrite:
        with _new_folder(folder), owned_folder(folder, "-d"):
            if not index.exists() or overwrite:  # another preparation may have ended meanwhile
                _write(corpus, prefix, choice, overwrite, way or Way())
                return _summary(TokenFile.open(prefix), choice)
    if unfinished_folder(prefix).exists():
        with contextlib.suppress(UserError), owned_folder(folder, "-d"):  # another may work there
            remove_published(prefix)
    return "already prepared\n" + _summary(_same(corpus, prefix, choice), choice)


def _write(
    corpus: Corpus, prefix: Path, choice: TokenizerChoice, overwrite: bool, way: Way
) -> None:
    """The token files, and beside them the tokenizer where it is trained here."""
    identity = _identity(corpus, choice)
    if not choice.trained:
        files = _given_files(choice)
        _tokenise(corpus, prefix, choice, files, identity, way).publish(overwrite=overwrite)
        return
    with _trained_files(corpus, prefix, choice, identity) as files:
        done = _tokenise(corpus, prefix, choice, files, identity, way)
        done.publish(files.vocab_file, overwrite=overwrite)


def _identity(corpus: Corpus, choice: TokenizerChoice) -> dict[str, Any]:
    """What the tokens depend on; an unfinished preparation of something else is not continued."""
    source = corpus.identity() if isinstance(corpus, Followed) else corpus.sources()
    return {"corpus": source, "about": corpus.about, "vocab_size": choice.vocab_size}


def _given_files(choice: TokenizerChoice) -> TokenizerFiles:
    tokenizer = build_tokenizer(choice.kind, choice.vocab_file, choice.merge_file)
    return TokenizerFiles(choice.kind, choice.vocab_file, choice.merge_file, tokenizer.hash)


@contextlib.contextmanager
def _trained_files(
    corpus: Corpus, prefix: Path, choice: TokenizerChoice, identity: Any
) -> Iterator[TokenizerFiles]:
    """A tokenizer that was trained on this corpus, by this process or an interrupted one."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    folder = unfinished_folder(prefix)
    path = folder / f"tokenizer-{digest}.json"
    try:
        if not path.exists():
            with atomic_write(path) as temporary:
                text = train_tokenizer(_training_texts(corpus), choice.vocab_size)
                temporary.write_text(text, encoding="utf-8")
        tokenizer = build_tokenizer(choice.kind, path)
        yield TokenizerFiles(choice.kind, path, None, tokenizer.hash)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty where training failed


def _tokenise(
    corpus: Corpus,
    prefix: Path,
    choice: TokenizerChoice,
    files: TokenizerFiles,
    identity: dict[str, Any],
    way: Way,
) -> Unfinished:
    """All tokens of a corpus, ready to be published."""
    tokenizer = files.build()
    identity = identity | {"tokenizer": tokenizer.hash}
    dtype = dtype_for(tokenizer.vocab_size)
    trained = files.vocab_file if choice.trained else None
    unfinished = Unfinished(prefix, identity, dtype, tokenizer.eod, keep=trained, shard=way.shard)
    with unfinished:
        if unfinished.state.card is None:
            _encode(corpus, tokenizer, files, unfinished, way.workers)
            card = _card(corpus, tokenizer, choice, unfinished, way)
            unfinished.save(card)
    return unfinished


def _encode(
    corpus: Corpus,
    tokenizer: Tokenizer,
    files: TokenizerFiles,
    unfinished: Unfinished,
    workers: int,
) -> None:
    """Add every document and the token that ends it, from the first one that is missing."""
    state = unfinished.state
    if state.read:
        log.warning(
            f"{corpus.name}: continues an interrupted preparation after {state.documents:,}"
            f" documents, {state.tokens:,} tokens"
        )
    batches = batches_of(pieces_of(corpus, tokenizer.cuttable, start=state.read))
    ordered = encode_in_order(batches, tokenizer, files, workers)
    shown = ShownProgress(corpus, state.text_bytes, state.tokens)
    with contextlib.closing(ordered), shown as progress:
        for batch, encoded in ordered:
            unfinished.add(batch, encoded)
            progress.update(state.documents, state.text_bytes, unfinished.tokens)
    if not state.documents:
        raise UserError(
            f"{corpus.name}: the input has no documents with text in them - nothing was written"
        )


def _trained_tokenizer(prefix: Path) -> Path:
    return prefix.with_name("tokenizer.json")


def _training_texts(corpus: Corpus) -> Iterator[str]:
    """What a tokenizer is trained on: the first text that is not held out, in pieces."""
    texts = (piece.text for piece in pieces_of(corpus, True, stop=corpus.to_train_on))
    return _first(texts, TRAINING_CHARACTERS)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _card(
    corpus: Corpus,
    tokenizer: Tokenizer,
    choice: TokenizerChoice,
    unfinished: Unfinished,
    way: Way,
) -> dict[str, Any]:
    """PREFIX.json: what these tokens are, and how they were made."""
    about: dict[str, Any] = {
        "type": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    if choice.trained:
        about["trained_for"] = choice.vocab_size
    state = unfinished.state
    return {
        "corpus": corpus.name,
        "tokenizer": about,
        "sources": corpus.sources(),
        "skipped": corpus.skipped,
        **corpus.about,
        "documents": state.documents,
        "tokens": state.tokens,
        "text_bytes": state.text_bytes,
        "dtype": str(unfinished.dtype),
        "blank": state.blank,
        "only_space": state.only_space,
        "skips": _skips(corpus, state.blank),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(way.command),
    }


def _skips(corpus: Corpus, blank: int) -> dict[str, int]:
    """What was left out, by reason."""
    skips = corpus.skips if isinstance(corpus, Followed) else {"not decoded": corpus.skipped}
    counted = {"blank document": blank} | skips
    return {reason: count for reason, count in counted.items() if count}


def _same(corpus: Corpus, prefix: Path, choice: TokenizerChoice) -> TokenFile:
    """The existing token file, where it has the same sources and tokenizer; else a UserError."""
    try:
        tokens = TokenFile.open(prefix)
    except UserError as error:
        raise UserError(f"{error} (with --overwrite)") from None
    differs = []
    if not _same_tokenizer(tokens, choice):
        differs.append("with another tokenizer")
    if not _same_sources(corpus, tokens):
        differs.append("from other sources")
    about = {key: value for key, value in corpus.about.items() if key != "recipe"}
    if any(tokens.meta.get(key) != value for key, value in about.items()):
        differs.append("with another part or limit")
    if differs:
        raise UserError(
            f"{prefix}: exists already, prepared {' and '.join(differs)} - take another --name or "
            "-d, or --overwrite"
        )
    return tokens


def _same_sources(corpus: Corpus, tokens: TokenFile) -> bool:
    """Whether the corpus has the files of its card, as far as they are here."""
    if isinstance(corpus, Downloaded) and not corpus.is_here():
        log.warning(
            f"{corpus.name}: not all of its downloads are here, so the tokens are not compared with"
            " them"
        )
        return True
    return _checksums(tokens.meta.get("sources", [])) == _checksums(corpus.sources())


def _same_tokenizer(tokens: TokenFile, choice: TokenizerChoice) -> bool:
    writer = tokens.meta.get("tokenizer", {})
    if not choice.trained:
        chosen = build_tokenizer(choice.kind, choice.vocab_file, choice.merge_file)
        return chosen.hash == writer.get("hash")
    path = _trained_tokenizer(tokens.prefix)
    if not path.is_file() or writer.get("trained_for") != choice.vocab_size:
        return False
    return build_tokenizer("HFTokenizer", path).hash == writer.get("hash")


def _checksums(sources: Iterable[dict[str, Any]]) -> list[str]:
    return [source["sha256"] for source in sources]


def _summary(tokens: TokenFile, choice: TokenizerChoice) -> str:
    """What was prepared, and the lines for a YAML file."""
    meta = tokens.meta
    writer = meta["tokenizer"]
    trained = ", trained on this text" if choice.trained else ""
    lines = [
        f"{meta['corpus']}: {len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype})",
        f"tokenizer: {writer['type']} {writer['hash']}, {writer['vocab_size']:,} entries{trained}",
    ]
    lines += [f"left out, {reason}: {count:,}" for reason, count in _left_out(meta).items()]
    if meta.get("only_space"):
        lines.append(f"documents of white space only, kept: {meta['only_space']:,}")
    vocab_file = _trained_tokenizer(tokens.prefix) if choice.trained else choice.vocab_file
    settings = {
        "data_path": tokens.prefix,
        "tokenizer_type": writer["type"],
        "vocab_file": vocab_file,
        "merge_file": choice.merge_file,
    }
    lines.append("in your YAML:")
    lines += [f"  {key}: {value}" for key, value in settings.items() if value]
    return "\n".join(lines)


def _left_out(meta: dict[str, Any]) -> dict[str, int]:
    """What was left out, by reason; cards of earlier versions have two numbers."""
    if "skips" in meta:
        return meta["skips"]
    counted = {"blank document": meta.get("blank", 0), "not decoded": meta.get("skipped", 0)}
    return {reason: count for reason, count in counted.items() if count}


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; after a fault those that are new are removed."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = error.filename or folder
        raise UserError(
            f"{where}: {error.strerror or error} - check permissions and free space, or choose "
            "-d DIR"
        ) from None
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # not empty, where all went well
                path.rmdir()
