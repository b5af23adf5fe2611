"""What the entry scripts share: arguments, one message per fault, notes once."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron import cli_errors, entry
from megatron.config import load
from megatron.config.keys import all_keys
from megatron.errors import UserError
from tests.support import run

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(entry.NOTES_PRINTED, raising=False)


def options(parser):
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--checkpoint")


def status(main, *words, **settings):
    with pytest.raises(SystemExit) as ended:
        entry.run(main, argv=[*words], options=options, **settings)
    return ended.value.code


def test_files_come_from_the_folder_and_words_and_options_may_mix(tmp_path):
    (tmp_path / "tiny.yml").write_text("\n".join(TINY).replace("=", ": "))
    calls = []

    def main(config, given):
        calls.append((config.training.seed, config.position.pos_emb, given.lengths))

    assert (
        status(
            main, "tiny", "seed=7", "-d", str(tmp_path), "pos_emb=alibi", "--lengths", "64", "128"
        )
        == 0
    )
    assert calls == [(7, "alibi", [64, 128])]


def test_a_path_with_an_equals_sign_in_a_folder_is_a_file():
    assert entry.split_words(["runs/lr=1/config.yml", "seed=1"]) == (
        ["runs/lr=1/config.yml"],
        ["seed=1"],
    )


def test_what_main_returns_is_the_exit_status():
    assert status(lambda config, given: 3, *TINY) == 3


def test_a_fault_is_one_message_without_a_traceback(capsys):
    assert status(lambda config, given: 0, *TINY, "sed=1") == 1
    assert (
        capsys.readouterr().err
        == "bad configuration (command line)\n  sed: no such key; did you mean seed?\n"
    )


def test_a_fault_inside_main_is_one_message_too(capsys):
    def main(config, given):
        raise UserError("save: is full - free some space")

    assert status(main, *TINY) == 1
    assert capsys.readouterr().err == "save: is full - free some space\n"


def test_a_fault_of_ours_leaves_its_traceback_in_the_runs_folder(tmp_path, capsys):
    def main(config, given):
        raise RuntimeError("ours")

    assert status(main, *TINY, f"save={tmp_path}") == 1
    (file,) = tmp_path.iterdir()
    assert 'raise RuntimeError("ours")' in file.read_text()
    assert capsys.readouterr().err.startswith(
        f"internal error: RuntimeError: ours - the traceback is in {file};"
    )


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("end", ["return 3", "raise SystemExit(3)"])
def test_a_status_and_what_runs_at_the_end_survive_however_a_process_ends(ranks, end):
    lines = [
        "import atexit",
        "from megatron import entry",
        "atexit.register(print, 'last')",
        "print('first')",
    ]
    lines += [
        f"def main(config, options): {end}",
        "entry.run(main, description='', config_needed=False, argv=[])",
    ]
    found = run("-c", "\n".join(lines), env={"WORLD_SIZE": ranks})
    assert (found.returncode, found.stdout.split()) == (3, ["first", "last"]), found.stderr


def test_an_interruption_ends_quietly():
    def main(config, given):
        raise KeyboardInterrupt

    assert status(main, *TINY) == 130


def test_notes_are_printed_once_and_only_by_the_first_process(capsys, monkeypatch):
    words = [*TINY, "steps_per_print=10"]
    status(lambda config, given: 0, *words)
    assert capsys.readouterr().err.startswith(
        "note: steps_per_print: accepted, has no effect here: "
    )
    monkeypatch.setenv("RANK", "1")
    status(lambda config, given: 0, *words)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(entry.NOTES_PRINTED, "1")
    status(lambda config, given: 0, *words)
    assert capsys.readouterr().err == ""


def test_other_processes_say_who_they_are_when_only_they_fail(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli_errors, "HEAD_START", 0)
    assert status(lambda config, given: 0, "num_layers=2") == 1
    assert capsys.readouterr().err.startswith("rank 3: bad configuration")


def test_the_purpose_says_which_keys_are_needed(tmp_path, capsys):
    assert status(lambda config, given: 0, *TINY, purpose="evaluate") == 1
    assert "load: not given" in capsys.readouterr().err
    (tmp_path / "tiny.yml").write_text("\n".join(TINY).replace("=", ": "))
    words = [str(tmp_path / "tiny.yml"), "--checkpoint", "somewhere"]
    assert status(lambda config, given: 0, *words, purpose="evaluate") == 0


def test_settings_alone_are_laid_over_the_configuration_of_the_named_checkpoint(tmp_path, capsys):
    folder = tmp_path / "run" / "global_step3"
    folder.mkdir(parents=True)
    load([], [*TINY, "seed=5"]).save(folder / "config.yml")
    (folder / "checkpoint.json").write_text("{}")
    calls = []
    words = ["--checkpoint", str(tmp_path / "run"), "eval_tokens=7"]
    assert (
        status(
            lambda config, given: calls.append(config),
            *words,
            purpose="evaluate",
            config_needed=False,
        )
        == 0
    )
    assert [(calls[0].training.seed, calls[0].evaluation.eval_tokens)] == [(5, 7)]
    assert (
        status(lambda config, given: 0, "--checkpoint", str(tmp_path / "no"), "eval_tokens=7") == 1
    )
    assert "checkpoint: no folder" in capsys.readouterr().err


def test_many_keys_without_effect_are_one_note_after_those_that_matter(capsys):
    idle = [
        "wall_clock_breakdown=true",
        "steps_per_print=10",
        "bias_gelu_fusion=false",
        "log_param_norm=true",
    ]
    assert status(lambda config, given: 0, *TINY, "pos_emb=rpe", *idle) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: pos_emb: rpe means t5",
        "note: accepted, have no effect here: wall_clock_breakdown, steps_per_print,"
        " bias_gelu_fusion, log_param_norm",
    ]
    assert status(lambda config, given: 0, *TINY, *idle[:1]) == 0
    assert (
        "note: wall_clock_breakdown: accepted, has no effect here: time and tokens"
        in capsys.readouterr().err
    )


def test_a_script_may_do_without_a_configuration():
    calls = []
    assert (
        status(lambda config, given: calls.append(config), "--checkpoint", "x", config_needed=False)
        == 0
    )
    assert calls == [None]


def test_help_names_every_key_and_the_options_of_the_script(capsys):
    assert status(lambda config, given: 0, "--help", description="What it does.") == 0
    shown = capsys.readouterr().out
    assert "What it does." in shown
    assert "--lengths" in shown
    for key in all_keys():
        assert f"  {key.name} (" in shown


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_the_entries_answer_bad_configurations_with_status_1(script):
    command = [sys.executable, script, *TINY, "pos_emb=rotery", "save=x"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "pos_emb: no encoding is called 'rotery'; did you mean rotary?" in ended.stderr
    assert "Traceback" not in ended.stderr
