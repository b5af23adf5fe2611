"""The tasks in RULER's manner, asked of rules whose accuracy is known."""

import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron.evaluation.probes.asked import measured, scored
from megatron.evaluation.probes.ruler import HOPS, TASKS
from megatron.evaluation.probes.trials import inserted
from megatron.evaluation.probes.word_lists import counts
from megatron.results.probes import AXES, RULER
from megatron.results.statistics import wilson
from tests.support import ROOT

WORDS = 600
TEXT = np.random.default_rng(0).integers(0, WORDS, 40_000)
LETTERS = TEXT % 45  # as few different tokens as a text of letters has
DEPTHS = (0.0, 0.5, 1.0)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ANSWERS = {"common_words": 4, "frequent_words": 3}
every_task = pytest.mark.parametrize("task", TASKS)
every_text = pytest.mark.parametrize("text", [TEXT, LETTERS], ids=["words", "letters"])


def asking(rule):
    """Scores of a rule: (tokens up to a target, answers among them) -> what it says."""

    def scores(ids, at, targets):
        logits = torch.zeros(len(ids), len(at), WORDS)
        for line, text in enumerate(ids.tolist()):
            for number, end in enumerate(at.tolist()):
                logits[line, number, rule(text[: end + 1], number)] = 50.0
        return scored(logits, targets)

    return scores


def ask(rule, task, length=512, *, text=TEXT, trials=2, seed=1):
    settings = {"depths": DEPTHS, "trials": trials, "seed": seed}
    return measured(asking(rule), task, TASKS[task], text, length, **settings)


# Rules that know the answer. They read nothing but the tokens.


def finds_the_key(text, _):
    question = text[-3:]
    (place,) = [i for i in range(len(text) - 3) if text[i : i + 3] == question]
    return text[place + 3]


def follows_the_chain(text, _):
    sources, name = sources_of(text), text[-1]
    while name in sources:
        name = sources[name]
    return name


def sources_of(text):
    """What each variable was set to."""
    asks, asked = text[-2:]
    context = text[: text.index(asks)]
    before = [word for word, after in pairwise(context) if after == asked]
    be = max(before, key=context.count)  # it stands in every assignment
    return {context[i + 1]: context[i + 2] for i, word in enumerate(context) if word == be}


def counts_the_list(text, answers, named):
    """The word of the current list that occurs most often and was not named."""
    words = current_list(text, answers, named)
    return max(words, key=words.count)


def current_list(text, answers, named):
    """The list without the words that were named; `answers` end the example."""
    end = len(text) - 1 - named
    mark = text[end]
    start = text.index(mark) + 1 + answers
    return [word for word in text[start:end] if word not in text[end + 1 :]]


ORACLES = {
    "multikey": finds_the_key,
    "multikey_dense": finds_the_key,
    "variable_tracking": follows_the_chain,
    "common_words": lambda text, named: counts_the_list(text, 4, named),
    "frequent_words": lambda text, named: counts_the_list(text, 3, named),
}


# Rules that know what may be an answer, and no more.


def draws_a_value(draw, text):
    cue = text[-3]
    return draw.choice([text[i + 3] for i in range(len(text) - 3) if text[i] == cue])


def draws_the_value_of_a_chain(draw, text):
    sources = sources_of(text)
    given_away = text[text.index(text[-2]) :]  # by the examples
    values = [name for name in sources.values() if name not in sources]
    return draw.choice([value for value in values if value not in given_away])


GUESSERS = {
    "multikey": lambda draw, text, _: draws_a_value(draw, text),
    "multikey_dense": lambda draw, text, _: draws_a_value(draw, text),
    "variable_tracking": lambda draw, text, _: draws_the_value_of_a_chain(draw, text),
    "common_words": lambda draw, text, named: draw.choice(current_list(text, 4, named)),
    "frequent_words": lambda draw, text, named: draw.choice(current_list(text, 3, named)),
}


def test_every_task_of_the_suite_has_a_name_in_the_results():
    assert tuple(TASKS) == RULER
    assert {name for name, task in TASKS.items() if task.places is not None} == AXES.keys()


@every_text
@every_task
def test_a_rule_that_knows_the_answer_is_always_right_and_only_by_the_context(task, text):
    for result in ask(ORACLES[task], task, text=text):
        assert result.accuracy == 1, result
        assert result.log_probability == pytest.approx(0, abs=1e-6)
        assert result.without < -30, "another context has another answer"
        assert (result.high, result.trials) == (1, 2)
        assert result.guess < 0.35


@every_task
def test_a_rule_that_draws_among_the_candidates_has_the_guess_rate(task):
    draw, trials = random.Random(3), 150
    results = ask(lambda text, n: GUESSERS[task](draw, text, n), task, 256, trials=trials)
    for result in results:
        assert (result.low, result.high) == wilson(result.accuracy, trials)
        # 99.9 %, because 18 places are asked: one of 18 intervals of 95 % may miss.
        low, high = wilson(result.accuracy, trials, level=0.999)
        assert low <= result.guess <= high
    accuracy = np.mean([result.accuracy for result in results])
    guess = np.mean([result.guess for result in results])
    error = np.sqrt(guess * (1 - guess) / (trials * len(results)))
    assert abs(accuracy - guess) < 3 * error


@every_task
def test_a_model_without_preferences_has_the_accuracy_of_chance(task):
    def no_preference(ids, at, targets):
        return scored(torch.zeros(len(ids), len(at), WORDS), targets)

    results = measured(no_preference, task, TASKS[task], TEXT, 512, depths=DEPTHS, trials=2, seed=1)
    right = [4, 3, 2, 1] if task == "common_words" else [1] * len(results)
    for result, choices in zip(results, right, strict=True):
        assert result.accuracy == pytest.approx(choices / WORDS)
        assert result.chance == pytest.approx(choices / WORDS)
        assert result.log_probability == pytest.approx(np.log(choices / WORDS), rel=1e-6)


@every_text
@pytest.mark.parametrize("length", LENGTHS)
@every_task
def test_contexts_have_the_length_asked_for_and_differ_in_the_answers_alone(task, length, text):
    places = TASKS[task].places or DEPTHS
    cells = []
    for trial in TASKS[task].trials(np.random.default_rng(4), text, length, places):
        context, other = trial.ids
        assert trial.ids.shape == (2, length)
        assert trial.at[-1] == length - 1
        cells += trial.cell.tolist()
        assert (context[trial.at] == other[trial.at]).all(), "the question is the same"
        changed = {*context[context != other]}
        assert {*trial.targets.ravel()} - {-1} <= changed
        assert {*context} <= {*text}, "every token is one of the text"
    assert cells == [*range(len(places))]


@every_task
def test_a_seed_gives_the_same_questions_and_another_seed_others(task):
    seen = {1: [], 2: []}

    def remembering(seed):
        def scores(ids, at, targets):
            seen[seed].append(ids.tolist())
            return scored(torch.zeros(2, len(at), WORDS), targets)

        return scores

    for seed in (1, 1, 2):
        settings = {"depths": DEPTHS, "trials": 2, "seed": seed}
        measured(remembering(seed), task, TASKS[task], TEXT, 512, **settings)
    half = len(seen[1]) // 2
    assert seen[1][:half] == seen[1][half:]
    assert seen[1][0] != seen[1][half - 1], "trials differ"
    assert not any(ids in seen[1] for ids in seen[2])


def test_a_rule_that_reads_the_last_token_of_the_key_alone_is_right_by_half():
    draw = random.Random(3)

    def half_a_key(text, _):
        cue, last = text[-3], text[-1]
        fitting = [
            text[i + 3] for i in range(len(text) - 3) if (text[i], text[i + 2]) == (cue, last)
        ]
        assert len(fitting) == 2
        return draw.choice(fitting)

    for result in ask(half_a_key, "multikey", trials=100):
        assert result.low < 0.5 < result.high
        assert result.guess == 0.25


def test_a_rule_that_repeats_what_stood_behind_the_variable_follows_no_chain():
    def one_step(text, _):
        return sources_of(text)[text[-1]]

    accuracies = [result.accuracy for result in ask(one_step, "variable_tracking")]
    assert accuracies == [1] + [0] * HOPS


def test_needles_stand_at_their_depth():
    multikey = TASKS["multikey"].trials
    first, middle, last = multikey(np.random.default_rng(4), TEXT, 512, DEPTHS)
    for trial, start in ((first, 0), (last, 512 - 3 - 4)):
        np.testing.assert_array_equal(trial.ids[0, start : start + 3], trial.ids[0, -3:])
    ids = middle.ids[0].tolist()
    (place,) = [i for i in range(509) if ids[i : i + 3] == ids[-3:]]
    assert abs(place - 254) < 12


def test_dense_needles_fill_the_context():
    (trial,) = TASKS["multikey_dense"].trials(np.random.default_rng(4), TEXT, 512, [0.5])
    cue = trial.ids[0, -3]
    assert Counter(trial.ids[0].tolist())[cue] == (512 - 3) // 4 + 1
    (few,) = TASKS["multikey_dense"].trials(np.random.default_rng(4), LETTERS, 4096, [0.5])
    cue = few.ids[0, -3]
    assert Counter(few.ids[0].tolist())[cue] == (45 // 4) ** 2 + 1, "a square of 11 tokens"


def test_every_chain_is_five_assignments_in_their_order():
    trials = TASKS["variable_tracking"].trials(np.random.default_rng(4), TEXT, 512, [HOPS])
    (trial,) = trials
    text = trial.ids[0].tolist()
    sources, known = sources_of(text), set()
    assert len(sources) == 6 * 5
    values = {*sources.values()} - sources.keys()
    assert len(values) == 6
    for variable, source in sources.items():  # in the order of the text
        assert source in known | values
        known.add(variable)


def test_counts_add_up_and_are_in_proportion():
    assert counts(np.array([6.0, 1, 1]), 16).tolist() == [12, 2, 2]
    assert counts(np.array([6.0, 1, 1]), 17).tolist() == [13, 2, 2]
    assert counts(1 / np.arange(1, 4), 11).tolist() == [6, 3, 2]


def test_pieces_are_inserted_before_the_tokens_that_follow_their_spots():
    pieces = np.array([[-1, -2], [-3, -4], [-5, -6]])
    ids = inserted(np.array([1, 2, 3]), pieces, np.array([0, 2, 3]))
    assert ids.tolist() == [-1, -2, 1, 2, -3, -4, 3, -5, -6]


@pytest.mark.parametrize(
    ("task", "text", "length", "reason"),
    [
        ("multikey", TEXT % 8, 512, "multikey needs 9 different tokens, the text has 8 - give an"),
        (
            "variable_tracking",
            LETTERS,
            90,
            "variable_tracking needs 39 different tokens, the text has 45, and a length of 98 or"
            " more - give another text or longer lengths",
        ),
        (
            "common_words",
            TEXT % 40,
            512,
            "common_words needs 41 different tokens, the text has 40, and a length of 512 or more",
        ),
        ("common_words", TEXT, 120, "and a length of 153 or more"),
        ("frequent_words", TEXT, 90, "and a length of 103 or more"),
    ],
)
def test_what_cannot_be_asked_is_a_reason_at_every_place(task, text, length, reason):
    results = ask(ORACLES[task], task, length, text=text)
    assert len(results) == len(TASKS[task].places or DEPTHS)
    for result in results:
        assert result.accuracy is None
        assert result.guess is None
        assert reason in result.reason


def test_any_of_several_right_tokens_counts_and_a_tie_is_shared():
    logits = torch.tensor([[[2.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]])
    targets = torch.tensor([[1, 3], [1, -1]])
    correct, log_probability = scored(logits, targets)
    torch.testing.assert_close(correct, torch.tensor([[0.5, 1.0]]))
    p = logits.softmax(dim=2)[0]
    expected = torch.stack([p[0, 1] + p[0, 3], p[1, 1]]).log()[None]
    torch.testing.assert_close(log_probability, expected)


def test_the_documentation_says_what_every_task_needs():
    page = " ".join((ROOT / "docs/evaluation.md").read_text(encoding="utf-8").split())
    (tokens,) = re.findall(r"The tasks need ([\d, and]+) different tokens", page)
    (lengths,) = re.findall(r"`frequent_words` a length of ([\d, and]+)\.", page)
    needed = dict(zip(RULER, map(int, re.findall(r"\d+", tokens)), strict=True))
    shortest = dict(zip(RULER[2:], map(int, re.findall(r"\d+", lengths)), strict=True))
    for task, count in needed.items():
        assert f"| `{task}` |" in page
        assert ask(ORACLES[task], task, text=TEXT % count)[0].accuracy == 1
        assert ask(ORACLES[task], task, text=TEXT % (count - 1))[0].reason
    for task, length in shortest.items():
        assert ask(ORACLES[task], task, length)[0].accuracy == 1
        assert ask(ORACLES[task], task, length - 1)[0].reason
