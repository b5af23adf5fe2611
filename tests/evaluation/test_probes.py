"""Probes of models and rules whose answers are known."""

import hashlib

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.attention_probes import (
    attention_by_distance,
    edges,
    receptive_field,
)
from megatron.evaluation.probe_checkpoint import ProbeOptions, asked, scored, scores_of
from megatron.evaluation.probe_tasks import TASKS, Material
from megatron.model import from_config
from megatron.results.probes import RETRIEVAL, RULER
from megatron.results.statistics import wilson

WORDS = 600
TEXT = np.random.default_rng(0).integers(0, WORDS, 40_000)
DEPTHS = (0.0, 0.5, 1.0)
QUESTIONS = {
    "passkey": "70db0a3f",
    "copy": "5d297bbf",
    "recall": "557b58f6",
    "multikey": "56484d41",
    "multikey_dense": "5a0c6536",
    "variable_tracking": "0a079423",
    "common_words": "f518e531",
    "frequent_words": "cafe2e7a",
}  # of the seed 4
GUESSES = {
    "multikey": [0.25] * 3,
    "multikey_dense": [0.00787] * 3,
    "variable_tracking": [0.25] * 5,
    "common_words": [0.33407, 0.27338, 0.20053, 0.11144],
    "frequent_words": [0.29598, 0.21021, 0.17871],
}  # rates that drawing among the candidates had too, in 150 trials


def ask(scores, task, length=512, *, text=TEXT):
    return asked(scores, task, text, length, ProbeOptions(depths=3, trials=2, probe_seed=1))


def no_preference(ids, at, targets):
    return scored(torch.zeros(len(ids), len(at), WORDS), targets)


def copies(ids, at, targets):
    """Scores of a model that continues as the longest earlier repetition of the end went on."""
    logits = torch.zeros(len(ids), len(at), WORDS)
    for line, number in np.ndindex(len(ids), len(at)):
        *earlier, end = range(int(at[number]) + 1)
        text = ids[line].tolist()

        def matching(other, end=end, text=text):
            count = 0
            while other - count >= 0 and text[other - count] == text[end - count]:
                count += 1
            return count

        logits[line, number, text[max(earlier, key=matching) + 1]] = 50.0
    return scored(logits, targets)


def test_a_rule_that_knows_the_answer_is_always_right_and_only_by_the_context():
    # Repetitions are found by their length, so the text must have many words.
    words = np.random.default_rng(0).permutation(WORDS)
    for task in RETRIEVAL:
        for result in ask(copies, task, 128, text=words):
            assert result["accuracy"] == 1, result
            assert result["log_probability"] == pytest.approx(0, abs=1e-6)
            assert result["without"] < -30, "another context has another answer"
            assert (result["low"], result["high"]) == wilson(1, 2)


def test_a_model_without_preferences_has_the_accuracy_of_chance():
    for task in TASKS:
        results = ask(no_preference, task)
        right = [4, 3, 2, 1] if task == "common_words" else [1] * len(results)
        words = len(np.unique(TEXT))
        for result, choices in zip(results, right, strict=True):
            assert result["accuracy"] == pytest.approx(choices / WORDS)
            assert result["chance"] == pytest.approx(choices / words)
            assert result["log_probability"] == pytest.approx(np.log(choices / WORDS), rel=1e-6)


def trials(task, seed):
    material = Material(np.random.default_rng(seed), TEXT, 512, TASKS[task].places or DEPTHS)
    return list(TASKS[task].trials(material))


def digits(task, seed):
    """The contexts and answers of one trial at 512 tokens, as 8 hex digits."""
    digest = hashlib.sha256()
    for trial in trials(task, seed):
        assert trial.ids.shape == (2, 512)
        for array in (trial.ids, trial.at, trial.targets, trial.cell):
            digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()[:8]


def test_a_seed_asks_the_questions_of_the_rows_that_were_measured_so_far():
    assert {task: digits(task, seed=4) for task in TASKS} == QUESTIONS
    assert all(digits(task, seed=5) != question for task, question in QUESTIONS.items())
    for task, rates in GUESSES.items():
        guesses = np.hstack([trial.guess for trial in trials(task, 4)])
        np.testing.assert_allclose(guesses, rates, atol=1e-5)


def test_any_of_several_right_tokens_counts_and_a_tie_is_shared():
    logits = torch.tensor([[[2.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]])
    targets = torch.tensor([[1, 3], [1, -1]])
    correct, log_probability = scored(logits, targets)
    torch.testing.assert_close(correct, torch.tensor([[0.5, 1.0]]))
    p = logits.softmax(dim=2)[0]
    expected = torch.stack([p[0, 1] + p[0, 3], p[1, 1]]).log()[None]
    torch.testing.assert_close(log_probability, expected)


def test_what_a_text_cannot_give_is_a_reason():
    # As docs/evaluation.md says: different tokens, and tokens of the context.
    needed = dict(zip(RULER, (9, 9, 39, 41, 33), strict=True))
    for task, count in needed.items():
        assert ask(no_preference, task, text=TEXT % count)[0]["reason"] is None
        for result in ask(no_preference, task, text=TEXT % (count - 1)):
            assert (result["accuracy"], result["guess"]) == (None, None)
            assert f"needs {count} different tokens, the text has {count - 1}" in result["reason"]
    for task, length in zip(RULER[2:], (98, 153, 103), strict=True):
        assert ask(no_preference, task, length)[0]["reason"] is None
        assert f"a length of {length} or more" in ask(no_preference, task, length - 1)[0]["reason"]
    with pytest.raises(UserError, match=r"--lengths: 16 is too short for copy - give 48 or more"):
        ask(no_preference, "copy", 16)


# --- Models ---


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


def test_the_gradient_is_that_of_central_differences():
    model = small("pos_emb=alibi", "no_weight_tying=true")
    window = torch.randperm(64)[:13]  # every token once: its row of the embedding is its position
    weight, step = model.word_embeddings.weight.data, 1e-3
    expected = torch.zeros(12, 16, dtype=torch.float64)
    for position, column in np.ndindex(12, 16):
        sides = []
        for sign in (1, -1):
            weight[window[position], column] += sign * step
            with torch.no_grad():
                sides.append(model(window[None, :-1], window[None, 1:])[0, -1].double())
            weight[window[position], column] -= sign * step
        expected[position, column] = (sides[0] - sides[1]) / (2 * step)
    cumulative = receptive_field(model, [window.numpy()])
    shares = expected.norm(dim=1).flip(0).cumsum(0)
    torch.testing.assert_close(cumulative, shares / shares[-1], rtol=5e-3, atol=1e-3)
    assert not model.checkpoint_activations


def test_attention_without_content_has_the_entropy_of_its_bias():
    model = small("pos_emb=alibi", "pos_emb_shared=true")
    for block in model.layers:
        block.attention.query_key_value.weight.data.zero_()
        block.attention.query_key_value.bias.data.zero_()
    length, count = 300, 256  # several blocks; the first 44 queries are not looked at
    window = np.random.default_rng(0).integers(0, 64, length + 1)
    entropy, mass = attention_by_distance(model, [window])
    entropies, masses = [], []
    for query in range(length - count, length):
        bias = model.position.distance_bias(query + 1).detach().double()  # [heads, query + 1]
        p = bias.softmax(dim=1).numpy()
        entropies.append(-(p * np.log(np.maximum(p, 1e-300))).sum(axis=1))
        padded = np.pad(p, ((0, 0), (0, length - query - 1)))
        masses.append(np.add.reduceat(padded, edges(length)[:-1], axis=1).mean(axis=0))
    assert edges(length) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    for layer in range(2):
        np.testing.assert_allclose(entropy[layer], np.mean(entropies, axis=0), rtol=1e-4)
        np.testing.assert_allclose(mass[layer], np.mean(masses, axis=0), atol=1e-5)


def test_attention_of_an_encoding_that_looks_at_content_is_measured_up_to_a_length():
    model = small("pos_emb=cope", "max_position_embeddings=4096").float()
    _, mass = attention_by_distance(model, [np.random.default_rng(0).integers(0, 64, 41)])
    np.testing.assert_allclose(mass.sum(dim=1), 1, rtol=1e-5)
    with pytest.raises(UserError, match="looks at content is measured up to length 2048"):
        attention_by_distance(model, [np.zeros(2050)])
