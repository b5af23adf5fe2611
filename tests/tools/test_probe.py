"""tools/probe.py on a checkpoint with random weights: from the files to rows and a picture."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from megatron.errors import UserError
from megatron.evaluation.probe_checkpoint import ProbeOptions, probe
from megatron.results.probes import RULER, axis_of, read_probes
from tests.checkpoints import make_checkpoint

WORDS = ["--lengths", "64", "96", "--depths", "2", "--trials", "2"]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("probed"), corpus, "pos_emb=learned", "max_position_embeddings=64"
    )


def test_every_probe_has_its_rows_and_a_length_without_an_answer_says_why(forks, folder):
    done = forks.run("tools/probe.py", "--checkpoint", folder, *WORDS)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "evaluation").glob("*-probes.jsonl")
    rows = read_probes([path])
    assert (path.with_suffix(".png")).read_bytes().startswith(b"\x89PNG")
    of = {(row["probe"], row["length"], row.get("depth")): row for row in rows}
    assert len(of) == len(rows) == 2 * (3 * 2 + 2)
    for row in rows:
        assert (row["pos_emb"], row["step"], row["corpus"], row["part"]) == (
            "learned",
            5,
            "tiny",
            "valid",
        )
        assert (row.get("reason") is None) == (row["length"] == 64)
    assert 0 <= of["passkey", 64, 1.0]["accuracy"] <= 1
    assert of["recall", 96, 0.0]["accuracy"] is None
    assert "learned positions end at 64" in of["recall", 96, 0.0]["reason"]
    assert of["receptive_field", 64, None]["cumulative"][-1] == pytest.approx(1)
    assert sum(of["attention", 64, None]["mass"][0]) == pytest.approx(1, abs=1e-5)


def test_probes_of_other_lengths_and_kinds_stay_when_some_are_asked_again(folder, tmp_path):
    output = tmp_path / "a.jsonl"
    asked = ProbeOptions(str(folder), output=output, depths=2, trials=1)
    probe(None, replace(asked, lengths=[48, 64], probes=["copy", "attention"]))
    first = read_probes([output])
    answers = []
    again = replace(asked, lengths=[64], probes=["copy"], probe_seed=1)
    probed = probe(None, again, report=answers.append)
    rows = read_probes([output])
    assert probed.rows == rows, "earlier rows of this model too"
    assert [(row["probe"], row["length"]) for (row, _) in answers] == [("copy", 64)]
    renewed = [row for row in rows if (row["probe"], row["length"]) == ("copy", 64)]
    assert [row["probe_seed"] for row in renewed] == [1, 1]
    assert rows[:-2] == [row for row in first if (row["probe"], row["length"]) != ("copy", 64)]


def test_another_kind_of_file_is_not_replaced(folder, tmp_path):
    output = tmp_path / "a.jsonl"
    output.write_text(json.dumps({"pos_emb": "mine"}) + "\n")
    with pytest.raises(UserError, match=r"a.jsonl, line 1: is no result of tools/probe.py"):
        probe(None, ProbeOptions(str(folder), output=output, lengths=[64]))
    assert output.read_text() == '{"pos_emb": "mine"}\n'


def test_a_text_that_is_too_short_is_one_message(folder, tmp_path):
    message = r"--lengths: the valid part has \d+ tokens, 10000001 are needed - give shorter"
    with pytest.raises(UserError, match=message):
        probe(None, ProbeOptions(str(folder), output=tmp_path / "a.jsonl", lengths=[10**7]))
    assert not (tmp_path / "a.jsonl").exists()


def test_no_checkpoint_no_numbers(tmp_path):
    with pytest.raises(UserError, match="nowhere - train first"):
        probe(None, ProbeOptions(str(tmp_path / "nowhere")))


RULER_LENGTHS = (256, 320)  # the encoding of this checkpoint ends at 256


@pytest.fixture(scope="module")
def longer(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    settings = ["pos_emb=learned", "max_position_embeddings=256", "eval_tokens=8192"]
    return make_checkpoint(folder, corpus, *settings)


@pytest.fixture(scope="module")
def of_ruler(forks, longer):
    """The rows of all tasks, and what the command printed."""
    path = longer / "ruler.jsonl"
    words = ["--probes", "ruler", "--lengths", *RULER_LENGTHS, "--depths", 2, "--trials", 2]
    done = forks.run("tools/probe.py", "--checkpoint", longer, *words, "-o", path)
    assert done.returncode == 0, done.stderr
    return read_probes([path]), done.stdout


def test_every_task_of_ruler_has_rows_that_say_their_protocol(of_ruler):
    rows, _ = of_ruler
    places = {"multikey": 2, "multikey_dense": 2, "variable_tracking": 5}
    places |= {"common_words": 4, "frequent_words": 3}
    count = Counter((row["probe"], row["length"]) for row in rows)
    assert count == {(task, length): n for task, n in places.items() for length in RULER_LENGTHS}
    for row in rows:
        assert (row["protocol"], row["corpus"], row["probe_seed"]) == ("probes", "tiny", 0)
        assert row["form"]["answers"] in (1, 3, 4)
        assert row["trials"] == 2
        assert axis_of(row["probe"]) in row
        if row["length"] == 256:
            assert row["reason"] is None
            assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
            assert 0 < row["guess"] < 0.35
        else:
            assert (row["accuracy"], row["guess"], row["low"]) == (None, None, None)
            assert "learned positions end at 256" in row["reason"]
    hops = [row["hops"] for row in rows if row["probe"] == "variable_tracking"]
    assert hops == [0, 1, 2, 3, 4] * 2


def test_the_terminal_shows_guess_rates_beside_accuracies(of_ruler):
    _, shown = of_ruler
    numbers = r"\d\.\d{3} \d\.\d{3}"
    assert re.search(rf"multikey at 256: {numbers} \(guess rates 0\.250 0\.250\)", shown)
    assert "frequent_words at 320: pos_emb: learned positions end at 256" in shown


def test_the_suite_is_asked_by_name_alone(longer, tmp_path):
    asked = ProbeOptions(
        str(longer), output=tmp_path / "a.jsonl", lengths=[256], trials=1, depths=1
    )
    probed = probe(None, replace(asked, probes=["copy", "ruler", "multikey"]))
    names = list(dict.fromkeys(row["probe"] for row in probed.rows))
    assert names == ["copy", *RULER]
    assert not {*RULER} & {*ProbeOptions.probes}


def test_a_wrong_name_of_a_probe_lists_the_right_ones(forks, longer):
    done = forks.run("tools/probe.py", "--checkpoint", longer, "--probes", "rulers")
    assert done.returncode == 2
    assert "invalid choice: 'rulers'" in done.stderr
    assert "'multikey_dense'" in done.stderr
    assert "Traceback" not in done.stderr
