"""Probes of models whose answers are known: a copier, a guesser, a window, a table."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.probes.asked import measured, scored, scores_of
from megatron.evaluation.probes.attention import attention_by_distance, edges
from megatron.evaluation.probes.receptive_field import (
    gradient_norms,
    receptive_field,
    receptive_field_tokens,
)
from megatron.evaluation.probes.retrieval import CUE, NEEDLE, TASKS
from megatron.model import from_config

WORDS = 5000
TEXT = np.random.default_rng(0).permutation(WORDS)
DEPTHS = (0.0, 0.5, 1.0)
every_task = pytest.mark.parametrize("task", TASKS)


def copier(ids, at, targets):
    """Continue as the longest earlier repetition of the end went on."""
    logits = torch.zeros(len(ids), len(at), WORDS)
    for line, text in enumerate(ids.tolist()):
        for place, end in enumerate(at.tolist()):
            logits[line, place, text[longest_repetition(text, end) + 1]] = 50.0
    return scored(logits, targets)


def longest_repetition(text, end):
    def matching(other):
        count = 0
        while other - count >= 0 and text[other - count] == text[end - count]:
            count += 1
        return count

    return max(range(end), key=matching)


def guesser(ids, at, targets):
    return scored(torch.zeros(len(ids), len(at), WORDS), targets)


@every_task
def test_a_copier_finds_every_answer_at_every_depth_and_only_where_it_is(task):
    for result in measured(copier, task, TASKS[task], TEXT, 128, depths=DEPTHS, trials=3, seed=1):
        assert result.accuracy == 1.0, result
        assert result.log_probability == pytest.approx(0, abs=1e-6)
        assert result.without < -30, "without the answer it says something else"
        assert result.tokens >= 3 * 4


@every_task
def test_a_model_without_preferences_has_the_accuracy_of_chance(task):
    for result in measured(guesser, task, TASKS[task], TEXT, 128, depths=DEPTHS, trials=2, seed=1):
        assert result.accuracy == pytest.approx(1 / WORDS)
        assert result.chance == pytest.approx(1 / WORDS)
        assert result.log_probability == pytest.approx(-math.log(WORDS), rel=1e-6)
        assert result.without == pytest.approx(-math.log(WORDS), rel=1e-6)


@every_task
def test_contexts_differ_only_in_the_answers_and_ask_for_what_they_contain(task):
    cells = set()
    for trial in TASKS[task].trials(np.random.default_rng(4), TEXT, 128, DEPTHS):
        context, other = trial.ids
        assert trial.ids.shape == (2, 128)
        changed = np.flatnonzero(context != other)
        assert 0 < len(changed) <= 64
        assert set(trial.targets) <= set(context[changed])
        asked = trial.at[trial.at < 127]
        np.testing.assert_array_equal(
            context[asked + 1], trial.targets[trial.at < 127]
        )  # read on, as in generation
        cells |= set(trial.cell)
    assert cells == {0, 1, 2}


def test_depth_0_is_the_start_of_the_context_and_depth_1_just_before_the_question():
    first, _, last = TASKS["passkey"].trials(np.random.default_rng(4), TEXT, 100, DEPTHS)
    question = 100 - CUE - NEEDLE + 1
    np.testing.assert_array_equal(first.ids[0, CUE : CUE + NEEDLE], first.targets)
    np.testing.assert_array_equal(last.ids[0, question - NEEDLE : question], last.targets)


def test_what_cannot_be_asked_is_said():
    with pytest.raises(UserError, match=r"--lengths: 16 is too short for copy - give 48 or more"):
        measured(guesser, "copy", TASKS["copy"], TEXT, 16, depths=DEPTHS, trials=1, seed=1)
    short = TEXT[:20]
    recall = TASKS["recall"]
    (result, *_) = measured(guesser, "recall", recall, short, 60, depths=DEPTHS, trials=1, seed=1)
    assert result.accuracy is None
    assert "12 pairs need 24 different tokens, the text has 20" in result.reason


def small(*more):
    shape = ["num_layers=2", "hidden_size=16", "num_attention_heads=4", "seq_length=16"]
    model = from_config(load([], [*shape, *more]), vocab=64).double().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4 if "position" not in name else 0.1)
    return model


def test_the_scores_of_a_gpt_are_those_of_its_logits():
    model, ids = small("pos_emb=rotary"), torch.randint(0, 64, (2, 40))
    at, targets = torch.tensor([5, 17, 39]), torch.tensor([1, 2, 3])
    correct, chances = scores_of(model)(ids, at, targets)
    logits = model(ids)[:, at]
    expected = -cross_entropy(logits.flatten(0, 1), targets.repeat(2), reduction="none").view(2, 3)
    torch.testing.assert_close(chances, expected.float())
    torch.testing.assert_close(correct, (logits.argmax(dim=2) == targets).to(correct.dtype))


def test_the_receptive_field_of_windowed_layers_is_their_windows_added_up():
    window = np.random.default_rng(0).integers(0, 64, 33)
    norms = gradient_norms(small("pos_emb=mep_free", "window=5"), torch.from_numpy(window)).flip(0)
    assert (norms[:9] > 0).all()  # two layers: 2 · (5 - 1) tokens back and the token itself
    assert (norms[9:] == 0).all()


def test_the_gradient_is_that_of_central_differences():
    model = small("pos_emb=alibi", "no_weight_tying=true")
    window = torch.randperm(64)[:13]  # every token once: its row of the embedding is its position
    weight, step = model.word_embeddings.weight.data, 1e-3
    expected = torch.zeros(12, 16, dtype=torch.float64)
    for position in range(12):
        for column in range(16):
            sides = []
            for sign in (1, -1):
                weight[window[position], column] += sign * step
                with torch.no_grad():
                    sides.append(model(window[None, :-1], window[None, 1:])[0, -1].double())
                weight[window[position], column] -= sign * step
            expected[position, column] = (sides[0] - sides[1]) / (2 * step)
    torch.testing.assert_close(
        gradient_norms(model, window), expected.norm(dim=1), rtol=5e-3, atol=1e-3
    )
    cumulative = receptive_field(model, [window.numpy()])
    shares = gradient_norms(model, window).flip(0).numpy()
    np.testing.assert_allclose(cumulative, np.cumsum(shares) / shares.sum())
    assert not model.checkpoint_activations


def test_the_field_is_the_number_of_tokens_that_hold_99_percent():
    assert receptive_field_tokens(torch.tensor([0.5, 0.98, 0.99, 1.0])) == 3
    assert receptive_field_tokens(torch.tensor([1.0])) == 1


@pytest.mark.parametrize("pos_emb", ["alibi", "kerple_log", "none", "fire"])
def test_attention_without_content_has_the_entropy_of_its_bias(pos_emb):
    model = small(f"pos_emb={pos_emb}", "pos_emb_shared=true")
    for block in model.layers:
        block.attention.query_key_value.weight.data.zero_()
        block.attention.query_key_value.bias.data.zero_()
    length, count = 300, 256  # several blocks; the first 44 queries are not looked at
    entropy, mass = attention_by_distance(
        model, [np.random.default_rng(0).integers(0, 64, length + 1)]
    )
    entropies, masses = [], []
    for query in range(length - count, length):
        logits = bias_of(model.position, query)  # [heads, query + 1] by distance
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        entropies.append(-(p * np.log(np.maximum(p, 1e-300))).sum(axis=1))
        padded = np.pad(p, ((0, 0), (0, length - query - 1)))
        masses.append(np.add.reduceat(padded, edges(length)[:-1], axis=1).mean(axis=0))
    assert edges(length) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    np.testing.assert_allclose(
        entropy, np.mean(entropies, axis=0)[None].repeat(2, axis=0), rtol=1e-4
    )
    np.testing.assert_allclose(mass, np.mean(masses, axis=0)[None].repeat(2, axis=0), atol=1e-5)


def bias_of(position, query):
    if position.has("index_bias"):
        keys = torch.arange(query + 1)
        return (
            position.index_bias(torch.tensor([query]), keys)[:, 0].flip(1).detach().double().numpy()
        )
    bias = position.distance_bias(query + 1)
    return np.zeros((4, query + 1)) if bias is None else bias.detach().double().numpy()


def test_an_encoding_that_looks_at_content_is_measured_up_to_a_length():
    model = small("pos_emb=cope", "max_position_embeddings=4096").float()
    _, mass = attention_by_distance(model, [np.random.default_rng(0).integers(0, 64, 41)])
    np.testing.assert_allclose(mass.sum(dim=1), 1, rtol=1e-5)
    with pytest.raises(UserError, match="looks at content is measured up to length 2048"):
        attention_by_distance(model, [np.zeros(2050)])
