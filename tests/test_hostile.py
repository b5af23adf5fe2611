"""Files of a stranger reach no other file, and control no terminal."""

import logging

from megatron.checkpoints.saved import keep_weights_only, remove_checkpoint
from megatron.cli_errors import print_line
from megatron.entry import _Visible
from megatron.errors import visible
from tests.checkpoints import make_checkpoint

ESCAPE = "\x1b[2J"  # clears a terminal


def test_links_in_checkpoints_reach_no_other_run(corpus, tmp_path):
    step = make_checkpoint(tmp_path / "run", corpus) / "global_step5"
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
