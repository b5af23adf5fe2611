"""What `generation_kwargs` of a task ask for, and what they ask for in vain."""

import math

import pytest

from megatron.errors import UserError
from megatron.generation.sampling import Sampling
from megatron.harness.wanted import Wanted, wanted_by


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, Sampling(temperature=0.0)),
        ({"temperature": 0.7}, Sampling(temperature=0.7)),
        ({"do_sample": False, "temperature": 0.7}, Sampling(temperature=0.0)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        (
            {"do_sample": True, "temperature": "0.5", "top_k": 3, "top_p": 0.9},
            Sampling(temperature=0.5, top_k=3, top_p=0.9),
        ),
        ({"repetition_penalty": 1.2}, Sampling(temperature=0.0, repetition_penalty=1.2)),
    ],
)
def test_how_tokens_are_chosen(settings, sampling):
    assert wanted_by(settings).sampling == sampling


def test_lengths_and_stops_have_the_names_that_other_libraries_give_them():
    assert wanted_by({}) == Wanted(Sampling(temperature=0.0), 256, [])
    found = wanted_by({"until": "Q:", "max_new_tokens": 5})
    assert (found.most, found.stops) == (5, ["Q:"])
    assert wanted_by({"until": ["a", "", None]}).stops == ["a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, " name num_beams, which is not offered - leave it out; known are do_"),
        ({"max_gen_toks": "many"}, " hold what is no number (invalid literal for int() with base"),
        ({"max_gen_toks": math.inf}, " hold what is no number (cannot convert float infinity"),
        ({"top_k": [1], "do_sample": True}, " hold what is no number (int() argument must be"),
        ({"max_gen_toks": 0}, ": max_gen_toks 0 - give a whole number of 1 to 16777216"),
        ({"max_gen_toks": 10**20}, f": max_gen_toks {10**20} - give a whole number of 1 to"),
        ({"do_sample": "no"}, ": do_sample 'no' - give true or false"),
        ({"until": [5]}, ": until [5] - give strings, in quotes"),
        ({"do_sample": True, "top_k": 0}, ": --top-k 0: give a number of tokens of at least 1"),
        ({"temperature": math.nan, "do_sample": True}, ": --temperature nan: give 0 for the"),
    ],
)
def test_what_a_task_asks_for_in_vain_is_one_message(settings, message):
    with pytest.raises(UserError) as fault:
        wanted_by(settings)
    assert str(fault.value).startswith(f"--tasks: generation_kwargs of a task{message}")
