"""From text to token files, with the tokenizer that wrote them beside.

An interrupted preparation is continued by the same command. In the hidden folder
.NAME_text_document.unfinished tokens.bin and sizes.bin grow, and state.json says how far they are
whole. What was written after the last state is cut off again.
"""

import hashlib
import json
import logging
import os
import shlex
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.data.encoding import (
    Batch,
    Encoded,
    TokenizerFiles,
    batches_of,
    encode_in_order,
    pieces_of,
)
from megatron.data.readers import Corpus
from megatron.data.token_index import write_index
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.data.tokens import LONGEST, TokenFile, dtype_for
from megatron.errors import UserError, cannot_write
from megatron.files import atomic_write, sha256_of, sync, write_text
from megatron.folder_lock import owned_folder

log = logging.getLogger(__name__)

TRAINING_CHARACTERS = 200_000_000  # a tokenizer learns from this much of a corpus at most
SHARD = 64_000_000  # bytes of text after which the state is written


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer to use. Without files a byte-level BPE of vocab_size entries is trained."""

    kind: str = "HFTokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int = 4096

    @property
    def trained(self) -> bool:
        return self.kind == "HFTokenizer" and self.vocab_file is None


def prepare(
    corpus: Corpus,
    data_dir: Path,
    choice: TokenizerChoice,
    *,
    overwrite: bool = False,
    workers: int = 1,
    command: Sequence[str] = (),
) -> str:
    """Write DATA_DIR/NAME/NAME_text_document.{bin,idx,json} and return the summary to print.

    workers: processes that encode, which changes no token; command: words for PREFIX.json
    Raises UserError for what the user can mend. A fault changes nothing that was there.
    """
    folder = data_dir / corpus.name
    prefix = folder / f"{corpus.name}_text_document"
    index = prefix.with_name(prefix.name + ".idx")
    if index.exists() and not overwrite:
        _check_same(corpus, prefix, choice)
        return f"already prepared\n{_summary(TokenFile.open(prefix), choice)}"
    try:
        with owned_folder(folder, "-d"):
            if choice.trained:
                tokenizer_hash = None
            else:
                files = (choice.kind, choice.vocab_file, choice.merge_file)
                tokenizer_hash = build_tokenizer(*files).hash
            identity = [corpus.identity(), corpus.about, choice.vocab_size, tokenizer_hash]
            unfinished = Unfinished(prefix, json.loads(json.dumps(identity)))
            with closing(unfinished):
                card = _encode(corpus, choice, unfinished, workers, command)
                if index.exists() and not overwrite:  # it has appeared meanwhile
                    raise UserError(
                        f"{index}: exists already - choose another name, or add --overwrite"
                    )
                unfinished.publish(card)
    except OSError as error:
        raise cannot_write(f"-d: {error.filename or folder}", error) from None
    return _summary(TokenFile.open(prefix), choice)


@dataclass
class PreparationState:
    """How far a preparation is.

    read: documents of the corpus that were tokenised, blank ones too; documents: those written
    blank, only_space: documents without text, and those of white space; text_bytes: of UTF-8
    """

    read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    blank: int = 0
    only_space: int = 0


class Unfinished:
    """Token files that are being written, continued where an earlier process ended.

    identity: JSON values that are others when the tokens may be others
    `close` removes all of it unless a state was written.
    """

    def __init__(self, prefix: Path, identity: Any) -> None:
        self.prefix = prefix
        self.identity = identity
        self.folder = prefix.with_name(f".{prefix.name}.unfinished")
        self.state_file = self.folder / "state.json"
        self.tokens_file = self.folder / "tokens.bin"
        self.tokenizer_file = self.folder / "tokenizer.json"
        self.state = PreparationState()
        self._files = ExitStack()
        try:
            stored = json.loads(self.state_file.read_bytes())
            self.state = PreparationState(**stored["state"])
            is_same = stored["identity"] == identity
        except (OSError, ValueError, KeyError, TypeError):
            is_same = False
        if not is_same:
            self.state = PreparationState()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()

    def open(self, dtype: np.dtype, eod: int) -> None:
        """Open the files, and cut off what was written after the last state.

        dtype, eod: of the tokens
        """
        self.dtype = dtype
        self._end = np.array([eod], dtype).tobytes()
        self._sizes = array("i")  # of all documents
        self._size = 0  # tokens of the document that is being written
        self._unsaved = 0  # bytes of text since the last state
        self._tokens = self._files.enter_context(self.tokens_file.open("ab"))
        self._counts = self._files.enter_context((self.folder / "sizes.bin").open("ab"))
        size = dtype.itemsize * self.state.tokens
        self._counts.truncate(4 * self.state.documents)
        self._sizes.frombytes((self.folder / "sizes.bin").read_bytes())
        if sum(self._sizes) != self.state.tokens or self.tokens_file.stat().st_size < size:
            raise UserError(f"{self.folder}: is damaged - remove it, and start again")
        self._tokens.truncate(size)
        with self.tokens_file.open("rb") as file:
            self._digest = hashlib.file_digest(file, "sha256")

    def add(self, batch: Batch, encoded: Encoded) -> None:
        """Write a batch; the state follows once a shard is full."""
        state = self.state
        width = self.dtype.itemsize
        contents: list[bytes] = []
        place = 0
        for piece, count in zip(batch, encoded.counts, strict=True):
            contents.append(encoded.ids[place : place + count * width])
            place += count * width
            self._size += count
            if not piece.last:
                continue
            state.read = piece.document
            state.only_space += piece.only_space
            if not self._size:  # as in GPT-NeoX, documents without tokens are left out
                state.blank += 1
                continue
            contents.append(self._end)
            size = self._size + 1
            if size > LONGEST:
                raise UserError(
                    f"{self.prefix}: document {piece.document} has more than {LONGEST} tokens,"
                    " which the format cannot count - cut it into several"
                )
            self._sizes.append(size)
            self._size = 0
            state.documents += 1
            state.tokens += size
            state.text_bytes += piece.text_bytes
            self._unsaved += piece.text_bytes
            if self._unsaved >= SHARD:
                self._flush(contents)
                contents = []
                self.save()
        self._flush(contents)

    def _flush(self, contents: list[bytes]) -> None:
        content = b"".join(contents)
        self._tokens.write(content)
        self._digest.update(content)

    def save(self) -> None:
        """Write down that all documents so far are whole; after that they are not lost."""
        saved = self._counts.tell() // 4
        self._counts.write(self._sizes[saved:].tobytes())
        for file in (self._tokens, self._counts):
            file.flush()
            os.fsync(file.fileno())
        self._unsaved = 0
        content = {"identity": self.identity, "state": asdict(self.state)}
        write_text(self.state_file, json.dumps(content) + "\n")

    def publish(self, card: dict[str, Any]) -> None:
        """Give the files their names: the index comes last, without it there is no token file."""
        self._files.close()
        card_file, index = self.folder / "card", self.folder / "index"
        write_index(index, self.dtype, self._sizes)
        card["sha256"] = {"bin": self._digest.hexdigest(), "idx": sha256_of(index)}
        card_file.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        places = {self.tokens_file: ".bin", card_file: ".json", index: ".idx"}
        for file in places:
            sync(file)
        self.state_file.unlink()  # from here on there is nothing to continue
        self.prefix.with_name(self.prefix.name + ".idx").unlink(missing_ok=True)
        if self.tokenizer_file.exists():
            self.tokenizer_file.replace(self.prefix.with_name("tokenizer.json"))
        for file, suffix in places.items():
            file.replace(self.prefix.with_name(self.prefix.name + suffix))

    def close(self) -> None:
        self._files.close()
        if not self.state_file.exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def _encode(
    corpus: Corpus,
    choice: TokenizerChoice,
    unfinished: Unfinished,
    workers: int,
    command: Sequence[str],
) -> dict[str, Any]:
    """Train the tokenizer where none is given, and encode every document; returns PREFIX.json."""
    vocab_file = choice.vocab_file
    if choice.trained:
        vocab_file = unfinished.tokenizer_file
        if not vocab_file.exists():
            with atomic_write(vocab_file) as temporary:
                text = train_tokenizer(_training_texts(corpus), choice.vocab_size)
                temporary.write_text(text, encoding="utf-8")
    tokenizer = build_tokenizer(choice.kind, vocab_file, choice.merge_file)
    files = TokenizerFiles(choice.kind, vocab_file, choice.merge_file, tokenizer.hash)
    unfinished.open(dtype_for(tokenizer.vocab_size), tokenizer.eod)
    state = unfinished.state
    if state.read:
        log.warning(
            f"{corpus.name}: continues an interrupted preparation after {state.documents:,}"
            f" documents, {state.tokens:,} tokens"
        )

    batches = batches_of(pieces_of(corpus, tokenizer.cuttable, start=state.read))
    done = state.text_bytes
    # Nothing is shown unless stderr is a terminal.
    bar = tqdm(desc=corpus.name, initial=done, unit="B", unit_scale=True, disable=None)
    with bar, closing(encode_in_order(batches, files, workers)) as ordered:
        for batch, encoded in ordered:
            unfinished.add(batch, encoded)
            bar.set_postfix(documents=state.documents, tokens=state.tokens, refresh=False)
            bar.update(state.text_bytes - done)
            done = state.text_bytes
    if not state.documents:
        raise UserError(
            f"{corpus.name}: the input has no documents with text in them - nothing was written"
        )
    unfinished.save()

    writer: dict[str, Any] = {
        "type": tokenizer.name,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    if choice.trained:
        writer["trained_for"] = choice.vocab_size
    skips = {"blank document": state.blank} | corpus.skips
    return {
        "corpus": corpus.name,
        "tokenizer": writer,
        "sources": corpus.sources(),
        "skipped": corpus.skipped,
        **corpus.about,
        "documents": state.documents,
        "tokens": state.tokens,
        "text_bytes": state.text_bytes,
        "dtype": str(unfinished.dtype),
        "blank": state.blank,
        "only_space": state.only_space,
        "skips": {reason: count for reason, count in skips.items() if count},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
    }


def _training_texts(corpus: Corpus) -> Iterator[str]:
    """The text that a tokenizer is trained on: the first that is not held out, in pieces."""
    left = TRAINING_CHARACTERS
    for piece in pieces_of(corpus, True, stop=corpus.to_train_on):
        yield piece.text[:left]
        left -= len(piece.text)
        if left <= 0:
            return


def _check_same(corpus: Corpus, prefix: Path, choice: TokenizerChoice) -> None:
    """Raise UserError unless the existing token file has the same sources and tokenizer."""
    try:
        tokens = TokenFile.open(prefix)
    except UserError as error:
        raise UserError(f"{error} (with --overwrite)") from None
    writer = tokens.meta.get("tokenizer", {})
    vocab_file = prefix.with_name("tokenizer.json") if choice.trained else choice.vocab_file
    differs = []
    tokenizer = None
    if vocab_file is None or vocab_file.exists() or not choice.trained:
        tokenizer = build_tokenizer(choice.kind, vocab_file, choice.merge_file)
    is_size = not choice.trained or writer.get("trained_for") == choice.vocab_size
    if tokenizer is None or tokenizer.hash != writer.get("hash") or not is_size:
        differs.append("with another tokenizer")
    if corpus.is_here():
        before = [source["sha256"] for source in tokens.meta.get("sources", [])]
        if before != [source["sha256"] for source in corpus.sources()]:
            differs.append("from other sources")
    else:
        log.warning(
            f"{corpus.name}: not all of its downloads are here, so the tokens are not compared with"
            " them"
        )
    about = {key: value for key, value in corpus.about.items() if key != "recipe"}
    if any(tokens.meta.get(key) != value for key, value in about.items()):
        differs.append("with another part or limit")
    if differs:
        raise UserError(
            f"{prefix}: exists already, prepared {' and '.join(differs)} - take another --name or "
            "-d, or --overwrite"
        )


def _summary(tokens: TokenFile, choice: TokenizerChoice) -> str:
    """A summary of the token files, and the lines for a YAML file."""
    meta = tokens.meta
    writer = meta["tokenizer"]
    trained = ", trained on this text" if choice.trained else ""
    lines = [
        f"{meta['corpus']}: {len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype})",
        f"tokenizer: {writer['type']} {writer['hash']}, {writer['vocab_size']:,} entries{trained}",
    ]
    lines += [f"left out, {reason}: {n:,}" for reason, n in meta.get("skips", {}).items()]
    if meta.get("only_space"):
        lines.append(f"documents of white space only, kept: {meta['only_space']:,}")
    settings = {
        "data_path": tokens.prefix,
        "tokenizer_type": writer["type"],
        "vocab_file": tokens.prefix.with_name("tokenizer.json") if trained else choice.vocab_file,
        "merge_file": choice.merge_file,
    }
    lines.append("in your YAML:")
    lines += [f"  {key}: {value}" for key, value in settings.items() if value]
    return "\n".join(lines)
