"""Files of a stranger: they make nothing hang, reach nothing else, and control no terminal."""

import json
import logging
import os
import signal
from pathlib import Path

import pytest

from megatron.checkpoints.manifest import write_record
from megatron.checkpoints.saved import chosen, keep_weights_only, pointed, remove_checkpoint
from megatron.cli_errors import print_line
from megatron.data.tokens import read_card
from megatron.entry import _Visible
from megatron.errors import UserError, visible
from megatron.evaluation.loaded_run import loaded_run
from megatron.interop.reference import load_plain
from megatron.positions import load_file
from megatron.results.files import read_rows
from tests.checkpoints import make_checkpoint
from tests.results.rows import rows

ESCAPE = "\x1b[2J"  # clears a terminal


@pytest.fixture(autouse=True)
def soon():
    """What waits for a pipe is ended by TimeoutError."""

    def late(number, frame):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def step(corpus, tmp_path):
    """A checkpoint's folder without sums, as a stranger may write it."""
    folder = make_checkpoint(tmp_path / "run", corpus) / "global_step5"
    file = folder / "checkpoint.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({key: record[key] for key in ("step", "config_hash", "vocab")}))
    return folder


def test_latest_may_be_a_pipe(step):
    (step.parent / "latest").unlink()
    os.mkfifo(step.parent / "latest")
    assert pointed(step.parent) == (5, "cannot be read (it is no regular file)")
    assert chosen(step.parent) == step


def test_a_layer_file_and_a_users_file_may_be_pipes(tmp_path):
    for read in (load_plain, load_file):
        for place in (tmp_path / "pipe", Path("/dev/zero")):
            if not place.exists():
                os.mkfifo(place)
            with pytest.raises(UserError, match="it is no regular file"):
                read(place)


def test_links_in_checkpoints_reach_no_other_run(step, tmp_path):
    state = step / "optimizer.safetensors"
    state.write_text("another run's")
    link = tmp_path / "mine/global_step5"
    link.parent.mkdir()
    link.symlink_to(step)
    keep_weights_only(link.parent)
    remove_checkpoint(link)
    assert not link.exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "text").write_text("text")
    (step / "folder").symlink_to(precious)
    assert state.exists()
    remove_checkpoint(step)
    assert (precious / "text").read_text() == "text"


def test_messages_and_logs_control_no_terminal(capsys):
    print_line(f"{ESCAPE}a\r\nb\u202e")
    assert capsys.readouterr().err == "\\x1b[2Ja\\r\nb\\u202e\n"
    record = logging.LogRecord("megatron", logging.INFO, "", 0, "%s", (ESCAPE,), None)
    assert _Visible("%(message)s").format(record) == "\\x1b[2J"
    assert visible("perplexité 漢字 ± …\tü") == "perplexité 漢字 ± …\tü"


def test_what_rows_will_repeat_has_no_control_characters(step, tmp_path):
    path = tmp_path / "rows.jsonl"
    (row,) = rows("t5", {512: 9.0})
    path.write_text(json.dumps(row | {"any": {"deep": [["\x9b2J"]]}}) + "\n")
    with pytest.raises(
        UserError,
        match=r"line 1: is no result of evaluate.py: '.*\\.*' has a control character",
    ):
        read_rows([path])
    sidecar = tmp_path / "text.json"
    facts = {"documents": 1, "tokens": 2, "corpus": "wiki"}
    sidecar.write_text(json.dumps(facts))
    assert read_card(sidecar)["corpus"] == "wiki"
    sidecar.write_text(json.dumps(facts | {"corpus": ESCAPE}))
    with pytest.raises(UserError, match="does not describe a token file"):
        read_card(sidecar)
    before = (step / "checkpoint.json").read_text()
    write_record(step, json.loads(before) | {"files": {}, "parent_model": ESCAPE})
    with pytest.raises(UserError, match="parent_model has a control character"):
        loaded_run(None, str(step), None)
    (step / "checkpoint.json").write_text(before)
    odd = step.parent.rename(tmp_path / ESCAPE)
    with pytest.raises(UserError, match="has a control character in its name - rename it"):
        loaded_run(None, str(odd), None)
