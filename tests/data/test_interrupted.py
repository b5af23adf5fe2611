"""A preparation that is killed at any moment is continued, and gives the same files."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import count

import pytest

from megatron.data.prepare import prepare as module
from megatron.data.prepare.batches import batches_of
from megatron.data.prepare.prepare import TokenizerChoice, Way, prepare
from megatron.data.readers.files import Files
from megatron.errors import UserError
from tests.support import ROOT, unlaunched

CHARACTERS = TokenizerChoice("CharLevelTokenizer")
TRAINED = TokenizerChoice(vocab_size=270)
SMALL = Way(shard=100)
TEXTS = ["", *(f"document {number} " * (number % 7) for number in range(40)), " ", "end"]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(batches_of, "__defaults__", (50,))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # a fork has no threads of the library


def made(source, folder, choice=CHARACTERS, **options):
    return prepare(Files("c", [source]), folder, choice, way=SMALL, **options)


def results(folder):
    """All files of a corpus, the card without what differs between two calls.

    The lock of a process that was killed after its last step may stay. It blocks nobody.
    """
    paths = [path for path in (folder / "c").iterdir() if path.name != ".owner"]
    found = {path.name: path.read_bytes() for path in paths}
    card = json.loads(found.pop("c_text_document.json"))
    del card["date"], card["command"]
    return found, card


def killed(step, source, folder, choice, monkeypatch):
    """Whether a process was killed at this one of its steps that reach the disk."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL
    steps = iter(range(step))

    def counted(call):
        def wrapped(*words, **options):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*words, **options)

        return wrapped

    for name in ("fsync", "replace", "link", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    status = 1
    try:
        made(source, folder, choice, overwrite=True)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("choice", [CHARACTERS, TRAINED])
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_kill_at_any_step_changes_nothing(tmp_path, source, monkeypatch, choice, stride, caplog):
    made(source, tmp_path / "whole", choice)
    expected = results(tmp_path / "whole")
    for step in range(0, 999, stride):
        folder = tmp_path / f"killed{step}"
        if not killed(step, source, folder, choice, monkeypatch):
            break
        made(source, folder, choice)
        assert results(folder) == expected, step
    assert step > 40
    assert caplog.text.count("continues an interrupted preparation after") > 2


def test_other_input_or_another_tokenizer_starts_anew(tmp_path, source, monkeypatch, caplog):
    data = tmp_path / "data"
    for change in ("source", "choice"):
        assert killed(20, source, data, CHARACTERS, monkeypatch)
        choice = CHARACTERS
        if change == "source":
            source.write_text('"another"\n')
        else:
            choice = TRAINED
        made(source, data, choice, overwrite=True)
        made(source, tmp_path / change, choice)
        assert results(data) == results(tmp_path / change)
        source.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    assert "continues" not in caplog.text


def test_damage_of_what_is_unfinished_starts_anew(tmp_path, source, monkeypatch, caplog):
    made(source, tmp_path / "whole")
    for name in ("tokens.bin", "sizes.bin", "state.json"):
        assert killed(20, source, tmp_path / "data", CHARACTERS, monkeypatch)
        file = tmp_path / "data/c/.c_text_document.unfinished" / name
        content = bytearray(file.read_bytes())
        content[3] ^= 1
        file.write_bytes(content)
        made(source, tmp_path / "data", overwrite=True)
        assert results(tmp_path / "data") == results(tmp_path / "whole")
    assert "continues" not in caplog.text


@pytest.mark.parametrize("fault", [KeyboardInterrupt, UserError])
def test_what_was_finished_stays_after_a_fault(tmp_path, source, monkeypatch, caplog, fault):
    made(source, tmp_path / "whole")
    update = module.ShownProgress.update

    def interrupted(self, documents, *words):
        update(self, documents, *words)
        if documents > 20:
            raise fault

    monkeypatch.setattr(module.ShownProgress, "update", interrupted)
    with pytest.raises(fault):
        made(source, tmp_path / "data")
    monkeypatch.setattr(module.ShownProgress, "update", update)
    made(source, tmp_path / "data")
    assert results(tmp_path / "data") == results(tmp_path / "whole")
    assert "c: continues an interrupted preparation after " in caplog.text


WORDS = """
import sys
from functools import partial
import prepare_data
prepare_data.Way = partial(prepare_data.Way, shard=300_000)
sys.exit(prepare_data.main(sys.argv[1:]))
"""


@pytest.mark.campaign
def test_kills_at_random_moments_with_two_workers(tmp_path):
    """24 kills or more, one to four of each preparation; 9 MB of text, shards of 300 kB."""
    draw = random.Random(5)
    source = tmp_path / "c.jsonl"
    words = [f"word{number}" for number in range(20_000)]
    with source.open("w") as file:
        for _ in range(9000):
            file.write(json.dumps(" ".join(draw.choices(words, k=120))) + "\n")
    made_in(tmp_path / "whole", source)
    expected = results(tmp_path / "whole")
    started = time.monotonic()
    made_in(tmp_path / "timed", source)
    usual = time.monotonic() - started
    kills = 0
    for trial in count():
        if kills >= 24:
            break
        folder = tmp_path / f"trial{trial}"
        for _ in range(draw.randint(1, 4)):
            process = started_in(folder, source)
            try:
                process.wait(draw.uniform(0.1, 0.9) * usual)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            process.wait()
        made_in(folder, source)
        assert results(folder) == expected, trial


def started_in(folder, source):
    command = [sys.executable, "-c", WORDS, "--input", source, "--name", "c", "-d", folder]
    words = [*map(str, command), "--vocab-size", "2000", "--workers", "2"]
    return subprocess.Popen(words, cwd=ROOT, env=unlaunched(), stderr=subprocess.DEVNULL)


def made_in(folder, source):
    assert started_in(folder, source).wait(300) == 0
