"""What makes two rows the same, and which stand in one table."""

import itertools

from megatron.results.files import read_results
from megatron.results.probes import is_of_probes, read_probes
from megatron.results.row import (
    Row,
    agrees,
    by_text,
    measurement_of,
    place_of,
    run_of,
    value_of,
)
from tests.results.rows import rows
from tests.support import ROOT


def one(**facts):
    (found,) = rows("rotary", {512: 9.0}, **facts)
    return found


def test_the_files_at_hand_are_rows():
    for path in (ROOT / "docs").rglob("*.jsonl"):
        if is_of_probes(path):
            assert read_probes([path])
        else:
            assert {key for row in read_results([path]) for key in row} <= {*Row.__annotations__}


def test_a_key_changes_what_it_identifies():
    identities = (run_of, measurement_of, place_of)
    run = {run_of, measurement_of}
    cases = [
        ({"window": 256}, run),
        ({"start": 16000}, {*run, place_of}),
        ({"length": 1024}, {measurement_of, place_of}),
        ({"stride": 64}, {measurement_of, place_of}),
        ({"text": "cd34"}, {measurement_of}),
        ({"commit": "b", "device": "b", "code": "b", "seconds": 1.0}, set()),
        # A switch that is off or not mentioned is the same.
        ({"window": None, "logn_scale": False, "sinks": None, "method": None}, set()),
    ]
    for change, differing in cases:
        first, other = one(checkpoint="runs/a"), one(checkpoint="runs/a") | change
        assert {of for of in identities if of(first) != of(other)} == differing, change


def test_a_window_of_the_training_length_is_that_many_tokens():
    by_name, by_number = one(window="train_length"), one(window=512)
    assert value_of(by_name, "window") == 512
    assert run_of(by_name) == run_of(by_number)
    assert agrees(by_number, by_name), "it answers the same question"


def test_an_answer_has_every_fact_of_the_question():
    assert agrees(one(), {"pos_emb": "rotary", "seed": 1234})
    assert not agrees(one(), {"seed": 1235})
    assert not agrees(one(), {"code": "ab"}), "it is not known which code measured it"


def test_only_rows_of_one_text_stand_together():
    def together(*found):
        return len(by_text(found)) == 1

    first = one(text="a")
    assert together(first, one(text="a", seed=7))
    assert together(one(), one(length=1024))
    assert not together(first, one(text="b")), "another copy of the corpus"
    assert not together(one(), one(tokens=4096)), "a row of old files has no text"
    assert not together(first, one(text="b", length=1024, tokens=16384)), "more tokens"
    assert together(first, one(text="b", length=768, tokens=7680)), "the end is left out"
    other = one(text="b", length=4096, tokens=118784)
    assert not together(other, one(text="c", length=16384, tokens=131072)), "three windows more"
    assert not together(first, one(text="a", corpus="arxiv"))
    tail = {"protocol": "tail", "text": "a"}
    assert not together(one(**tail, tail=128), one(**tail, tail=256))
    sliding = {"protocol": "sliding", "text": "a"}
    assert not together(one(**sliding, stride=128), one(**sliding, stride=256))
    assert together(one(**sliding, stride=256), one(**sliding, stride=512, length=1024))
    paper = {"protocol": "paper", "windows": 320}
    seeds = [one(**paper, text=str(seed), seed=seed) for seed in (1, 2)]
    assert together(*seeds, one(**paper, text="3", seed=1, length=1024, tokens=327680))
    assert not together(seeds[0], one(**paper, text="4", seed=1))
    assert not together(seeds[0], one(protocol="paper", windows=8, text="5", seed=3))
    task = {"protocol": "task", "windows": 256, "tokens": 1024}
    problems = one(**task, text="a", seed=1)
    assert together(problems, one(**task, text="a", seed=2), one(**task, text="b", length=1024))
    assert not together(problems, one(**task, text="b", seed=2)), "other problems of one length"
    assert not together(problems, one(**task | {"windows": 8}, text="b", length=1024))
    position = {"protocol": "position"}
    assert not together(one(**position, text="a"), one(**position, text="b", length=1024))
    longppl = {"protocol": "longppl", "text": "a", "all_tokens": 8192}
    keys = one(**longppl, key_text="k", tokens=900)
    assert together(keys, one(**longppl, key_text="k", tokens=900, length=1024))
    assert not together(keys, one(**longppl, key_text="other", tokens=900)), "of another judge"
    assert not together(keys, one(**longppl, key_text="more", tokens=1000, length=1024))


def test_texts_do_not_depend_on_the_order_of_rows_and_what_may_be_of_two_is_of_neither():
    first = [one(text="a", length=length) for length in (512, 1024)]
    other = [one(text="b"), one(text="b", seed=7)]
    of_either = [one(text="c", length=768, tokens=7680)]
    found = [*first, *other, *of_either]
    for rows_in_order in itertools.permutations(found):
        texts = [sorted(map(found.index, text)) for text in by_text(rows_in_order)]
        assert sorted(texts) == [[0, 1], [2, 3], [4]]
