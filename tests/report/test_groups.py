"""Rows as groups: what is one line of a table, and its label."""

from megatron.report.evidence import Evidence
from megatron.report.groups import groups, models, text_of
from tests.report.support import row


def test_only_runs_that_differ_in_nothing_but_the_seed_are_one_line():
    same = [row("mep", seed, 512, 10.0 + seed) for seed in (1, 2)]
    assert [group.label for group in groups(same, {})] == ["mep"]
    assert [group.seeds for group in groups(same, {})] == [[1, 2]]
    evidence = {
        one["checkpoint"]: Evidence(settings={"lr": one["seed"], "seed": one["seed"]})
        for one in same
    }
    assert len(groups(same, evidence)) == 2, (
        "their configurations say that the learning rate is another"
    )
    cells = [
        one | {"cell": {"corpus": "a", "size": one["seed"], "seed": one["seed"]}} for one in same
    ]
    assert len(groups(cells, {})) == 2, "their cells say that the size is another"
    half = {
        same[0]["checkpoint"]: Evidence(settings={"lr": 1, "seed": 1}),
        same[1]["checkpoint"]: Evidence(),
    }
    assert len(groups(same, half)) == 1, "one checkpoint was found, the other was not"
    twins = [same[0], same[0] | {"config_hash": "other", "checkpoint": "elsewhere"}]
    assert len(groups(twins, {})) == 2, "one seed, two configurations"


def test_a_model_that_a_sweep_and_a_user_measured_is_one_with_a_short_name():
    cell = {"sweep": "cpu", "cell": {"pos_emb": "mep", "seed": 1}, "weights": "w1"}
    of_sweep = [
        row("mep", 1, 512, 10.0, **cell),
        row("mep", 2, 512, 11.0, **(cell | {"weights": "w2"})),
    ]
    own = row("mep", 1, 512, 9.0, window="train_length", weights="w1", checkpoint="copied/step10")
    evidence = {own["checkpoint"]: Evidence(settings={"lr": 1.0, "seed": 1})}
    assert [group.label for group in models([*of_sweep, own], evidence)] == ["mep"]
    labels = [group.label for group in groups([*of_sweep, own], evidence)]
    assert labels == ["mep, window none", "mep, window 512"]
    other = [own | {"config_hash": "other", "weights": "w3", "window": None}]
    assert [group.label for group in groups([*of_sweep, *other], evidence)] == [
        "mep, sweep cpu", "mep"
    ]  # fmt: skip


def test_settings_that_differ_make_two_groups_of_one_cell_name():
    cells = [
        row("mep", seed, 512, 10.0, cell={"seed": seed}, weights=f"w{seed}") for seed in (1, 2)
    ]
    evidence = {
        one["checkpoint"]: Evidence(settings={"lr": one["seed"], "seed": one["seed"]})
        for one in cells
    }
    assert len(groups(cells, {})) == 1
    assert len(groups(cells, evidence)) == 2, "the sweep's file was edited between its runs"


def test_runs_of_a_sweep_are_told_apart_by_its_axes():
    cells = [("github", "small"), ("arxiv", "small"), ("arxiv", "wide")]
    rows = [
        row(
            "mep",
            1,
            512,
            9.0,
            cell={"data": data, "size": size, "pos_emb": "mep", "seed": 1},
            config_hash=data + size,
        )
        for data, size in cells
    ]
    labels = ["mep, data github", "mep, data arxiv, size small", "mep, data arxiv, size wide"]
    assert [group.label for group in groups(rows, {})] == labels


def test_options_are_a_list_with_commas():
    options = {"base": 10000, "scaling": None, "learned": False, "kernels": ["exp", "bam"]}
    assert text_of(options) == "base 10000, scaling none, learned off, kernels [exp, bam]"
    nested = {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-08}}
    assert text_of(nested) == "type Adam, params (lr 0.1, eps 1e-08)"
    assert (text_of(None), text_of({})) == ("none", "defaults")
