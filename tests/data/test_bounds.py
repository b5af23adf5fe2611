"""What an input may ask for: memory, time, and disk are bounded."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import zstandard

from megatron.data.prepare.encoding import encoded
from megatron.data.readers.files import Files
from megatron.data.readers.unpack import MB, Limits
from megatron.data.tokenizers.tokenizer import PIECE
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from prepare_data import run
from tests.support import ROOT, unlaunched

MEASURE = """
import sys
from pathlib import Path
from prepare_data import main

def peak():  # not ru_maxrss, which begins with that of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

before = peak()
status = main(sys.argv[1:])
print((peak() - before) // 1000)
sys.exit(status)
"""


def prepared(folder, path, *words):
    """(exit status, message, MB of memory that the work took)."""
    words = ["--input", path, "--name", "c", "-d", folder / "data", *words]
    command = [sys.executable, "-c", MEASURE, *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, env=unlaunched(), capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stderr, int(done.stdout.split()[-1])


def test_a_bomb_is_refused_in_little_memory(tmp_path):
    bomb = b'{"text": "' + b"a" * 200 * MB + b'"}\n'
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(zstandard.compress(bomb, 19))
    assert path.stat().st_size < 20_000
    status, message, memory = prepared(tmp_path, path, "--max-document-mb", 5)
    assert (status, message) == (
        1,
        f"{path}:1: the line is longer than 5 MB, which would fill the memory"
        " - remove it, cut it into several, or raise --max-document-mb\n",
    )
    assert memory < 120
    assert not (tmp_path / "data").exists()


@pytest.mark.campaign
def test_a_document_of_200_mb_needs_memory_for_a_few_copies(tmp_path, capsys):
    text = "some words of a long text, and more\n" * (200 * MB // 36)
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(zstandard.compress(json.dumps({"text": text}).encode()))
    status, message, memory = prepared(tmp_path, path, "-t", "CharLevelTokenizer", "--workers", 2)
    with capsys.disabled():
        print(f"\na document of {len(text)} bytes: {memory} MB of memory")
    assert (status, message) == (0, "")
    tokens = TokenFile.open(tmp_path / "data/c/c_text_document")
    assert tokens.sizes.tolist() == [len(text) + 1]
    assert memory < 2000


def test_a_long_document_is_one_document_of_the_same_tokens(tmp_path):
    text = "some words of a long text\n" * 50_000
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"text": text}))
    words = ["--input", str(path), "--name", "c", "-d", str(tmp_path), "-t", "CharLevelTokenizer"]
    run(words)
    tokens = TokenFile.open(tmp_path / "c" / "c_text_document")
    assert len(text) > PIECE
    assert len(tokens) == 1
    assert tokens.read(0).astype("uint8").tobytes() == text.encode() + b"\0"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_lines_and_documents_are_as_long_as_the_limit_at_most(tmp_path, pack):
    suffix = {gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    path = tmp_path / f"c.jsonl{suffix}"
    path.write_bytes(pack(b'"12345678"\n"123456789"\n'))
    assert list(Files("c", [path], limits=Limits(document=11)).documents())[1] == "123456789"
    with pytest.raises(UserError, match=r"c\.jsonl\.(gz|zst):2: the line is longer than 1e-05 MB"):
        list(Files("c", [path], limits=Limits(document=10)).documents())


def test_a_file_that_grows_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.readers.unpack.FREE", MB // 10)
    path = tmp_path / "c.jsonl.zst"
    path.write_bytes(zstandard.compress(b'"a"\n' * 100_000))
    limits = Limits(ratio=100)
    with pytest.raises(UserError, match=r"over 100 times as much - it is no text; raise --max-unp"):
        list(Files("c", [path], limits=limits).documents())
    assert len(list(Files("c", [path], limits=Limits(ratio=100_000)).documents())) == 100_000


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('"a"\n' * 3)
    corpus = Files("c", [path])
    with pytest.raises(UserError, match=r"--input: .*c\.jsonl was changed while it was read - wai"):
        [path.write_text('"b"\n' * 9) for _ in corpus.documents()]
    list(corpus.documents())
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match="was changed while it was read"):
        corpus.sources()
    path.unlink()
    with pytest.raises(UserError, match=r"--input: .*c\.jsonl cannot be read \(No such file"):
        list(corpus.documents())


class Slow:
    name = "HFTokenizer"

    def __init__(self, work):
        self.work = work

    def encode_batch(self, texts):
        return self.work()


def test_a_tokenizer_that_never_ends_is_named():
    ended = threading.Event()
    started = time.monotonic()
    with pytest.raises(
        UserError, match="1 characters were not encoded within 0 seconds - a pattern"
    ):
        encoded(Slow(ended.wait), ["a"], patience=0.1)
    ended.set()
    assert time.monotonic() - started < 5


def test_a_panic_of_the_library_is_a_message():
    class Panic(BaseException):
        pass

    def work():
        raise Panic("index out of range")

    with pytest.raises(
        UserError, match=r"cannot encode this text \(index out of range\) - the tok"
    ):
        encoded(Slow(work), ["a"])


def test_a_pattern_that_backtracks_without_end_is_left_behind(tmp_path):
    script = f"""
import json, sys
from pathlib import Path
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from prepare_data import run
from megatron.data.prepare.encoding import encoded
from megatron.errors import UserError
content = json.loads(train_tokenizer(["a b"], 257))
pattern = {{"type": "Split", "pattern": {{"Regex": "(x+x+)+y"}}, "behavior": "Isolated"}}
content["pre_tokenizer"] = pattern | {{"invert": False}}
path = Path({str(tmp_path)!r}) / "tokenizer.json"
path.write_text(json.dumps(content))
try:
    encoded(build_tokenizer("HFTokenizer", path), ["x" * 60], patience=0.5)
except UserError as fault:
    sys.exit(str(fault))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=unlaunched(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "60 characters were not encoded within 1 seconds" in done.stderr or (
        "cannot encode this text" in done.stderr
    )
    assert "Traceback" not in done.stderr
