"""tools/probe.py on a checkpoint with random weights: from the files to rows."""

import re
from collections import Counter

import pytest

from megatron.checkpoints.read import load_model, read_meta
from megatron.checkpoints.write import write_checkpoint
from megatron.results.probes import PROBES, RULER, axis_of, read_probes
from tests.checkpoints import make_checkpoint
from tests.support import call

LENGTHS = (256, 320)  # the encoding of this checkpoint ends at 256
WORDS = ("--lengths", *LENGTHS, "--depths", 2, "--trials", 2)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probed")
    settings = ["pos_emb=learned", "max_position_embeddings=256", "eval_tokens=8192"]
    return make_checkpoint(folder, corpus, *settings)


def probe(folder, *words):
    return call("tools/probe.py", "--checkpoint", folder, *words)


def test_every_probe_has_its_rows_and_a_length_without_an_answer_says_why(folder):
    done = probe(folder, *WORDS, "--probes", *PROBES)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "evaluation").glob("*-probes.jsonl")
    rows = read_probes([path])
    places = {"variable_tracking": 5, "common_words": 4, "frequent_words": 3}
    places |= {"receptive_field": 1, "attention": 1}
    count = Counter((row["probe"], row["length"]) for row in rows)
    assert count == {(name, length): places.get(name, 2) for name in PROBES for length in LENGTHS}
    for row in rows:
        assert (row["pos_emb"], row["step"]) == ("learned", 5)
        assert (row["protocol"], row["corpus"], row["part"]) == ("probes", "tiny", "valid")
        if row["length"] == 320:
            assert "learned positions end at 256" in row["reason"]
            assert row.get("accuracy") is row.get("guess") is row.get("low") is None
        elif row["probe"] == "receptive_field":
            assert row["cumulative"][-1] == pytest.approx(1)
        elif row["probe"] == "attention":
            assert sum(row["mass"][0]) == pytest.approx(1, abs=1e-5)
        else:
            assert row["reason"] is None
            assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
            assert (row["trials"], row["probe_seed"]) == (2, 0)
            assert axis_of(row["probe"]) in row
            if row["probe"] in RULER:
                assert 0 < row["guess"] < 0.35
                assert row["form"]["answers"] in (1, 3, 4)
    numbers = r"\d\.\d{3} \d\.\d{3}"
    assert re.search(rf"multikey at 256: {numbers} \(guess rates 0\.250 0\.250\)", done.stdout)
    assert "frequent_words at 320: pos_emb: learned positions end at 256" in done.stdout


def test_probes_of_other_lengths_and_kinds_stay_when_some_are_asked_again(folder, tmp_path):
    output = tmp_path / "a.jsonl"
    words = ("-o", output, "--trials", 1, "--depths", 1)
    assert probe(folder, *words, "--lengths", 48, 64, "--probes", "copy", "ruler").returncode == 0
    first = read_probes([output])
    assert [*dict.fromkeys(row["probe"] for row in first)] == ["copy", *RULER]
    again = probe(folder, *words, "--lengths", 64, "--probes", "copy", "--probe_seed", 1)
    assert again.stdout.count(" at ") == 1
    *earlier, renewed = read_probes([output])
    assert (renewed["probe"], renewed["length"], renewed["probe_seed"]) == ("copy", 64, 1)
    assert earlier == [row for row in first if (row["probe"], row["length"]) != ("copy", 64)]


def test_weights_that_overflow_are_one_message(corpus, tmp_path):
    step = make_checkpoint(tmp_path, corpus) / "global_step5"
    config, meta = read_meta(step)
    weights = load_model(step, config, meta).state_dict()
    large = {name: 1e38 * weight for name, weight in weights.items()}
    write_checkpoint(tmp_path, 6, large, config, {"vocab": meta["vocab"]})
    for name in ("copy", "receptive_field", "attention"):
        done = probe(tmp_path, "--lengths", 64, "--trials", 1, "--probes", name)
        assert done.returncode == 1
        assert re.fullmatch(r".*: a number of the model is not finite .*\n", done.stderr)
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_methods_are_asked_with_the_same_weights(corpus, tmp_path):
    folder = make_checkpoint(tmp_path, corpus, "pos_emb=rotary")
    near = "self_extend,window=64,group=2"  # changes nothing within 64 tokens
    words = ("--method", "none", near, "yarn,factor=4", "--lengths", 64, "--depths", 2)
    done = probe(folder, *words, "--trials", 1, "--probes", "copy", "attention")
    assert done.returncode == 0, done.stderr
    rows_of = {}
    for path in (folder / "evaluation").iterdir():
        for row in read_probes([path]):
            rows_of.setdefault(row.get("method", "none").partition(",")[0], []).append(row)
    plain, extended, scaled = (rows_of[name] for name in ("none", "self_extend", "yarn"))
    for row, same, other in zip(plain[:2], extended[:2], scaled[:2], strict=True):
        assert row["log_probability"] == pytest.approx(same["log_probability"], abs=1e-6)
        assert row["log_probability"] != other["log_probability"]
    assert "method that moves keys" in extended[2]["reason"]
    assert plain[2]["mass"] != scaled[2]["mass"]
    assert f"copy at 64, method {near}: " in done.stdout

    output = tmp_path / "all.jsonl"
    more = ("-o", output, "--dtype", "bf16", "--probes", "copy", "--trials", 1)
    assert probe(folder, *words, *more).returncode == 0
    rows = read_probes([output])
    assert [row["dtype"] for row in rows] == ["bfloat16"] * 6
    for row, exact in zip(rows, [*plain[:2], *extended[:2], *scaled[:2]], strict=True):
        assert row["log_probability"] == pytest.approx(exact["log_probability"], rel=0.02)


def test_every_probe_is_asked_in_bf16_and_with_a_window_and_sinks(corpus, tmp_path):
    folder = make_checkpoint(tmp_path, corpus, "pos_emb=rotary")
    words = ("--dtype", "bf16", "--window", 32, "--sinks", 2, "--logn-scale", "on")
    done = probe(folder, *WORDS[:2], *WORDS[3:], *words, "--probes", *PROBES)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "evaluation").glob("*-probes-bf16-*.jsonl")
    for row in read_probes([path]):
        assert (row["window"], row["sinks"], row["logn_scale"]) == (32, 2, True)
        assert bool(row.get("reason")) == (row["probe"] == "attention")
    assert "passkey at 256, window 32, logn_scale on, sinks 2: " in done.stdout
    refused = probe(folder, "--lengths", 64, "--sinks", 2)
    assert refused.returncode == 1
    assert "--sinks 2: without a window all keys are visible; give --window too" in refused.stderr
