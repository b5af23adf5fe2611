"""Shared by the entry scripts: arguments, one message per fault, notes once."""

import sys
from unittest.mock import patch

import pytest

from megatron import cli_errors, entry
from megatron.config import load
from megatron.errors import UserError
from tests.config.small import SIZES
from tests.support import LAUNCHED


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def options(parser):
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--checkpoint")


def status(main, *words, **settings):
    with pytest.raises(SystemExit) as ended, patch.object(sys, "argv", ["", *words]):
        entry.run(main, options=options, **settings)
    return ended.value.code


def nothing(config, options):
    return 0


def test_files_settings_and_options_may_mix(tmp_path):
    (tmp_path / "tiny.yml").write_text("\n".join(SIZES).replace("=", ": "))
    calls = []

    def main(config, options):
        calls.append((config.training.seed, config.position.pos_emb, options.lengths))
        return 3

    words = ["tiny", "seed=7", "-d", str(tmp_path), "--lengths", "64", "128", "pos_emb=alibi"]
    assert status(main, *words) == 3
    assert calls == [(7, "alibi", [64, 128])]
    files = ["runs/lr=1/config.yml"]
    assert entry.split_words([*files, "seed=1"]) == (files, ["seed=1"])


def test_a_fault_is_one_message_of_the_rank_that_has_it(capsys, monkeypatch):
    def main(config, options):
        raise UserError("save: is full - free some space")

    assert status(nothing, *SIZES, "sed=1") == 1
    message = "bad configuration (command line)\n  sed: no such key; did you mean seed?\n"
    assert capsys.readouterr().err == message
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli_errors, "HEAD_START", 0)
    assert status(main, *SIZES) == 1
    assert capsys.readouterr().err == "rank 3: save: is full - free some space\n"


def test_a_status_and_what_runs_at_the_end_survive_two_ranks(forks, tmp_path):
    lines = [
        "import atexit",
        "from megatron import entry",
        "atexit.register(print, 'last')",
        "print('first')",
        "def main(config, options): raise SystemExit(3)",
        "entry.run(main, config_needed=False)",
    ]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    done = forks.run(script, env=dict.fromkeys(LAUNCHED, "2"))
    assert (done.returncode, done.stdout.split()) == (3, ["first", "last"]), done.stderr


def test_notes_are_printed_once_by_the_first_process_and_many_without_effect_are_one(
    capsys, monkeypatch
):
    idle = ["wall_clock_breakdown", "steps_per_print", "bias_gelu_fusion", "log_param_norm"]
    words = [*SIZES, "pos_emb=rpe", *(f"{key}=1" for key in idle)]
    assert status(nothing, *words) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first == "note: pos_emb: rpe means t5"
    names = second.removeprefix("note: accepted, have no effect here: ").split(", ")
    assert sorted(names) == sorted(idle)
    monkeypatch.setenv("RANK", "1")
    status(nothing, *words)
    assert capsys.readouterr().err == ""


def test_the_purpose_says_which_keys_are_needed_and_a_checkpoint_has_them(tmp_path, capsys):
    assert status(nothing, *SIZES, purpose="evaluate") == 1
    assert "load: is not set" in capsys.readouterr().err

    folder = tmp_path / "run" / "global_step3"
    folder.mkdir(parents=True)
    load([], [*SIZES, "seed=5"]).save(folder / "config.yml")
    (folder / "checkpoint.json").write_text("{}")
    calls = []
    settings = {"purpose": "evaluate", "config_needed": False}
    words = ["--checkpoint", str(tmp_path / "run")]
    assert status(lambda config, options: calls.append(config), *words, **settings) == 0
    assert calls == [None]
    words += ["eval_tokens=7"]
    assert status(lambda config, options: calls.append(config), *words, **settings) == 0
    assert (calls[1].training.seed, calls[1].evaluation.eval_tokens) == (5, 7)
    words = ["--checkpoint", str(tmp_path / "no"), "eval_tokens=7"]
    assert status(nothing, *words) == 1
    assert "checkpoint: there is no folder" in capsys.readouterr().err


def test_help_names_the_options_of_the_script_and_where_the_keys_are(capsys):
    assert status(nothing, "--help") == 0
    shown = capsys.readouterr().out
    assert "--lengths" in shown
    assert "see configs/README.md" in shown
