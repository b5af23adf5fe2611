"""Labels name what differs between rows in fact, what was measured first."""

import pytest

from megatron.errors import UserError
from megatron.results.labels import axes_of, kinds, labels_of, matching, runs, select, with_sweeps
from megatron.results.row import LABELS, identity
from tests.results.rows import rows


def one(pos_emb="rotary", **facts):
    (found,) = rows(pos_emb, {512: 9.0}, **facts)
    return found


def test_labels_say_none_off_and_on():
    found = [one(), one(window=512), one(window=512, logn_scale=True)]
    assert list(runs(found)) == [
        "rotary, window none",
        "rotary, window 512, logn_scale off",
        "rotary, window 512, logn_scale on",
    ]


def test_methods_for_longer_texts_are_in_labels():
    sinks = one(window=508, sinks=4)
    found = [one(), one(method="rerope,window=256"), one(window=508), sinks]
    assert list(runs(found)) == [
        "rotary, window none, method none",
        "rotary, window none, method rerope,window=256",
        "rotary, window 508, sinks none",
        "rotary, window 508, sinks 4",
    ]
    assert select("rotary, window 508, sinks 4", kinds(found)) == "rotary, window 508, sinks 4"
    assert matching("rotary, method rerope,window=256", kinds(found)) == [
        "rotary, window none, method rerope,window=256"
    ]


@pytest.mark.parametrize(
    ("first", "other", "labels"),
    [
        ({"seed": 1235}, {"seed": 1236}, ["seed 1235", "seed 1236"]),
        ({"step": 100}, {"step": 200}, ["step 100", "step 200"]),
        ({"corpus": "a"}, {"corpus": "b"}, ["corpus a", "corpus b"]),
        ({"protocol": "tail"}, {"protocol": "paper"}, ["protocol tail", "protocol paper"]),
        (
            {"checkpoint": "runs/a"},
            {"checkpoint": "runs/b"},
            ["checkpoint runs/a", "checkpoint runs/b"],
        ),
        (
            {"train_length": 512, "config_hash": "a"},
            {"train_length": 1024, "config_hash": "b"},
            ["train_length 512", "train_length 1024"],
        ),
        # What was measured beats an axis of a sweep, an axis beats a hash.
        (
            {"window": "train_length", "config_hash": "a"},
            {"cell": {"data": "github", "size": "wide"}, "config_hash": "b"},
            ["window 512", "window none"],
        ),
        (
            {"cell": {"size": "small"}, "config_hash": "a"},
            {"cell": {"size": "wide"}, "config_hash": "b"},
            ["size small", "size wide"],
        ),
        # The name of a sweep says more than a hash.
        (
            {"sweep": "cpu", "config_hash": "a"},
            {"sweep": "gpu", "config_hash": "b"},
            ["sweep cpu", "sweep gpu"],
        ),
    ],
    ids=lambda value: "",
)
def test_runs_of_one_encoding_differ_in_the_first_thing_that_differs(first, other, labels):
    found = [one(**first), one(**other), one("alibi")]
    expected = [f"rotary, {words}" for words in labels]
    assert list(runs(found)) == [*expected, "alibi"]


def test_two_mixtures_differ_in_their_kernels():
    first = one("mep", pos_emb_args={"kernels": ["exp", "gaussian"]}, config_hash="a")
    second = one("mep", pos_emb_args={"kernels": ["exp", {"exp": 0.5}]}, config_hash="b")
    assert list(runs([first, second])) == [
        "mep, pos_emb_args kernels [exp, gaussian]",
        "mep, pos_emb_args kernels [exp, {exp: 0.5}]",
    ]


def test_what_is_unknown_adds_no_word_and_loses_no_row():
    known, unknown = one(seed=7), one(seed=None)
    found = runs([known, unknown])
    assert found == {"rotary, seed 7": [known], "rotary": [unknown]}
    half = [one(cell={"size": "wide"}, sweep="cpu"), one(seed=9)]
    assert list(kinds(half)) == ["rotary, size wide", "rotary"]


def test_labels_of_different_runs_are_different():
    changes = [{key: value} for key in LABELS for value in (None, "a", "b")]
    found = [one(**change) for change in changes]
    distinct = {identity(row, LABELS) for row in found}
    assert len(set(labels_of(found, LABELS))) == len(distinct) > 2 * len(LABELS)


# --- Sweeps ---


def test_an_axis_that_names_the_corpus_is_in_no_label():
    cell = {"pos_emb": "rotary", "seed": 1234}
    of_sweep = one(corpus="github", cell=cell | {"data": "github"}, weights="w1", sweep="cpu")
    windowed = one(corpus="github", window="train_length", weights="w2")
    assert list(kinds([windowed, of_sweep])) == ["rotary, window 512", "rotary, window none"]
    arxiv = one(corpus="arxiv", cell=cell | {"data": "arxiv"}, sweep="cpu")
    assert list(kinds([of_sweep, arxiv])) == ["rotary"], "one encoding, measured on two corpora"
    renamed = [
        one(corpus=f"{name}_text_document", cell=cell | {"data": name}) for name in ("a", "b")
    ]
    assert list(kinds(renamed)) == ["rotary"], "the corpus has a longer name"


def test_a_model_that_was_trained_on_another_corpus_says_so():
    trained = [
        one(corpus="github", cell={"data": name}, config_hash=name) for name in ("github", "arxiv")
    ]
    assert list(kinds(trained)) == ["rotary", "rotary, data arxiv"]


def test_axes_count_for_all_rows_even_if_the_first_of_each_kind_would_not_need_them():
    places = (("a", "a_text"), ("b", "b_text"), ("a", "b_text"))
    found = [one(corpus=corpus, cell={"data": data}) for data, corpus in places]
    assert list(kinds(found)) == ["rotary, data a", "rotary, data b"]


def test_an_axis_that_is_a_key_under_another_name_is_left_to_the_key():
    lengths = [one(train_length=n, cell={"seq_length": n}, config_hash=str(n)) for n in (512, 2048)]
    assert axes_of(lengths) == ()
    assert list(kinds(lengths)) == ["rotary, train_length 512", "rotary, train_length 2048"]
    sizes = [one(seed=n, cell={"size": n, "seed": n}) for n in (1, 2)]
    assert axes_of(sizes) == ("size",), "that a size equals the seed is chance"


def test_what_a_user_measured_of_a_sweeps_model_belongs_to_the_sweep():
    cell = {"size": "wide", "seed": 1234}
    of_sweep = one(sweep="cpu", cell=cell, weights="w1", checkpoint="runs/a")
    by_user = one(weights="w1", checkpoint="copied/a", protocol="tail")
    old = one(checkpoint="runs/a", protocol="paper")
    retrained = one(weights="w9", checkpoint="runs/a", protocol="position")
    _, second, third, fourth = with_sweeps([of_sweep, by_user, old, retrained])
    assert second == by_user | {"sweep": "cpu", "cell": cell}
    assert third == old | {"sweep": "cpu", "cell": cell}
    assert fourth == retrained, "other weights in the same folder"
    assert list(kinds([of_sweep, by_user, old])) == ["rotary"]
    assert with_sweeps([one()]) == [one()]


# --- The reference of a comparison ---

WINDOWS = {
    "mep_free, window none": [one("mep_free", seed=1235), one("mep_free", seed=1236)],
    "mep_free, window 512": [one("mep_free", window="train_length", seed=1235)],
    "alibi": [one("alibi", cell={"size": "wide"})],
}


@pytest.mark.parametrize(
    ("against", "label"),
    [
        ("mep_free, window none", "mep_free, window none"),
        ("mep_free, window 512", "mep_free, window 512"),
        ("mep_free, window train_length", "mep_free, window 512"),
        ("mep_free, seed 1236", "mep_free, window none"),
        ("mep_free, seed 1235, window 512", "mep_free, window 512"),
        ("alibi", "alibi"),
        ("alibi, window none", "alibi"),
        ("alibi, size wide, corpus stdlib", "alibi"),
        ("alibi, config_hash ab12cd34ef56", "alibi"),
    ],
)
def test_against_is_a_label_or_an_encoding_with_any_of_its_facts(against, label):
    assert select(against, WINDOWS) == label


@pytest.mark.parametrize("against", ["mep", "alibi, window 51", "alibi, seed 12", "alibi window"])
def test_against_an_unknown_encoding_names_the_choices(against):
    assert matching(against, WINDOWS) == []
    with pytest.raises(UserError) as fault:
        select(against, WINDOWS)
    assert str(fault.value) == (
        f"--against: '{against}' is no encoding of these results - choose one of"
        " 'mep_free, window none', 'mep_free, window 512', 'alibi'"
    )


def test_against_an_encoding_with_several_labels_names_these():
    message = (
        "--against: 'mep_free' means several encodings - choose one of"
        " 'mep_free, window none', 'mep_free, window 512'"
    )
    with pytest.raises(UserError, match=message):
        select("mep_free", WINDOWS)
    with pytest.raises(UserError, match="'mep_free, seed 1235' means several encodings"):
        select("mep_free, seed 1235", WINDOWS)


def test_an_exact_label_is_meant_even_if_others_have_its_facts():
    plain, transferred = [one()], [one(cell={"data": "arxiv"})]
    assert select("rotary", {"rotary": plain, "rotary, data arxiv": transferred}) == "rotary"
