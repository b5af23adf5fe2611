"""Claims: grammar, the rows that answer them, and verdicts in simulations of known truth."""

import math

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.claims import GRAMMAR, claim_of, judged, read_claims, table_of
from megatron.results.statistics import Estimate, mean_of, mean_of_blocks, t_quantile, values_needed
from tests.results.rows import row, row_of_blocks, rows
from tests.support import ROOT

FILES = [
    *sorted((ROOT / "configs/claims").glob("*.yml")),
    *(ROOT / f"docs/results/{folder}/claims.yml" for folder in ("abacus", "documents")),
]
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


def only(text, measured):
    """The one verdict on a claim."""
    (verdict,) = judged([claim_of(text)], measured)
    return verdict


# --- The grammar ---


@pytest.mark.parametrize(
    ("text", "sign", "size", "quantity"),
    [
        ("kerple_log < alibi, perplexity from 2048 (github, tail)", -1, 0, "perplexity"),
        ("rotary loses 20 % from 512 to 4096", 1, math.log(1.2), "perplexity"),
        ("fox > alibi, accuracy at 4 L (recall)", 1, 0, "accuracy"),
        ("a < b by 5 %, loss at 2 L", -1, -math.log(0.95), "loss"),
        ("a > b (window 512) by 5 %, token accuracy at L", 1, 0.05, "token accuracy"),
        ("a loses 20 %, accuracy from L to 4L", -1, 0.2, "accuracy"),
        ("a loses at most 5 % from L to 4L", -1, -math.log(1.05), "perplexity"),
    ],
)
def test_a_line_is_a_direction_and_a_size(text, sign, size, quantity):
    claim = claim_of(text)
    assert (claim.sign, claim.quantity) == (sign, quantity)
    assert claim.size == pytest.approx(size)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a < b, perplexity", "does not say where"),
        ("a < b, perplexty at 512", "no such quantity: perplexty"),
        ("a is better than b, loss at 512", "is no claim"),
        ("a rises from 512", "a change without two lengths"),
        ("a falls 100 % from 512 to 1024", "fall by 100 % or more"),
        ("a < b, loss at 512 to 1024", "is no claim"),
        ("a < b, loss at 512 and 1024", "is no claim"),
    ],
)
def test_a_bad_line_is_one_message_with_file_number_and_grammar(text, problem, tmp_path):
    path = tmp_path / "mine.yml"
    head = "source: {paper: p, section: s, url: u}\nclaims:\n  - a < b, loss at 512\n"
    path.write_text(f"{head}  - {text}\n")
    with pytest.raises(UserError) as fault:
        read_claims(path)
    assert f"{path}: claim 2: {text!r}" in str(fault.value)
    assert problem in str(fault.value)
    assert str(fault.value).endswith(GRAMMAR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_has_claims_and_their_source(path):
    source, claims = read_claims(path)
    assert "https://" in source
    assert claims


# --- Which rows answer ---


def test_a_claim_is_judged_in_each_setting_that_has_its_rows():
    measured = []
    for corpus, gap in (("github", 0.1), ("arxiv", -0.1)):
        measured += seeds("a", {512: [3, 3.1, 3.2]}, corpus=corpus)
        measured += seeds("b", {512: [3 + gap, 3.101 + gap, 3.202 + gap]}, corpus=corpus)
    verdicts = judged([claim_of("a < b, loss at L")], measured)
    assert [(verdict.example["corpus"], verdict.word) for verdict in verdicts] == [
        ("github", "holds"),
        ("arxiv", "fails"),
    ]
    assert only("a < b, loss at L (arxiv)", measured).word == "fails"
    text = table_of(verdicts, "a source").text()
    assert "arxiv valid: equal_tokens" in text
    assert "-9.61 %" in table_of(judged([claim_of("a < b at L (github)")], measured), "").text()


def test_a_window_answers_only_claims_that_name_it():
    measured = seeds("a", {1024: [3, 3.1, 3.2]})
    measured += seeds("a", {1024: [2, 2.1, 2.2001]}, window="train_length")
    assert only("a < a, loss at 2 L", measured).effect.estimate.mean == 0
    assert only("a (window train_length) < a, loss at 2 L", measured).word == "holds"
    assert only("a (window 512) < a, loss at 2 L", measured).word == "holds"
    assert only("a > a (window 512) by 60 %, perplexity at 2 L", measured).word == "holds"


def test_a_bare_name_means_the_default_options():
    measured = task_rows("none", [0.5, 0.51, 0.52]) + task_rows("rotary", [0.2, 0.21, 0.19])
    for name, share, options in (("rotary", 0.8, {"fraction": 0.5}), ("rotary, none", 0.7, {})):
        several = task_rows(name, [share, share + 0.01, share + 0.03])
        for seed, answer in enumerate(several):
            facts = {"config_hash": f"{name}{options}{seed}", "pos_emb_args": options}
            measured.append(answer | facts | {"cell": {"encoding": f"{name} {options}"}})
    assert only("none > rotary, accuracy at 4 L (copy)", measured).word == "holds"
    assert only("none > rotary (fraction 0.5), accuracy at 4 L (copy)", measured).word == "fails"
    assert only("rotary (fraction 0.5) > rotary, accuracy at 4 L", measured).word == "holds"
    assert only("rotary/none > none, accuracy at 4 L", measured).word == "holds"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rotray < b, loss at 512", "rotray: no row with this encoding"),
        ("a < b, loss at 512 (tail)", "a: no row with tail"),
        ("a < b, accuracy at 512", "a: no row with accuracy"),
        ("a < b, loss at 4096", "a: no row with length 4096"),
        ("c < b, loss at 512", "c at 512: too long"),
        ("d < b, loss at 512", "share no corpus, protocol"),
        ("two < b, loss at 512", "several kinds of rows"),
        ("a < b, loss at 512 (stdlip)", "a: no row with stdlip - did you mean stdlib?"),
        ("a < b, loss from 2 L to 512", "a: no row with length 2 L to 512"),
        ("e < b, loss at 512", "the encoding: windows_per_step 8, not 16; parent_model t5 step 9"),
        ("e < b, loss at 512 (windows_per_step 8)", "b: no row with windows_per_step 8"),
        ("a (dtype float32) < e (windows_per_step 8), loss at 512", "parent_model none, not t5"),
        ("a < f, loss at 512", "more than the encoding: dtype float32, not bfloat16 - measure"),
    ],
)
def test_missing_rows_are_named_and_no_fault(text, reason):
    measured = seeds("a", {512: [3, 3, 3]}) + seeds("b", {512: [3, 3, 3]})
    (refused,) = rows("c", {512: None}, reason="too long", text="ab12")
    measured += [refused, *seeds("d", {512: [3, 3, 3]}, step=7)]
    measured += seeds("e", {512: [3, 3, 3]}, windows_per_step=8, parent_model="t5 step 9")
    measured += seeds("f", {512: [3, 3, 3]}, dtype="bfloat16")
    measured = [{"windows_per_step": 16, "dtype": "float32"} | answer for answer in measured]
    for base in (7, 8):
        measured += seeds("two", {512: [3.0]}, pos_emb_args={"base": base})
    verdict = only(text, measured)
    assert verdict.word == "no rows"
    assert reason in verdict.reason
    assert reason in table_of([verdict], "").text()


def test_one_seed_is_about_these_weights():
    noise = np.random.default_rng(0).standard_normal(64) / 100
    measured = [row("a", 3 + noise), row("b", np.full(64, 3.1))]
    verdict = only("a < b, loss at L", measured)
    assert (verdict.word, verdict.effect.paired.unit) == ("holds", "windows")
    assert "holds*" in table_of([verdict], "").text()


def test_a_condition_makes_a_difference_the_claim():
    measured = seeds("a", {512: [3, 3.1, 3.2]}, parent_model="t5 step 9", step=7)
    measured += seeds("b", {512: [4, 4.101, 4.202]})
    assert only("a (step 7, parent_model t5 step 9) < b, loss at L", measured).word == "holds"


def test_two_seeds_name_the_seeds_that_would_decide_and_whether_they_disagree():
    generator = np.random.default_rng(8)
    measured = [row("b", np.full(64, 3.0), seed) for seed in (1, 2)]
    for seed, difference in ((1, 0.12), (2, 0.04)):
        losses = 3 + difference + generator.standard_normal(64)
        measured.append(row("a", losses - losses.mean() + 3 + difference, seed))
    verdict = only("a > b, loss at L", measured)
    assert (verdict.word, verdict.effect.paired.unit) == ("undecided", "windows")
    *_, decides = table_of([verdict], "").body[0]
    # Cohen's d of the two differences is 0.08 / 0.0566 = 1.41: G*Power, power of 0.8
    assert decides == "7 seeds"
    measured[-1]["loss"] = 2.9
    assert (
        table_of([only("a > b, loss at L", measured)], "").body[0][-1].endswith("disagree in sign")
    )


def test_a_change_is_paired_block_by_block_of_the_same_text():
    blocks = np.random.default_rng(1).standard_normal((64, 1))
    measured = [row_of_blocks("a", 3 + blocks)]
    longer = np.random.default_rng(2).standard_normal((64, 1)) / 100 + 3.3 + blocks
    measured.append(row_of_blocks("a", longer.reshape(16, 4)))
    verdict = only("a loses 20 % from L to 4 L", measured)
    assert (verdict.word, verdict.effect.length) == ("holds", 2048)
    assert verdict.effect.paired.unit == "blocks"
    assert only("a loses 50 % from L to 4 L", measured).word == "fails"
    assert only("a loses at most 50 % from L to 4 L", measured).word == "holds"
    assert only("a falls from L to 4 L", measured).word == "fails"
    # Conditions of the encoding hold at both lengths.
    windowed = [{**row, "window": 512, "loss": row["loss"] + 1} for row in measured]
    for other in windowed:
        other["block_losses"] = [loss + 1 for loss in other["block_losses"]]
    change = only("a (window 512) loses 20 % from L to 4 L", measured + windowed)
    assert change.effect.estimate.mean == pytest.approx(verdict.effect.estimate.mean)


def test_at_every_length_the_claim_must_hold():
    lower, higher = [3, 3.1, 3.2], [3.5, 3.601, 3.702]
    measured = seeds("a", {512: lower, 1024: lower}) + seeds("b", {512: higher, 1024: higher})
    assert only("a < b, loss from 512", measured).word == "holds"
    measured += seeds("a", {2048: lower}) + seeds("b", {2048: [3, 3.2, 3.1]})
    assert only("a < b, loss from 512", measured).word == "undecided"
    assert only("a < b, loss from 512 to 1024", measured).word == "holds"
    measured += seeds("a", {4096: higher}) + seeds("b", {4096: lower})
    verdict = only("a < b, loss from 512", measured)
    assert (verdict.word, verdict.effect.length) == ("fails", 4096)


def test_accuracies_of_tasks():
    measured = task_rows("fox", [0.99, 0.97, 0.98]) + task_rows("alibi", [0.2, 0.21, 0.19])
    assert only("fox > alibi, accuracy at 4 L (copy)", measured).word == "holds"
    assert only("fox > alibi by 90 %, accuracy at 4 L (task:copy)", measured).word == "fails"
    assert only("fox > alibi, token accuracy at 64 (copy, test)", measured).word == "holds"
    one_seed = [answer for answer in measured if answer["seed"] == 1]
    assert only("fox > alibi, accuracy at 4 L (copy)", one_seed).effect.paired.unit == "windows"
    assert only("fox > alibi, accuracy at 4 L (copy)", one_seed).effect.estimate.mean == 0.79
    # The windows of a task are other ones at each length.
    measured += task_rows("fox", [1.0, 0.99, 0.98], length=16, text="cd34")
    change = "fox loses at most 10 %, accuracy from L to 4 L (copy)"
    assert only(change, measured).word == "holds"
    one_seed = [answer for answer in measured if answer["seed"] == 1]
    lacking = only(change, [{**answer, "region": f"at {answer['length']}"} for answer in one_seed])
    assert lacking.word == "no rows"
    assert "needs 3 seeds" in lacking.reason
    # All or nothing has no spread over seeds. One answer more with each of three may be chance.
    clear = task_rows("a", [1.0, 1.0, 1.0]) + task_rows("b", [0.0, 0.0, 0.0])
    assert only("a > b, accuracy at 64", clear).word == "holds"
    close = task_rows("a", [1.0, 1.0, 1.0]) + task_rows("b", [0.99, 0.99, 0.99])
    assert only("a > b, accuracy at 64", close).word == "undecided"


def test_two_protocols_are_the_sides_of_a_claim_where_they_scored_the_same_targets():
    measured = seeds("a", {512: [3, 3.1, 3.2]}, protocol="tail", tail=128, window_losses=[3])
    measured += seeds("a", {512: [3.2, 3.301, 3.402]}, protocol="gap")
    assert only("a (protocol tail) < a (protocol gap), loss at L", measured).word == "holds"
    other = only(
        "a (protocol tail) < a (protocol gap), loss at L",
        [
            *measured[:3],
            *seeds("a", {512: [3, 3, 3]}, protocol="gap", region="other", window_losses=[3]),
        ],
    )
    assert "other text" in other.reason


# --- Rates ---


def test_verdicts_have_their_nominal_rate_where_nothing_is_true():
    # Four claims, one of them over two lengths, whose truth lies on their border.
    generator = np.random.default_rng(3)
    texts = ["b < a, loss at 512", "c > a, loss at 512", "d < a by 10 %, loss at 512"]
    claims = [claim_of(text) for text in (*texts, "b < a, loss from 512")]
    wrong = 0
    for _ in range(200):
        measured = []
        for name, shift in {"a": 0, "b": 0, "c": 0, "d": math.log(0.9)}.items():
            values = 3 + shift + generator.standard_normal((2, 4)) / 10
            measured += seeds(name, {512: values[0], 1024: values[1]})
        words = [verdict.word for verdict in judged(claims, measured)]
        wrong += words != ["undecided"] * 4
    assert 0 < wrong / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_a_false_claim_over_several_lengths_rarely_holds_and_a_true_one_rarely_fails():
    # It is true at 512 and on the border, where both verdicts are wrong, at four longer lengths.
    generator = np.random.default_rng(4)
    wrong = {"holds": 0, "fails": 0}
    for _ in range(200):
        measured = []
        for name, shift in {"a": -1, "b": 0}.items():
            losses = 3 + generator.standard_normal((5, 4)) / 10
            losses[0] += shift
            measured += seeds(name, dict(zip((512, 1024, 2048, 4096, 8192), losses, strict=True)))
        wrong["holds"] += only("a < b, loss from 512 to 1024", measured).word == "holds"
        wrong["fails"] += only("a < b, loss from 512", measured).word == "fails"
    for count in wrong.values():
        assert 0 < count / 200 <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 200)


@pytest.mark.parametrize("effect", GPOWER)
def test_the_sample_needed_is_that_of_g_power(effect):
    n = 10
    seen = Estimate(effect, 1 / math.sqrt(n), n - 1, n, 1, n)
    assert values_needed(seen, effect, 0.025, "seeds") == GPOWER[effect]


def test_a_verdict_asks_for_the_seeds_that_decide_at_holms_next_level():
    seen = seeds("a", {512: 2.9 + 0.1 * np.array([-1, 0, 1])})
    seen += seeds("b", {512: [3.0] * 3}) + seeds("c", {512: [3, 3.3, 2.7]})
    first, second = judged([claim_of(f"{name} < b, loss at 512") for name in "ac"], seen)
    assert (first.word, second.needed) == ("undecided", None)
    # Cohen's d is 1 and two claims are open: G*Power, power of 0.8, one-sided 0.0125
    assert first.needed == 13


# A normal test needs (1.96 + 0.84)² / effect².
@pytest.mark.parametrize(
    ("unit", "n", "effect", "most"), [("blocks", 64, 0.15, 450), ("windows", 8, 0.5, 60)]
)
def test_the_pieces_of_text_that_a_verdict_asks_for_decide_with_a_power_of_80_percent(
    unit, n, effect, most
):
    def mean_of_pieces(values):
        return mean_of(values) if unit == "windows" else mean_of_blocks(values, [1] * len(values))

    generator = np.random.default_rng(7)
    pilot = mean_of_pieces(generator.standard_normal(n))
    seen = Estimate(effect, 1 / math.sqrt(n), pilot.df, n, pilot.block, n)
    needed = values_needed(seen, effect, 0.025, unit)
    assert (2.8 / effect) ** 2 < needed < most
    decisions = 0
    for values in generator.normal(effect, 1, (400, needed)):
        estimate = mean_of_pieces(values)
        decisions += estimate.mean > t_quantile(0.975, estimate.df) * estimate.stderr
    assert abs(decisions / 400 - 0.8) < 3 * math.sqrt(0.8 * 0.2 / 400)
