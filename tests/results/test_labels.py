"""Labels name what differs between rows in fact, what was measured first."""

import pytest

from megatron.errors import UserError
from megatron.results.labels import arranged, axes_of, kinds, runs, select
from megatron.results.row import trained_length
from megatron.results.table import setting
from tests.results.rows import row_at_512


def test_runs_of_one_encoding_differ_in_the_first_thing_that_differs():
    kernels = [{"kernels": ["exp"]}, {"kernels": ["exp", {"exp": 0.5}]}]
    sizes = [{"cell": {"data": "github", "size": size}} for size in ("small", "wide")]
    cases = [
        ([{}, {"window": 512}], ["", ", window 512"]),
        ([{"logn_scale": True}, {}], [", log n scale", ""]),
        (
            [{"method": "yarn,factor=2"}, {"method": "dynamic_ntk,factor=1,step=8"}],
            [", YaRN ×2", ", dynamic NTK"],
        ),
        (
            [{"method": f"rerope,window={n}"} for n in (2, 3)],
            [f", ReRoPE (window={n})" for n in (2, 3)],
        ),
        ([{"pos_emb_args": {"base": 500}}, {"pos_emb_args": {}}], [", base 500", ""]),
        ([{"seed": 1235}, {"seed": 1236}], [", seed 1235", ", seed 1236"]),
        (
            [{"pos_emb_args": args} for args in kernels],
            [", kernels [exp]", ", kernels [exp, {exp: 0.5}]"],
        ),
        # What was measured beats an axis of a sweep, an axis beats a hash.
        ([{"window": "train_length"}, sizes[1]], [", window 512", ""]),
        (sizes, [", size small", ", size wide"]),
    ]
    for (first, other), labels in cases:
        both = [row_at_512(**first, config_hash="a"), row_at_512(**other, config_hash="b")]
        groups = runs([*both, row_at_512("alibi")])
        assert list(groups) == [*(f"rotary{words}" for words in labels), "alibi"]


def test_the_first_of_several_steps_is_the_reference_and_stays_in_front():
    steps = [row_at_512(step=step, checkpoint=f"run/global_step{step}") for step in (1200, 400)]
    labels = ["rotary, step 1200", "rotary, step 400"]
    assert list(runs(steps)) == list(kinds(steps)) == labels
    assert [row["step"] for row in arranged(steps, labels, [])] == [1200, 400]


def test_unusual_layers_gates_and_optimizers_are_named():
    hybrid = row_at_512("none", layer_kinds="3 gated_delta + 1 attention", optimizer_type="Muon")
    gated = {"attention_gate": "head", "softmax_type": "learnable"}
    gated = row_at_512(**gated, cell={"encoding": "rotary", "gate": "gated"})
    assert list(kinds([hybrid, row_at_512("none"), gated])) == [
        "none, 3 gated_delta + 1 attention, Muon",
        "none",
        "rotary, gate by head, learnable softmax",
    ]
    assert setting([hybrid]).endswith("3 gated_delta + 1 attention, Muon")


def test_a_sweep_gives_its_encodings_their_names():
    half = row_at_512(pos_emb_args={"fraction": 0.5}, cell={"encoding": "p_rope"})
    layers = row_at_512("rotary, none", window="8,none", cell={"encoding": "rnope_swa"})
    usual = row_at_512(cell={"encoding": "rotary"})
    groups = kinds([half, layers, usual])
    assert list(groups) == ["p_rope", "rnope_swa, window 8,none", "rotary"]
    assert select("p_rope", groups) == "p_rope"
    assert select("rotary, fraction 0.5", groups) == "p_rope"


def test_what_is_unknown_adds_no_word_and_loses_no_row():
    seven, unknown = row_at_512(seed=7), row_at_512(seed=None)
    assert runs([seven, unknown]) == {"rotary, seed 7": [seven], "rotary": [unknown]}


def test_a_kind_never_holds_two_configurations_of_one_seed():
    twins = [row_at_512(config_hash="a"), row_at_512(config_hash="b")]
    assert list(kinds(twins)) == ["rotary, config a", "rotary, config b"]
    places = [row_at_512(checkpoint="runs/a"), row_at_512(checkpoint="runs/b")]
    assert list(kinds(places)) == ["rotary, checkpoint runs/a", "rotary, checkpoint runs/b"]
    seeds = [row_at_512(seed=seed, config_hash=str(seed), checkpoint=str(seed)) for seed in (1, 2)]
    assert len(kinds(seeds)) == 1


# --- Sweeps ---


def test_axes_count_where_they_say_more_than_the_keys():
    cell = {"pos_emb": "rotary", "seed": 1234}
    in_sweep = row_at_512(
        corpus="github", cell=cell | {"data": "github"}, weights="w1", sweep="cpu"
    )
    arxiv = row_at_512(corpus="arxiv", cell=cell | {"data": "arxiv"}, sweep="cpu")
    assert list(kinds([in_sweep, arxiv])) == ["rotary"], "one encoding, measured on two corpora"
    places = (("a", "a_text"), ("b", "b_text"))
    renamed = [row_at_512(corpus=corpus, cell={"data": data}) for data, corpus in places]
    assert list(kinds(renamed)) == ["rotary"], "the corpus has a longer name"
    transferred = [*renamed, row_at_512(corpus="b_text", cell={"data": "a"}, config_hash="c")]
    assert list(kinds(transferred)) == ["rotary, data a", "rotary, data b"]
    lengths = [
        row_at_512(train_length=n, cell={"seq_length": n}, config_hash=str(n)) for n in (512, 2048)
    ]
    assert list(kinds(lengths)) == ["rotary, trained at 512", "rotary, trained at 2048"]
    sizes = [row_at_512(seed=n, cell={"size": n, "seed": n}) for n in (1, 2)]
    assert axes_of(sizes) == ("size",), "that a size equals the seed is chance"


# --- What a user chooses ---


def test_rows_are_shown_in_an_order_and_by_names_of_the_user():
    measured = [row_at_512(), row_at_512(window=8), row_at_512("alibi", seed=1)]
    measured.append(row_at_512("t5", config_hash="cd"))
    chosen = arranged(measured, ["t5", "rotary, window 8", "alibi"], ["alibi=A", "t5=T"])
    assert list(kinds(chosen)) == ["T", "rotary, window 8", "A"]
    assert list(runs(chosen)) == list(kinds(chosen))
    assert "window" not in list(kinds(arranged(measured, [], ["rotary, window 8=W"])))[1]
    both = arranged(measured, ["rotary", "t5"], ["rotary=X", "t5=X"])
    assert [len(group) for group in kinds(both).values()] == [1, 1], "no row is lost"
    for only, names in ((["fire"], []), ([], ["fire=a"]), ([], ["t5"])):
        with pytest.raises(UserError, match=r"--only|--names"):
            arranged(measured, only, names)


def test_the_training_length_of_a_row_is_that_of_its_stage():
    row = row_at_512(stage_length=64, stage_ends=[100, 200])
    assert trained_length(row) == 64
    assert trained_length(row_at_512()) == 512


# --- The reference of a comparison ---

WINDOWS = {
    "mep_free": [row_at_512("mep_free", seed=1235), row_at_512("mep_free", seed=1236)],
    "mep_free, window 512": [row_at_512("mep_free", window="train_length", seed=1235)],
    "alibi": [row_at_512("alibi", cell={"size": "wide"})],
}


def test_against_is_a_label_or_an_encoding_with_any_of_its_facts():
    for against, label in {
        "mep_free, window none": "mep_free",
        "mep_free, window train_length": "mep_free, window 512",
        "mep_free, seed 1236": "mep_free",
        "mep_free, seed 1235, window 512": "mep_free, window 512",
        "alibi": "alibi",
        "alibi, size wide, stdlib": "alibi",
    }.items():
        assert select(against, WINDOWS) == label
