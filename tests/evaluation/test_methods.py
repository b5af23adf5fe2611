"""evaluate.py with methods for longer texts: variants of one model, each with rows of its own."""

import json

import numpy as np
import pytest

from megatron.data.tokens import TokenWriter
from megatron.results.files import read_results
from megatron.results.labels import runs
from tests.evaluation.test_evaluate import TOKENIZER, evaluate, save


@pytest.fixture
def run_folder(tmp_path):
    """A run with rotary and one with alibi, trained at 16, and a corpus of 40 documents."""
    generator = np.random.default_rng(3)
    with TokenWriter(
        tmp_path / "text", np.uint16, meta={"corpus": "noise", "tokenizer": TOKENIZER}
    ) as writer:
        for size in generator.integers(20, 40, 40):
            writer.add(generator.integers(0, 60, size))
    for step, name in ((3, "alibi"), (7, "rotary")):
        save(tmp_path, step, f"pos_emb={name}")
    return tmp_path / "run"


def rotary(folder):
    return f"--checkpoint {folder} --step 7"


def alibi(folder):
    return f"--checkpoint {folder} --step 3"


METHODS = (
    "rerope",
    "leaky_rerope,factor=4",
    "self_extend,window=8,group=2",
    "lm_infinite,sinks=2",
    "dynamic_ntk",
)


def test_each_method_has_rows_of_its_own_that_name_it(run_folder, capsys):
    output = run_folder / "a.jsonl"
    words = (rotary(run_folder), "--lengths 16 64", "--output", output)
    assert evaluate(*words, "--method none", *METHODS) == 0
    assert evaluate(*words, "--window 14 --sinks none 2") == 0
    rows = read_results([output])
    assert {row.get("method") for row in rows} == {
        None,
        "rerope,window=8",
        "leaky_rerope,window=8,factor=4",
        "self_extend,window=8,group=2",
        "lm_infinite,window=16,sinks=2,limit=16",
        "dynamic_ntk,factor=1,step=16",
    }
    assert [(row["window"], row.get("sinks")) for row in rows if "window" in row] == [
        (14, None),
        (14, None),
        (14, 2),
        (14, 2),
    ]
    longest = {label: group[-1]["loss"] for label, group in runs(rows).items()}
    assert len(set(longest.values())) == len(longest) == 8
    printed = capsys.readouterr().out
    assert "rotary, method leaky_rerope,window=8,factor=4: attention near_far" in printed
    assert "rotary, sinks 2 " in printed


def test_tables_are_clipped(run_folder, capsys):
    output = run_folder / "a.jsonl"
    words = (alibi(run_folder), "--lengths 16 64", "--output", output)
    assert evaluate(*words, "--clip-distance none 15") == 0
    loss = {
        (row.get("clip_distance"), row["length"]): row["loss"] for row in read_results([output])
    }
    assert loss[None, 16] == loss[15, 16]
    assert abs(loss[None, 64] - loss[15, 64]) > 1e-6
    assert "alibi, clip_distance 15" in capsys.readouterr().out


def test_files_are_named_by_the_method_with_its_options(run_folder):
    words = (rotary(run_folder), "--lengths 16")
    assert evaluate(*words, "--method rerope lm_infinite,sinks=2,window=14") == 0
    assert evaluate(*words, "--window 14 --sinks 2") == 0
    assert {path.name for path in (run_folder / "evaluation").glob("*.jsonl")} == {
        "text-valid-global_step7-method=rerope,window=8.jsonl",
        "text-valid-global_step7-method=lm_infinite,window=14,sinks=2,limit=14.jsonl",
        "text-valid-global_step7-window=14-sinks=2.jsonl",
    }


def test_a_method_answers_no_question_of_another_and_its_own_again(run_folder):
    output = run_folder / "a.jsonl"
    words = (rotary(run_folder), "--lengths 64", "--output", output)
    assert evaluate(*words, "--method rerope") == 0
    (first,) = read_results([output])
    assert evaluate(*words, "--method none rerope,window=8 rerope,window=4") == 0
    kept, *others = read_results([output])
    assert kept == first, "with the seconds that it took"
    assert {row.get("method") for row in others} == {None, "rerope,window=4"}
    assert len({row["loss"] for row in [kept, *others]}) == 3
    assert all(json.dumps(row) for row in others)


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            "--sinks -1 x --clip-distance 0 1.5 --method rerop",
            [
                "--sinks -1: give a number of tokens of 1 to 16777216, or none",
                "--sinks x: give a number of tokens of 1 to 16777216, or none",
                "--clip-distance 0: give a number of tokens of 1 to 16777216, or none",
                "--clip-distance 1.5: give a number of tokens of 1 to 16777216, or none",
                "--method rerop: no such method; did you mean rerope?",
            ],
        ),
        (
            "--sinks 2 --clip-distance 5 --method none rerope rerope,window=17 self_extend",
            [
                "--sinks 2: without a window all keys are visible; give --window too",
                "--clip-distance 5: rotary has no table by distance; for rotations --method",
                "--sinks 2: excludes --method rerope,window=8",
                "--method rerope,window=8: excludes --clip-distance 5",
                "--sinks 2: excludes --method rerope,window=17",
                "window=17 is not within 1 … 16, the training length",
                "--sinks 2: excludes --method self_extend",
                "--method self_extend: give group= too",
            ],
        ),
        (
            "--window 12 --sinks 2 2 none none --method none",
            ["--sinks 2: is given twice", "--sinks none: is given twice"],
        ),
        ("--method rerope rerope,window=8", ["--method rerope,window=8: is given twice"]),
    ],
    ids=["words", "meaning", "twice", "twice by default"],
)
def test_nonsense_is_refused_with_all_faults_before_anything_is_measured(
    run_folder, words, faults, capsys
):
    assert evaluate(rotary(run_folder), "--lengths 16", words) == 1
    lines = [line for line in capsys.readouterr().err.split("\n") if line.startswith("--")]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert fault in line
    assert not (run_folder / "evaluation").exists()
