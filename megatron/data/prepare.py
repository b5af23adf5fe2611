"""Turn text into token files, with the tokenizer next to them."""

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron.data.encoding import TokenizerFiles, batches_of, encode_in_order
from megatron.data.readers import Corpus
from megatron.data.samples import split_in_words
from megatron.data.tokenizers.tokenizer import Tokenizer, description
from megatron.data.tokenizers.train import train_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter, dtype_for
from megatron.errors import UserError, cannot_write
from megatron.files import atomic_write
from megatron.folder_lock import owned_folder
from megatron.splits import SPLIT

log = logging.getLogger(__name__)

TRAINING_CHARACTERS = 200_000_000  # a tokenizer is trained on at most this much of a corpus
TRAINED = "tokenizer.json"  # next to the token files
UNKNOWN = "text that became the unknown token"
VOCAB_SIZE = 4096  # entries of a tokenizer that we train


def prepare(
    corpus: Corpus,
    data_dir: Path,
    files: TokenizerFiles,
    vocab_size: int = VOCAB_SIZE,
    *,
    overwrite: bool = False,
    workers: int = 1,
    command: Sequence[str] = (),
) -> str:
    """Write DATA_DIR/NAME/NAME_text_document.{bin,idx,json} and return a summary to print.

    vocab_size: entries of a tokenizer that we train
    workers: processes that encode (the tokens stay the same); command: words for PREFIX.json
    Raises UserError for mistakes that the user can fix. After a fault, existing files are
    unchanged.
    """
    folder = data_dir / corpus.name
    prefix = folder / f"{corpus.name}_text_document"
    trained_file = folder / TRAINED
    trained_for = {"trained_for": vocab_size} if files.trained else {}
    if prefix.with_name(prefix.name + ".idx").exists() and not overwrite:
        tokens = TokenFile(prefix)
        if files.trained:
            files = files._replace(vocab_file=trained_file)
        changes = _changes(tokens.meta, corpus, description(files.build()) | trained_for)
        if changes:
            raise UserError(
                f"{prefix}: exists already, prepared with other {' and '.join(changes)} - choose"
                " another --name or -d, or add --overwrite"
            )
        return f"already prepared\n{_summary(tokens, files)}"
    try:
        with owned_folder(folder, "-d"), ExitStack() as temporaries:
            used = files
            if files.trained:
                temporary = temporaries.enter_context(atomic_write(trained_file))
                text = train_tokenizer(training_texts(corpus), vocab_size)
                temporary.write_text(text, encoding="utf-8")
                used = files._replace(vocab_file=temporary)
                files = files._replace(vocab_file=trained_file)
            tokenizer = used.build()
            dtype = dtype_for(tokenizer.vocab_size)
            with TokenWriter(prefix, dtype, overwrite=overwrite) as writer:
                _encode(corpus, tokenizer, used, writer, workers)
                writer.meta |= {
                    "corpus": corpus.name,
                    "tokenizer": description(tokenizer) | trained_for,
                    "sources": corpus.sources(),
                    **corpus.about,
                    "dtype": str(dtype),
                    "skips": dict(+corpus.skips),
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "command": shlex.join(command),
                }
    except OSError as error:
        raise cannot_write(f"-d: {error.filename or folder}", error) from None
    return _summary(TokenFile(prefix), files)


def _changes(card: dict, corpus: Corpus, tokenizer: dict) -> list[str]:
    """How a preparation now would differ from the one that a card describes."""
    changes = []
    if card.get("tokenizer") != tokenizer:
        changes.append("tokenizer")
    if card.get("documents_limit") != corpus.about.get("documents_limit"):
        changes.append("documents")
    if corpus.is_here:
        sums = [source["sha256"] for source in card.get("sources", [])]
        if sums != [source["sha256"] for source in corpus.sources()]:
            changes.append("sources")
    else:
        log.warning(f"{corpus.name}: the existing tokens were not compared with the files online")
    return changes


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, files: TokenizerFiles, writer: TokenWriter, workers: int
) -> None:
    """Write every document and count the bytes of text; also count documents without tokens."""
    end = np.array([tokenizer.eod], writer.dtype).tobytes()
    batches = batches_of(corpus.documents())
    text_bytes = 0
    # The bar is only shown if stderr is a terminal.
    bar = tqdm(desc=corpus.name, unit="B", unit_scale=True, disable=None)
    with bar, closing(encode_in_order(batches, files, workers)) as ordered:
        for batch, contents in ordered:
            before = text_bytes
            for text, content in zip(batch, contents, strict=True):
                if not content:  # as in GPT-NeoX, documents without tokens are left out
                    corpus.skips["blank document"] += 1
                    continue
                ids = np.frombuffer(content, writer.dtype)
                corpus.skips[UNKNOWN] += int(np.count_nonzero(ids == tokenizer.unknown))
                writer.append(content + end)
                text_bytes += len(text) if text.isascii() else len(text.encode())
            bar.update(text_bytes - before)
    writer.meta["text_bytes"] = text_bytes


def training_texts(corpus: Corpus, left: int = TRAINING_CHARACTERS) -> Iterator[str]:
    """The text that a tokenizer is trained on: the beginning of the text that is not held out."""
    for text in islice(corpus.documents(), corpus.to_train_on):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _summary(tokens: TokenFile, files: TokenizerFiles) -> str:
    """A summary of the token files, with the lines for a YAML file."""
    meta = tokens.meta
    split = meta.get("split", SPLIT)
    writer = meta["tokenizer"]
    trained = ", trained on this text" if "trained_for" in writer else ""
    lines = [
        f"{meta['corpus']}: {len(tokens):,} documents, {tokens.tokens:,} tokens ({tokens.dtype})",
        f"tokenizer: {writer['type']} {writer['hash']}, {writer['vocab_size']:,} entries{trained}",
    ]
    lines += [f"left out, {reason}: {n:,}" for reason, n in meta.get("skips", {}).items()]
    lines.append(split_in_words(tokens, split))
    settings = {
        "data_path": tokens.prefix,
        "split": split,
        "tokenizer_type": writer["type"],
        "vocab_file": files.vocab_file,
        "merge_file": files.merge_file,
    }
    lines.append("in your YAML:")
    lines += [f"  {key}: {value}" for key, value in settings.items() if value]
    return "\n".join(lines)
