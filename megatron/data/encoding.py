"""Encode documents into the bytes of their ids: word by word, in one or several processes."""

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.data.tokens import dtype_for
from megatron.errors import UserError

BATCH_CHARACTERS = 500_000  # characters encoded at once: the library needs some 150 bytes per token
FEW = 8  # batches encoded in this process: starting others would take longer
AHEAD = 4  # batches per process that are in memory: being encoded, waiting, or written next

# GPT-2's pattern for ASCII, where no Unicode version can disagree about letters and spaces.
WORD = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
# Up to white space that follows an ASCII character. White space beyond ASCII stays inside, because
# it may include the spaces after it.
STRETCH = re.compile(r"(?:[^\x00-\x7f]+\s*|[^\s\x80-\U0010ffff]+)*+", re.ASCII)
MOST = 400_000  # words in the cache: some 80 MB
LONGEST_WORD = 100  # characters of a word in the cache


class TokenizerFiles(NamedTuple):
    """The files from which every process builds a tokenizer.

    Without files HFTokenizer is a byte-level BPE trained on the corpus.
    """

    kind: str = "HFTokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None

    @property
    def trained(self) -> bool:
        return self.kind == "HFTokenizer" and self.vocab_file is None

    def build(self) -> Tokenizer:
        return build_tokenizer(*self)


def batches_of(texts: Iterable[str], characters: int = BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Documents in lists of at least this many characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1  # a million empty documents are a batch too
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_in_order(
    batches: Iterable[list[str]], files: TokenizerFiles, workers: int
) -> Generator[tuple[list[str], list[bytes]], None, None]:
    """Each batch of texts with their ids, in the order of the batches.

    workers: 1: this process does everything; more: other processes encode, and this one reads and
        writes
    Raises UserError if a process dies or a text cannot be encoded.
    """
    rest = iter(batches)
    first = list(islice(rest, FEW + 1))
    everything = chain(first, rest)
    if workers == 1 or len(first) <= FEW:
        encoder = Encoder(files)
        for batch in everything:
            yield batch, encoder.encode(batch)
        return

    # Don't fork this process: forks would inherit the locks of its threads without the threads.
    context = multiprocessing.get_context("forkserver")
    ahead = deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (files,)) as pool:
        try:
            for batch in everything:
                ahead.append((batch, pool.submit(_encode_in_worker, batch)))
                if len(ahead) == AHEAD * workers:
                    batch, future = ahead.popleft()
                    yield batch, future.result()
            for batch, future in ahead:
                yield batch, future.result()
        except BrokenProcessPool:
            raise UserError(
                "--workers: an encoding process died (killed or out of memory) - run the same"
                " command again, with fewer --workers if it ran out of memory"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder: "Encoder | None" = None  # of an encoding process


def _start_worker(files: TokenizerFiles) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One core per process: libraries would start a thread for each core.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    _encoder = Encoder(files)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: Sequence[str]) -> list[bytes]:
    assert _encoder is not None
    return _encoder.encode(texts)


class Encoder:
    """Encodes batches of texts with a tokenizer, in the dtype of its token files.

    Byte-level BPE with GPT-2's pattern works word by word: each word is encoded once, and the bytes
    of its ids are cached.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.tokenizer = files.build()
        self.dtype = dtype_for(self.tokenizer.vocab_size)
        self.words: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as bytes. Raises UserError if the library fails."""
        if not self.tokenizer.by_words:
            return self._contents(texts)
        words_of_texts = [words_of(text) for text in texts]
        contents = self.words
        new_words = list(set().union(*words_of_texts) - contents.keys())
        contents.update(zip(new_words, self._contents(new_words), strict=True))
        joined = [b"".join(map(contents.__getitem__, words)) for words in words_of_texts]
        for word in new_words:
            if len(word) > LONGEST_WORD:
                del contents[word]
        if len(contents) > MOST:
            contents.clear()
        return joined

    def _contents(self, texts: Sequence[str]) -> list[bytes]:
        return [np.array(ids, self.dtype).tobytes() for ids in self.tokenizer.encode_batch(texts)]


def words_of(text: str) -> list[str]:
    """Cut a text into words that can be encoded one by one; joined they are the text.

    ASCII is cut by GPT-2's pattern. Other characters stay together in one word, from white space to
    white space, which the library cuts.
    """
    words = []
    done = 0
    while not text.isascii() and (other := BEYOND_ASCII.search(text, done)):
        place = other.start()
        start = max(text.rfind(" ", done, place), text.rfind("\n", done, place), done)
        while start > done and text[start - 1] in " \t\n\r\v\f":
            start -= 1
        stretch = STRETCH.match(text, place)
        assert stretch is not None  # it always matches, if only the empty text
        words += WORD.findall(text, done, start)
        words.append(text[start : stretch.end()])
        done = stretch.end()
    words += WORD.findall(text, done)
    return words
