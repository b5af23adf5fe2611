"""The atlas: scores from the committed rows, and those of an encoding on another text."""

import json
import math
import statistics

import pytest
from scipy.stats import ttest_1samp

from megatron.results.atlas import PARTS, TASKS, atlas_rows, decided, standings
from megatron.results.papers import published
from tests.results.rows import rows as made
from tests.support import ROOT

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def committed():
    return atlas_rows()


@pytest.fixture(scope="module")
def atlas(committed):
    return standings(committed)


def lines(*names):
    return [json.loads(line) for name in names for line in (RESULTS / name).open()]


@pytest.mark.parametrize("name", ["mep_free", "fox", "rotary", "sinusoidal"])
def test_a_score_is_the_mean_of_the_parts_of_the_committed_rows(atlas, name):
    far = {
        (row["cell"]["encoding"], row["seed"]): row["perplexity"]
        for row in lines("context/1235.jsonl", "context/1236.jsonl", "context/1237.jsonl")
        if row["protocol"] == "tail" and row["length"] == 4096 and not row.get("window")
    }
    scores = []
    for seed in (1235, 1236, 1237):
        parts = [100 * far["alibi", seed] / far[name, seed]]
        for task in TASKS:
            shares = {
                row["length"]: 100 * row["token_accuracy"]
                for row in lines(f"tasks/{task}.jsonl")
                if (row["cell"]["encoding"], row["seed"]) == (name, seed)
            }
            assert sorted(shares) == [32, 64, 128, 256, 512, 1024]
            parts.append(sum(shares[length] for length in (64, 128, 256, 512, 1024)) / 5)
        assert atlas.values.loc[(name, seed), PARTS].tolist() == pytest.approx(parts)
        scores.append(sum(parts) / 5)
    mean, deviation = statistics.mean(scores), statistics.stdev(scores)
    assert atlas.cells.loc[name, "score"] == f"{mean:.0f} ± {deviation:.0f}"


def test_the_best_score_comes_first_and_without_a_part_there_is_none(atlas):
    scores = [atlas.values.loc[name, "score"].mean() for name in atlas.cells.index]
    complete = [score for score in scores if score == score]
    assert complete == sorted(complete, reverse=True)
    assert scores[: len(complete)] == complete
    assert atlas.cells.loc["learned", "induction"] == "0¹"  # it can't read a longer text
    assert atlas.cells.loc["stick_breaking", "score"] == ""  # too slow for text


def test_the_order_of_text_is_that_of_kerples_table_3(atlas):
    """As the page says: but for KERPLE's two kernels, which differ by 1 % or less."""
    names = ["kerple_log", "alibi", "t5", "rotary", "sinusoidal"]
    ours = [atlas.values.loc[name, "text"].mean() for name in names]
    assert ours == sorted(ours, reverse=True)
    for encodings in published("kerple_table3").cells.values():
        theirs = [float(encodings[name][16384][0]) for name in names]
        assert theirs == sorted(theirs)
        log, power = (float(encodings[f"kerple_{kind}"][16384][0]) for kind in ("log", "power"))
        assert log <= power <= 1.01 * log


def on_text(name, split, perplexities, **facts):
    """Rows of a text at 32 L: {seed: perplexity}."""
    measured = []
    for seed, perplexity in perplexities.items():
        facts |= {"cell": {"encoding": name}, "seed": seed, "split": split, "text": split}
        facts |= {"protocol": "tail", "train_length": 128, "token_accuracy": None}
        measured += made(name, {4096: perplexity}, **facts)
    return measured


def test_an_encoding_on_a_newer_text_is_compared_with_the_reference_on_the_same():
    """The version of the text with more seeds counts, and the other where it is the only one."""
    older = on_text("alibi", "A", dict.fromkeys((1, 2, 3), 10.0))
    older += on_text("fox", "A", {1: 8.0, 2: 10.0, 3: 12.5})
    newer = on_text("alibi", "B", {1: 20.0}) + on_text("fox", "B", {1: 80.0})
    newer += on_text("mine", "B", {1: 16.0}) + on_text(
        "alibi", "B", {1: 30.0}, window="train_length"
    )
    for rows in (older + newer, newer + older):
        text = standings(rows).cells["text"]
        assert text["mine"] == "125¹"
        assert text["alibi"] == "100 ± 0"
        assert text["fox"] == f"102 ± {statistics.stdev((125, 100, 80)):.0f}"


def test_an_encoding_that_the_reference_does_not_share_a_text_with_has_no_line():
    rows = on_text("alibi", "A", {1: 10.0}) + on_text("mine", "B", {1: 8.0, 2: 8.1, 3: 8.2})
    rows += on_text("mine", "B", {1: 9.0, 2: 9.1, 3: 9.2}, window="train_length")
    assert standings(rows).cells.index.tolist() == ["alibi"]
    assert "mine" not in standings(rows).table().text()


def test_rows_of_an_entry_that_ran_again_replace_its_rows(atlas, tmp_path):
    rows = lines("atlas/entries/dynamic_position_bias.jsonl")
    again = [
        {key: value for key, value in row.items() if key != "checksum"}
        | {"config_hash": "0123456789ab", "token_accuracy": 0.25, "loss": 1.0}
        for row in rows
        if row["corpus"] == "task:recall"
    ]
    file = tmp_path / "again.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in again))
    replaced = atlas_rows([file])
    *_, recall, _ = decided("dynamic_position_bias", ["alibi"], replaced).body
    assert recall[0].startswith("recall")
    assert recall[1] != "no rows"
    before = atlas.cells.loc["dynamic_position_bias"]
    after = standings(replaced).cells.loc["dynamic_position_bias"]
    assert after["recall"] == "25 ± 0" != before["recall"]
    assert (after[PARTS[:3]] == before[PARTS[:3]]).all()


def test_an_entry_must_win_by_p_below_a_hundredth(committed):
    """FoX beats kerple_log on flip-flop by 0.01 < p < 0.05: that's undecided here."""
    shares = {
        (row["cell"]["encoding"], row["seed"]): row["token_accuracy"]
        for row in lines("tasks/flip_flop.jsonl")
        if row["length"] == 1024
    }
    differences = [shares["fox", seed] - shares["kerple_log", seed] for seed in (1235, 1236, 1237)]
    p = ttest_1samp(differences, 0).pvalue
    assert 0.01 < p < 0.05
    verdicts = {line[0]: line[1:] for line in decided("fox", ["kerple_log"], committed).body}
    assert len(verdicts) == len(PARTS)
    word, _, shown, needed = verdicts["flip_flop: fox, kerple_log"]
    assert (word, shown, needed) == ("undecided", f"{p:.3f}", "4 seeds")
    assert verdicts["induction: fox, kerple_log"][0] == "fails"


@pytest.mark.parametrize(
    ("better", "worse", "task", "says"),
    [
        ("fox", "alibi", "needle", "FoX beats ALiBi (p 0.009)"),
        ("scale_invariant", "fox", "recall", "each beats FoX (p < 0.001)"),
        ("bam", "fox", "recall", "each beats FoX (p < 0.001)"),
        ("cable", "fox", "recall", "each beats FoX (p < 0.001)"),
        ("t5", "fox", "recall", "each beats FoX (p < 0.001)"),
    ],
)
def test_the_guide_says_what_is_decided(committed, better, worse, task, says):
    files = [*RESULTS.glob(f"*/{task}.jsonl")]
    shares = {
        (row["pos_emb"], row["seed"]): row["token_accuracy"]
        for row in lines(*files)
        if row["length"] == 1024 and row["step"] == 1000 and row["sweep"] in ("tasks", "atlas")
    }
    differences = [shares[better, seed] - shares[worse, seed] for seed in (1235, 1236, 1237)]
    p = ttest_1samp(differences, 0).pvalue
    assert statistics.mean(differences) > 0
    assert f"p {'< 0.001' if p < 0.001 else f'{p:.3f}'})" in says
    verdicts = {line[0]: line[1] for line in decided(better, [worse], committed).body}
    assert verdicts[f"{task}: {better}, {worse}"] == "holds"
    assert says in (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "shown"), [("dynamic_position_bias", "0.003"), ("grape_a", "0.009"), ("bam", "")]
)
def test_the_page_says_which_beat_alibi_on_text(committed, name, shown):
    text, *_ = decided(name, ["alibi"], committed).body
    files = [RESULTS / "atlas/text.jsonl", *RESULTS.glob(f"atlas/entries/{name}.jsonl")]
    far = {
        (row["pos_emb"], row["seed"]): row["loss"]
        for row in lines(*files)
        if row["protocol"] == "tail" and row["length"] == 4096 and not row.get("window")
    }
    losses = [far[name, seed] - far["alibi", seed] for seed in (1235, 1236, 1237)]
    percent = 100 * (math.exp(statistics.mean(losses)) - 1)
    p = ttest_1samp(losses, 0).pvalue
    assert text[2].startswith(f"{percent:.1f} % [")
    assert text[1] == ("holds" if p < 0.01 else "undecided") == ("holds" if shown else "undecided")
    assert not shown or text[3] == f"{p:.3f}" == shown
    page = (ROOT / "docs" / "atlas.md").read_text(encoding="utf-8")
    assert "the entry and grape_a beat ALiBi (p 0.003, 0.009); bam undecided" in page
    if name == "dynamic_position_bias":
        assert f"is {-percent:.1f} % below ALiBi's at 32 L (p 0.003, three seeds)" in page


def test_a_model_with_windows_of_its_own_has_no_effective_length(atlas):
    assert atlas.cells.loc["rnope_swa", "effective length"] == ""
    assert atlas.cells.loc["rotary", "effective length"] == "none shown above 128"
    assert atlas.cells.loc["none", "effective length"] == "none shown above 128¹"
