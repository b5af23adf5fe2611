"""Protocol longppl: key tokens and perplexities of the authors' code, and rows of evaluate.py."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import UserError
from megatron.evaluation.perplexity import key_tokens, measured
from megatron.protocols import KeyRule, Windows
from megatron.results.comparison import compared
from megatron.results.files import read_rows, write_results
from megatron.results.labels import kinds, sections
from tests.evaluation.test_evaluate import configuration, evaluate, held_out, home, model, rows_of
from tests.positions.golden import load
from tests.results.rows import rows

VARIANTS = ("same", "two_tokenizers", "loose", "none")
every_variant = pytest.mark.parametrize("variant", VARIANTS)
home = home


class Losses(nn.Module):
    """A model whose losses are known: of a token in the whole text, and in a shorter one."""

    def __init__(self, whole, shorter=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.whole, self.shorter = whole, shorter

    def forward(self, ids, labels, counted):
        is_whole = labels.shape[1] == len(self.whole) - 1
        return (self.whole if is_whole else self.shorter)[labels]


def rule_of(golden):
    trunc_len, sliding_window = golden.param("trunc_len"), golden.param("sliding_window")
    return KeyRule(golden.param("alpha"), golden.param("beta"), trunc_len, sliding_window)


def whole_text(count, golden):
    positions = np.arange(count - 1)
    return Windows(count - 1, [np.arange(count)], [positions], [0], rule=rule_of(golden))


@every_variant
def test_key_tokens_are_those_of_the_authors_code(variant):
    golden = load("longppl", variant)
    rule = rule_of(golden)
    long, short = (golden.numbers[f"loss_{which}"].double().numpy() for which in ("long", "short"))
    places = rule.places(long[1:], [short[rule.trunc_len :]])
    assert (places + 1).tolist() == golden.numbers["key_evaluator"].tolist()


@every_variant
def test_every_target_has_the_short_context_of_the_authors_code(variant):
    golden = load("longppl", variant)
    starts = golden.numbers["window_start"].tolist()
    texts = [1000 * number + np.arange(len(starts)) for number in range(2)]
    windows = Windows(len(starts) - 1, texts, [])
    begins = {}
    for pieces in rule_of(golden).short_windows(windows):
        for ids, targets in zip(pieces.ids, pieces.targets, strict=True):
            begins |= {int(target): int(ids[0]) for target in targets}
    expected = {token: start for token, start in enumerate(starts) if start >= 0}
    again = {1000 + token: 1000 + start for token, start in expected.items()}
    assert begins == expected | again


@pytest.mark.parametrize("variant", ["same", "none"])
def test_the_perplexities_are_those_of_the_authors_code(variant):
    golden = load("longppl", variant)
    numbers = golden.numbers
    judge = Losses(numbers["loss_long"], numbers["loss_short"])
    count = len(numbers["loss_model"])
    windows = whole_text(count, golden)
    keys = key_tokens(judge, windows)
    row = measured(Losses(numbers["loss_model"]), windows, keys=keys)
    assert row["all_perplexity"] == pytest.approx(numbers["ppl"].item(), rel=1e-6)
    assert row["all_tokens"] == count - 1
    if variant == "same":
        assert row["perplexity"] == pytest.approx(numbers["longppl"].item(), rel=1e-6)
        assert row["tokens"] == numbers["n_key_token"].item()
    else:
        assert row["perplexity"] is None
        assert row["tokens"] == 0
        assert row["reason"].startswith(
            "no key token: no target has a loss below 2 (--beta) that rises by more than --alpha"
        )


def test_a_loss_that_is_not_finite_leaves_a_row_that_can_be_read(tmp_path):
    golden = load("longppl", "same")
    losses = golden.numbers["loss_model"].clone()
    losses[-1] = torch.nan
    windows = whole_text(len(losses), golden)
    judge = Losses(golden.numbers["loss_long"], golden.numbers["loss_short"])
    keys = key_tokens(judge, windows)
    facts = measured(Losses(losses), windows, keys=keys)
    (row,) = rows("a", {windows.length: None}, **facts)
    assert row["reason"] == "the loss over all targets is nan"
    assert [row[key] for key in ("loss", "perplexity", "all_loss", "window_losses")] == [None] * 4
    write_results(tmp_path / "a.jsonl", [row])
    assert read_rows([tmp_path / "a.jsonl"]) == [row]


OPTIONS = ["--protocol", "longppl", "--alpha", "0.02", "--beta", "-6", "eval_tokens=64"]


def by_hand(config, length, text, alpha, beta, trunc_len, sliding_window):
    """Losses of all targets, and which are key tokens, from one pass for each target."""
    judge = model(config).double().eval()
    losses, keys = [], []
    for start in range(0, len(text) - 1, length):
        window = text[start : start + length + 1]
        for target in range(1, length + 1):
            several = [window[:target]]
            if target >= trunc_len:
                begin = (target - trunc_len) // sliding_window * sliding_window
                several.append(window[begin:target])
            nats = []
            for context in several:
                logits = judge(context[None])[0, -1]
                nats.append(F.cross_entropy(logits, window[target]).item())
            losses.append(nats[0])
            keys.append(len(nats) > 1 and nats[1] - nats[0] > alpha and nats[0] < -beta)
    return np.array(losses), np.array(keys)


def test_rows_have_the_key_tokens_of_the_definition_and_the_perplexity_of_all(
    home, tmp_path, capsys
):
    words = [f"--checkpoint {home}/run --step 3", *OPTIONS, "--lengths", "8", "32"]
    rows = rows_of(tmp_path / "own.jsonl", *words)
    for row in rows:
        assert row["judge"] == "self"
        assert (row["trunc_len"], row["sliding_window"]) == (8, 2)  # of 16 tokens in training
        config = configuration(home, "seed=3", "pos_emb=alibi")
        losses, keys = by_hand(config, row["length"], held_out(home, 65), 0.02, -6, 8, 2)
        assert row["all_loss"] == pytest.approx(losses.mean(), abs=1e-5)
        assert row["tokens"] == keys.sum()
        if row["length"] > 8:
            assert 0 < row["tokens"] < row["all_tokens"] == 64
            assert row["loss"] == pytest.approx(losses[keys].mean(), abs=1e-5)
            assert sum(row["window_tokens"]) == row["tokens"]
    assert rows[0]["reason"].startswith("no key token")
    shown = capsys.readouterr().out
    assert "alibi: n/a at 8: no key token" in shown
    assert f"{rows[1]['all_perplexity']:.1f} at 32" in shown
    assert rows_of(tmp_path / "own.jsonl", *words) == rows  # kept: nothing is measured again


def test_models_are_compared_on_the_key_tokens_of_one_judge_alone(home, tmp_path):
    judged = tmp_path / "judged.jsonl"
    judged_by_itself = tmp_path / "own.jsonl"
    lengths = ["--lengths", "32"]
    for step in (3, 4):
        words = [f"--checkpoint {home}/run --step {step}", *OPTIONS, *lengths]
        rows_of(judged_by_itself, *words)
        rows_of(judged, *words, "--judge", home / "run/global_step7")
    rows = read_rows([judged])
    assert rows[0]["judge"].startswith("mep_free seed 7 step 7 ")
    _, keys = by_hand(configuration(home, "seed=7"), 32, held_out(home, 65), 0.02, -6, 8, 2)
    assert {row["tokens"] for row in rows} == {keys.sum()}
    alibi, rotary = rows
    _, difference = compared(kinds([dict(row, seed=1) for row in rows]))
    expected = rotary["loss"] - alibi["loss"]
    assert difference.over_text.estimate.mean == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="its key tokens are not those of alibi"):
        compared(kinds([dict(row, seed=1) for row in read_rows([judged_by_itself])]))


def test_every_variant_is_judged_by_the_model_as_it_was_trained(home, tmp_path):
    words = [f"--checkpoint {home}/run --step 4", *OPTIONS, "--lengths", "16", "32"]
    variants = "--method none yarn,factor=8 --window none 4"
    several = rows_of(tmp_path / "several.jsonl", *words, *variants.split())
    (trained, _, alone, longer) = [
        *rows_of(tmp_path / "trained.jsonl", *words),
        *rows_of(tmp_path / "alone.jsonl", *words, "--window", "4"),
    ]
    assert alone["key_text"] == trained["key_text"] != longer["key_text"]
    assert [row["key_text"] for row in several] == 4 * [alone["key_text"], longer["key_text"]]
    assert len({row["loss"] for row in several}) > 4
    for section in sections(several).values():
        assert len({row["key_text"] for row in section}) == 1


def test_what_far_context_changes_by_rounding_alone_is_no_key_token():
    rule = KeyRule(0.0, -99.0, 1, 1)
    losses = np.array([5.0, 5.0, 5.0])
    assert rule.places(losses, [losses + np.array([9e-7, 0.0, 1e-3])]).tolist() == [2]


def test_a_judge_of_another_tokenizer_is_refused(home, tmp_path, capsys):
    other = tmp_path / "global_step7"
    other.mkdir()
    for file in (home / "run/global_step7").iterdir():
        content = file.read_bytes()
        (other / file.name).write_bytes(content.replace(b'"hash": "aaaa"', b'"hash": "bbbb"'))
    words = [f"--checkpoint {home}/run", *OPTIONS, "--judge", other]
    assert evaluate(*words, "--output", tmp_path / "a.jsonl") != 0
    assert "learned with the tokenizer bbbb" in capsys.readouterr().err
