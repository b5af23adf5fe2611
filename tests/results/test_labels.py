"""Labels name what differs between rows in fact, what was measured first."""

import pytest

from megatron.errors import UserError
from megatron.results.labels import axes_of, kinds, labels_of, matching, runs, select
from megatron.results.row import LABELS, identity
from tests.results.rows import rows


def one(pos_emb="rotary", **facts):
    (found,) = rows(pos_emb, {512: 9.0}, **facts)
    return found


def test_runs_of_one_encoding_differ_in_the_first_thing_that_differs():
    kernels = [{"kernels": ["exp"]}, {"kernels": ["exp", {"exp": 0.5}]}]
    sizes = [{"cell": {"data": "github", "size": size}} for size in ("small", "wide")]
    cases = [
        ([{}, {"window": 512}], ["window none", "window 512"]),
        ([{"logn_scale": True}, {}], ["logn_scale on", "logn_scale off"]),
        ([{"seed": 1235}, {"seed": 1236}], ["seed 1235", "seed 1236"]),
        (
            [{"pos_emb_args": args} for args in kernels],
            ["pos_emb_args kernels [exp]", "pos_emb_args kernels [exp, {exp: 0.5}]"],
        ),
        # What was measured beats an axis of a sweep, an axis beats a hash.
        ([{"window": "train_length"}, sizes[1]], ["window 512", "window none"]),
        (sizes, ["size small", "size wide"]),
    ]
    for (first, other), labels in cases:
        both = [one(**first, config_hash="a"), one(**other, config_hash="b")]
        found = runs([*both, one("alibi")])
        assert list(found) == [*(f"rotary, {words}" for words in labels), "alibi"]


def test_what_is_unknown_adds_no_word_and_loses_no_row():
    known, unknown = one(seed=7), one(seed=None)
    assert runs([known, unknown]) == {"rotary, seed 7": [known], "rotary": [unknown]}


def test_labels_of_different_runs_are_different():
    changes = [{key: value} for key in LABELS for value in (None, "a", "b")]
    found = [one(**change) for change in changes]
    distinct = {identity(row, LABELS) for row in found}
    assert len(set(labels_of(found, LABELS))) == len(distinct) > 2 * len(LABELS)


def test_a_kind_never_holds_two_configurations_of_one_seed():
    twins = [one(config_hash="a"), one(config_hash="b")]
    assert list(kinds(twins)) == ["rotary, config_hash a", "rotary, config_hash b"]
    seeds = [one(seed=seed, config_hash=str(seed), checkpoint=str(seed)) for seed in (1, 2)]
    assert len(kinds(seeds)) == 1


# --- Sweeps ---


def test_axes_count_where_they_say_more_than_the_keys():
    cell = {"pos_emb": "rotary", "seed": 1234}
    of_sweep = one(corpus="github", cell=cell | {"data": "github"}, weights="w1", sweep="cpu")
    arxiv = one(corpus="arxiv", cell=cell | {"data": "arxiv"}, sweep="cpu")
    assert list(kinds([of_sweep, arxiv])) == ["rotary"], "one encoding, measured on two corpora"
    places = (("a", "a_text"), ("b", "b_text"))
    renamed = [one(corpus=corpus, cell={"data": data}) for data, corpus in places]
    assert list(kinds(renamed)) == ["rotary"], "the corpus has a longer name"
    transferred = [*renamed, one(corpus="b_text", cell={"data": "a"}, config_hash="c")]
    assert list(kinds(transferred)) == ["rotary, data a", "rotary, data b"]
    lengths = [one(train_length=n, cell={"seq_length": n}, config_hash=str(n)) for n in (512, 2048)]
    assert list(kinds(lengths)) == ["rotary, train_length 512", "rotary, train_length 2048"]
    sizes = [one(seed=n, cell={"size": n, "seed": n}) for n in (1, 2)]
    assert axes_of(sizes) == ("size",), "that a size equals the seed is chance"


# --- The reference of a comparison ---

WINDOWS = {
    "mep_free, window none": [one("mep_free", seed=1235), one("mep_free", seed=1236)],
    "mep_free, window 512": [one("mep_free", window="train_length", seed=1235)],
    "alibi": [one("alibi", cell={"size": "wide"})],
}


def test_against_is_a_label_or_an_encoding_with_any_of_its_facts():
    for against, label in {
        "mep_free, window none": "mep_free, window none",
        "mep_free, window train_length": "mep_free, window 512",
        "mep_free, seed 1236": "mep_free, window none",
        "mep_free, seed 1235, window 512": "mep_free, window 512",
        "alibi": "alibi",
        "alibi, size wide, corpus stdlib": "alibi",
    }.items():
        assert select(against, WINDOWS) == label


def test_against_none_or_several_names_the_choices():
    choices = "'mep_free, window none', 'mep_free, window 512'"
    for against in ("mep", "alibi, window 51", "alibi window"):
        assert matching(against, WINDOWS) == []
        message = f"--against: '{against}' is no encoding of these results - choose one of"
        with pytest.raises(UserError, match=f"{message} {choices}, 'alibi'"):
            select(against, WINDOWS)
    with pytest.raises(UserError, match=f"'mep_free' means several .* - choose one of {choices}"):
        select("mep_free", WINDOWS)
