"""Documents to the bytes of their ids: by words, here or in several processes."""

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

BATCH_CHARACTERS = 500_000  # encoded at once: the library holds some 150 bytes per token
FEW = 8  # batches that are encoded here: processes would not be worth their start
AHEAD = 4  # batches for each process that were read, and encode, wait, or are written next

# GPT-2's pattern for ASCII. There no version of Unicode can disagree about letters and spaces.
WORD = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
# Up to white space that follows an ASCII character. What is white space beyond ASCII, and may
# reach over the spaces that follow it, stays inside.
STRETCH = re.compile(r"(?:[^\x00-\x7f]+\s*|[^\s\x80-\U0010ffff]+)*+", re.ASCII)
MOST = 400_000  # words that are remembered: some 80 MB
LONGEST_WORD = 100  # characters of a word that is remembered


class TokenizerFiles(NamedTuple):
    """The files from which every process builds a tokenizer.

    Without files HFTokenizer is a byte-level BPE that is trained on the corpus.
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
    """Documents in lists of so many characters or more."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1  # a million blank documents are a batch too
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_in_order(
    batches: Iterable[list[str]], files: TokenizerFiles, workers: int
) -> Generator[tuple[list[str], list[bytes]], None, None]:
    """Each batch of texts with their ids, in the order of the batches.

    workers: 1: this process does all; more: so many processes encode, and this one reads and writes
    Raises UserError if a process is lost, or a text cannot be encoded.
    """
    rest = iter(batches)
    first = list(islice(rest, FEW + 1))
    everything = chain(first, rest)
    if workers == 1 or len(first) <= FEW:
        encoder = Encoder(files)
        for batch in everything:
            yield batch, encoder.encode(batch)
        return

    # Not forks of this process: they would inherit the locks of its threads without the threads.
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
                "--workers: a process that encodes has ended, killed or out of memory - start the"
                " same command again, with fewer --workers if the memory does not suffice"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder: "Encoder | None" = None  # of a process that encodes


def _start_worker(files: TokenizerFiles) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all; the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # One core for each process: libraries would start a thread for each core.
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
    """Encodes batches of texts with one tokenizer, in the dtype of its token files.

    Byte-level BPE with GPT-2's pattern works by words: each is encoded once, and remembered as the
    bytes of its ids.
    """

    def __init__(self, files: TokenizerFiles, most: int = MOST) -> None:
        self.tokenizer = files.build()
        self.dtype = dtype_for(self.tokenizer.vocab_size)
        self.words: dict[str, bytes] = {}
        self._most = most

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
        if len(contents) > self._most:
            contents.clear()
        return joined

    def _contents(self, texts: Sequence[str]) -> list[bytes]:
        return [np.array(ids, self.dtype).tobytes() for ids in self.tokenizer.encode_batch(texts)]


def words_of(text: str) -> list[str]:
    """A text in words that can be encoded one by one: joined they are the text.

    ASCII is cut by GPT-2's pattern. A stretch with other characters is one word, from white space
    to white space; the library cuts it.
    """
    words = []
    done = 0
    while not text.isascii() and (other := BEYOND_ASCII.search(text, done)):
        place = other.start()
        start = max(text.rfind(" ", done, place), text.rfind("\n", done, place), done)
        while start > done and text[start - 1] in " \t\n\r\v\f":
            start -= 1
        stretch = STRETCH.match(text, place)
        assert stretch is not None  # it matches nothing at least
        words += WORD.findall(text, done, start)
        words.append(text[start : stretch.end()])
        done = stretch.end()
    words += WORD.findall(text, done)
    return words
