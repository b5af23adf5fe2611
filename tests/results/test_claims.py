"""Claims: fields, the rows that answer them, and verdicts in simulations of known truth."""

import json
import math
import re

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.claims import FIELDS, Claim, has_length, judged, read_claims, table_of
from megatron.results.statistics import Estimate, mean_of_blocks, t_quantile, values_needed
from tests.results.rows import row, row_of_blocks, rows
from tests.support import ROOT, call

# Seeds for a power of 0.8 of a paired t, two-sided 0.05, by Cohen's d: G*Power
GPOWER = {0.2: 199, 0.5: 34, 0.8: 15}


def seeds(name, losses, **facts):
    """A row for each seed and length: {length: the loss of each seed}, all on one text."""
    measured = []
    for length, values in losses.items():
        for seed, loss in enumerate(values, start=1):
            (measurement,) = rows(
                name, {length: math.exp(loss)}, seed=seed, config_hash=f"{name}{seed}"
            )
            measured.append(
                {**measurement, "text": "ab12", "checkpoint": f"{name}-{seed}", **facts}
            )
    return measured


def task_rows(name, accuracies, length=64, windows=100, **facts):
    """A row of the task copy for each seed: the share of windows whose whole answer is right."""
    measured = seeds(name, {length: [1.0] * len(accuracies)}, protocol="task", corpus="task:copy")
    for answer, accuracy in zip(measured, accuracies, strict=True):
        right = round(accuracy * windows)
        answer |= {"train_length": 16, "windows": windows, "tokens": 10 * windows, "part": "test"}
        answer |= {
            "accuracy": accuracy,
            "token_accuracy": (right + (windows - right) / 2) / windows,
        }
        answer["window_accuracies"] = [1.0] * right + [0.5] * (windows - right)
        answer |= facts
    return measured


def lower(a, b=None, at="L", by=0, **fields):
    """The claim that a is lower than b."""
    return Claim(a=a, b=b, at=at, lower_by=by, **fields)


def only(claim, measured):
    """The one verdict on a claim."""
    (verdict,) = judged([claim], measured)
    return verdict


# --- Fields ---


def test_a_claim_is_a_direction_and_a_size():
    sides = {"a": "a", "b": "b", "at": "L"}
    higher = Claim(**sides, higher_by=20)
    assert higher.excess(math.log(1.2)) == pytest.approx(0)
    assert higher.excess(1) == pytest.approx(1 - math.log(1.2))
    assert lower("a", "b", by=5).excess(math.log(0.95)) == pytest.approx(0)
    assert lower("a", "b", by=5).excess(-1) == pytest.approx(1 + math.log(0.95))
    assert lower("a", "b", by=-5).excess(math.log(1.05)) == pytest.approx(0), "at most 5 % higher"
    share = Claim(**sides, higher_by=90, quantity="accuracy")
    assert share.excess(0.95) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"b": "b", "lower_by": 0}, "a is lower at 4 L than b (perplexity)"),
        (
            {"b_at": "L", "higher_by": 20},
            "a is more than 20 % higher at 4 L than at L (perplexity)",
        ),
        ({"b": "b", "b_at": 64, "lower_by": 0}, "a is lower at 4 L than b at 64 (perplexity)"),
        ({"b": "b", "lower_by": -5}, "a is at most 5 % higher at 4 L than b (perplexity)"),
        (
            {"b": "b", "higher_by": 90, "quantity": "accuracy", "both": "copy"},
            "a is more than 90 points higher at 4 L than b (accuracy, copy)",
        ),
    ],
)
def test_a_claim_is_shown_as_a_sentence(fields, words):
    assert Claim(a="a", at="4 L", **fields).text == words


def test_lengths_are_numbers_or_multiples_of_the_training_length():
    for at, lengths in {
        2048: [2048],
        "L": [512],
        "4 L": [2048],
        ">= 1024": [1024, 2048, 4096],
        ">= 4 L": [2048, 4096],
    }.items():
        measured = [{"train_length": 512, "length": n} for n in (512, 1024, 2048, 4096)]
        assert [row["length"] for row in measured if has_length(row, at)] == lengths, at


@pytest.mark.parametrize(
    "fields",
    [
        "{a: a, b: b, at: 512}",
        "{a: a, at: 512, lower_by: 0}",
        "{a: a, b: b, at: 512 or so, lower_by: 0}",
        "{a: a, b: b, at: 512, lower_by: 0, protokol: tail}",
    ],
)
def test_a_bad_claim_is_one_message_with_the_fields_of_claims(fields, tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(f"source: {{paper: p, section: s, url: u}}\nclaims:\n  - {fields}\n")
    with pytest.raises(UserError, match=r"mine.yml: cannot be read as claims: claims.0") as fault:
        read_claims(path)
    assert str(fault.value).endswith(FIELDS)


# --- Which rows answer ---


def test_a_claim_is_judged_in_each_setting_that_has_its_rows():
    measured = []
    for corpus, gap in (("github", 0.1), ("arxiv", -0.1)):
        measured += seeds("a", {512: [3, 3.1, 3.2]}, corpus=corpus)
        measured += seeds("b", {512: [3 + gap, 3.101 + gap, 3.202 + gap]}, corpus=corpus)
    verdicts = judged([lower("a", "b")], measured)
    assert [(verdict.rows[0]["corpus"], verdict.word) for verdict in verdicts] == [
        ("github", "holds"),
        ("arxiv", "fails"),
    ]
    assert only(lower("a", "b", both="arxiv"), measured).word == "fails"
    text = table_of(verdicts, "a source").text()
    assert "arxiv valid: equal_tokens" in text
    assert "-9.61 % [-9.83, -9.38] at 512" in text


def test_a_window_answers_only_claims_that_name_it():
    measured = seeds("a", {1024: [3, 3.1, 3.2]})
    measured += seeds("a", {1024: [2, 2.1, 2.2001]}, window="train_length")
    assert only(lower("a", "a", "2 L"), measured).difference.estimate.mean == 0
    assert only(lower("a, window train_length", "a", "2 L"), measured).word == "holds"
    assert only(lower("a, window 512", "a", "2 L", 60), measured).word == "holds"


def test_a_bare_name_means_the_default_options():
    measured = task_rows("none", [0.5, 0.51, 0.52]) + task_rows("rotary", [0.2, 0.21, 0.19])
    for name, share, options in (("rotary", 0.8, {"fraction": 0.5}), ("rotary, none", 0.7, {})):
        several = task_rows(name, [share, share + 0.01, share + 0.03])
        for seed, answer in enumerate(several):
            facts = {"config_hash": f"{name}{options}{seed}", "pos_emb_args": options}
            measured.append(answer | facts | {"cell": {"encoding": f"{name} {options}"}})
    for a, b in (
        ("rotary", "none"),
        ("none", "rotary, fraction 0.5"),
        ("rotary", "rotary, fraction 0.5"),
        ("none", "rotary/none"),
    ):
        claim = lower(a, b, "4 L", quantity="accuracy", both="copy")
        assert only(claim, measured).word == "holds", claim


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (lower("rotray", "b"), "rotray: no row with rotray"),
        (lower("a", "b", protocol="tail"), "a: no row with tail"),
        (lower("a", "b", quantity="accuracy"), "a: no row with accuracy at L"),
        (lower("a", "b", 4096), "a: no row with perplexity at 4096"),
        (lower("c", "b"), "c: too long"),
        (lower("d", "b"), "share no corpus, part"),
        (lower("two", "b"), "several kinds of rows"),
        (lower("e", "b"), "the encoding: windows_per_step 8, not 16; parent_model t5 step 9"),
        (lower("e", "b", both="windows_per_step 8"), "b: no row with windows_per_step 8"),
        (lower("a, dtype float32", "e, windows_per_step 8"), "parent_model none, not t5"),
        (lower("a", "f"), "more than the encoding: dtype float32, not bfloat16 - measure"),
    ],
)
def test_missing_rows_are_named_and_no_fault(claim, reason):
    measured = seeds("a", {512: [3, 3, 3]}) + seeds("b", {512: [3, 3, 3]})
    (refused,) = rows("c", {512: None}, reason="too long", text="ab12")
    measured += [refused, *seeds("d", {512: [3, 3, 3]}, step=7)]
    measured += seeds("e", {512: [3, 3, 3]}, windows_per_step=8, parent_model="t5 step 9")
    measured += seeds("f", {512: [3, 3, 3]}, dtype="bfloat16")
    measured = [{"windows_per_step": 16, "dtype": "float32"} | answer for answer in measured]
    for base in (7, 8):
        measured += seeds("two", {512: [3.0]}, pos_emb_args={"base": base})
    verdict = only(claim, measured)
    assert verdict.word == "no rows"
    assert reason in verdict.reason
    assert reason in table_of([verdict], "").text()


def test_one_seed_is_about_these_weights():
    noise = np.random.default_rng(0).standard_normal(64) / 100
    measured = [row("a", 3 + noise), row("b", np.full(64, 3.1))]
    verdict = only(lower("a", "b"), measured)
    assert (verdict.word, verdict.difference.unit) == ("holds", "windows")
    assert "holds*" in table_of([verdict], "").text()


def test_two_seeds_name_the_seeds_that_would_decide_and_whether_they_disagree():
    generator = np.random.default_rng(8)
    measured = [row("b", np.full(64, 3.0), seed) for seed in (1, 2)]
    for seed, difference in ((1, 0.12), (2, 0.04)):
        losses = 3 + difference + generator.standard_normal(64)
        measured.append(row("a", losses - losses.mean() + 3 + difference, seed))
    verdict = only(lower("b", "a"), measured)
    assert (verdict.word, verdict.difference.unit) == ("undecided", "windows")
    # Cohen's d of the two differences is 0.08 / 0.0566 = 1.41: G*Power, power of 0.8
    assert verdict.needed == "7 seeds"
    measured[-1]["loss"] = 2.9
    assert only(lower("b", "a"), measured).needed.endswith("disagree in sign")


def test_a_change_is_paired_block_by_block_of_the_same_text():
    blocks = np.random.default_rng(1).standard_normal((64, 1))
    measured = [row_of_blocks("a", 3 + blocks)]
    longer = np.random.default_rng(2).standard_normal((64, 1)) / 100 + 3.3 + blocks
    measured.append(row_of_blocks("a", longer.reshape(16, 4)))
    change = {"a": "a", "at": "4 L", "b_at": "L"}
    verdict = only(Claim(**change, higher_by=20), measured)
    assert (verdict.word, verdict.rows[0]["length"]) == ("holds", 2048)
    assert verdict.difference.unit == "blocks"
    assert only(Claim(**change, higher_by=50), measured).word == "fails"
    assert only(Claim(**change, lower_by=-50), measured).word == "holds"
    assert only(Claim(**change, lower_by=0), measured).word == "fails"


def test_at_every_length_the_claim_must_hold():
    low, high = [3, 3.1, 3.2], [3.5, 3.601, 3.702]
    measured = seeds("a", {512: low, 1024: low}) + seeds("b", {512: high, 1024: high})
    assert only(lower("a", "b", ">= 512"), measured).word == "holds"
    measured += seeds("a", {2048: low}) + seeds("b", {2048: [3, 3.2, 3.1]})
    assert only(lower("a", "b", ">= 512"), measured).word == "undecided"
    assert only(lower("a", "b", [512, 1024]), measured).word == "holds"
    measured += seeds("a", {4096: high}) + seeds("b", {4096: low})
    verdict = only(lower("a", "b", ">= 512"), measured)
    assert (verdict.word, verdict.rows[0]["length"]) == ("fails", 4096)


def test_accuracies_of_tasks():
    measured = task_rows("fox", [0.99, 0.97, 0.98]) + task_rows("alibi", [0.2, 0.21, 0.19])
    sides = {"a": "fox", "b": "alibi", "at": "4 L", "both": "copy"}
    right = Claim(**sides, higher_by=0, quantity="accuracy")
    assert only(right, measured).word == "holds"
    assert only(right.model_copy(update={"higher_by": 90}), measured).word == "fails"
    assert only(right.model_copy(update={"quantity": "token_accuracy"}), measured).word == "holds"
    one_seed = [answer for answer in measured if answer["seed"] == 1]
    assert only(right, one_seed).difference.unit == "windows"
    assert only(right, one_seed).difference.estimate.mean == 0.79
    # The windows of a task are other ones at each length.
    measured += task_rows("fox", [1.0, 0.99, 0.98], length=16, text="cd34")
    change = Claim(a="fox", at="4 L", b_at="L", higher_by=-10, quantity="accuracy")
    assert only(change, measured).word == "holds"
    one_seed = [answer for answer in measured if answer["seed"] == 1]
    lacking = only(change, [{**answer, "region": f"at {answer['length']}"} for answer in one_seed])
    assert "3 seeds" in lacking.reason
    # All or nothing has no spread over seeds. One answer more with each of three may be chance.
    clear = task_rows("a", [1.0, 1.0, 1.0]) + task_rows("b", [0.0, 0.0, 0.0])
    claim = Claim(a="a", b="b", at=64, higher_by=0, quantity="accuracy")
    assert only(claim, clear).word == "holds"
    close = task_rows("a", [1.0, 1.0, 1.0]) + task_rows("b", [0.99, 0.99, 0.99])
    assert only(claim, close).word == "undecided"


def test_two_protocols_are_the_sides_of_a_claim_where_they_scored_the_same_targets():
    measured = seeds("a", {512: [3, 3.1, 3.2]}, protocol="tail", tail=128, window_losses=[3])
    gap = seeds("a", {512: [3.2, 3.301, 3.402]}, protocol="gap")
    claim = lower("a, protocol tail", "a, protocol gap")
    assert only(claim, measured + gap).word == "holds"
    elsewhere = [answer | {"region": "other"} for answer in gap]
    assert "other text" in only(claim, measured + elsewhere).reason


# --- Rates ---


def test_verdicts_have_their_nominal_rate_where_nothing_is_true():
    # Four claims, one of them over two lengths, whose truth lies on their border.
    generator = np.random.default_rng(3)
    claims = [lower("b", "a"), lower("a", "c"), lower("d", "a", by=10)]
    claims.append(lower("b", "a", ">= 512"))
    wrong = 0
    for _ in range(200):
        measured = []
        for name, shift in {"a": 0, "b": 0, "c": 0, "d": math.log(0.9)}.items():
            values = 3 + shift + generator.standard_normal((2, 4)) / 10
            measured += seeds(name, {512: values[0], 1024: values[1]})
        words = [verdict.word for verdict in judged(claims, measured)]
        wrong += words != ["undecided"] * 4
    assert 0 < wrong / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


@pytest.mark.parametrize("effect", GPOWER)
def test_the_sample_needed_is_that_of_g_power(effect):
    n = 10
    seen = Estimate(effect, 1 / math.sqrt(n), n - 1, n)
    assert values_needed(seen, effect, 0.025, "seeds") == GPOWER[effect]


def test_a_verdict_asks_for_the_seeds_that_decide_at_holms_next_level():
    seen = seeds("a", {512: 2.9 + 0.1 * np.array([-1, 0, 1])})
    seen += seeds("b", {512: [3.0] * 3}) + seeds("c", {512: [3, 3.3, 2.7]})
    first, second = judged([lower(name, "b") for name in "ac"], seen)
    assert (first.word, second.needed) == ("undecided", "")
    # Cohen's d is 1 and two claims are open: G*Power, power of 0.8, one-sided 0.0125
    assert first.needed == "13 seeds"


def test_the_blocks_that_a_verdict_asks_for_decide_with_about_the_power_of_80_percent():
    generator = np.random.default_rng(7)
    pilot = mean_of_blocks(generator.standard_normal(64))
    needed = values_needed(Estimate(0.15, 1 / 8, pilot.df, 64), 0.15, 0.025, "blocks")
    decisions = 0
    for values in generator.normal(0.15, 1, (400, needed)):
        estimate = mean_of_blocks(values)
        decisions += estimate.mean > t_quantile(0.975, estimate.df) * estimate.stderr
    assert abs(decisions / 400 - 0.8) < 0.1


def test_the_output_names_the_runs_and_commits_of_each_claim(tmp_path):
    folder = ROOT / "docs" / "results" / "context"
    claims = tmp_path / "claims.yml"
    claims.write_text(
        "source: {paper: mine, section: plan, url: none}\n"
        "claims: [{a: fox, b: alibi, at: 8 L, lower_by: 0, protocol: tail}]\n"
    )
    output = tmp_path / "claims.md"
    words = (*sorted(folder.glob("*.jsonl")), "--claims", claims, "-o", output)
    assert call("tools/compare.py", *words).returncode == 0
    [line] = re.findall(r"^\| fox is lower .* \| (runs.*) \| (.*) \|$", output.read_text(), re.M)
    runs = [
        f"runs/sweeps/context/{name}-{seed}/global_step4000"
        for name in ("fox", "alibi")
        for seed in (1235, 1236, 1237)
    ]
    assert line[0].split(", ") == runs
    lines = [json.loads(text) for path in folder.glob("*.jsonl") for text in path.open()]
    at_8_l = [row for row in lines if (row["protocol"], row["length"]) == ("tail", 1024)]
    commits = {row["commit"] for row in at_8_l if row["checkpoint"] in runs}
    assert set(line[1].split(", ")) == commits
