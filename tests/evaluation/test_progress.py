"""Where stderr is no terminal: a line for each finished length, and the time left of a long one."""

import logging

import pytest

from megatron.evaluation.progress import Bars, Lines, bars_on, duration, progress


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="megatron")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_finished_length_has_one_line_with_its_perplexity(lines):
    display = Lines("tail", Clock())
    row = {"length": 512, "perplexity": 30.125, "windows": 640, "seconds": 12.3}
    display.advance(512, 0, 640)
    display.advance(512, 640, 640)
    display.done(row, kept=False)
    display.done(row | {"length": 1024}, kept=True)
    display.done(row | {"perplexity": None, "reason": "positions end at 64"}, kept=False)
    assert lines() == [
        "tail 512: perplexity 30.12, 640 windows, 12 s",
        "tail 1024: perplexity 30.12, 640 windows, kept from an earlier call",
        "tail 512: no perplexity (positions end at 64), 640 windows, 12 s",
    ]


def test_a_long_length_says_every_half_minute_how_far_it_is(lines):
    clock = Clock()
    display = Lines("equal_tokens", clock)
    display.advance(16384, 0, 20)
    for finished in range(1, 21):
        clock.now += 18
        display.advance(16384, finished, 20)
    assert (
        lines()[0] == "equal_tokens 16384: 2 of 20 windows, about 5 min left"
    )  # 18 windows of 18 s
    assert len(lines()) == 9  # every second window; none with the last, which has its own line
    assert lines()[-1] == "equal_tokens 16384: 18 of 20 windows, about 36 s left"


def test_the_time_left_is_that_of_the_recent_speed(lines):
    clock = Clock()
    display = Lines("equal_tokens", clock)
    display.advance(64, 0, 1000)
    clock.now += 600  # a slow start
    display.advance(64, 1, 1000)
    for finished in range(2, 200):
        clock.now += 1
        display.advance(64, finished, 1000)
    assert lines()[-1].endswith("about 14 min left")  # 820 windows, one a second


def test_lengths_that_an_earlier_call_had_begun_count_only_their_own_windows(lines):
    clock = Clock()
    display = Lines("equal_tokens", clock)
    display.advance(64, 900, 1000)
    clock.now += 40
    display.advance(64, 910, 1000)
    assert lines() == ["equal_tokens 64: 910 of 1000 windows, about 6 min left"]


def test_on_a_terminal_there_are_bars_and_no_lines(lines):
    from rich.console import Console

    console = Console(force_terminal=True, quiet=True)
    with bars_on(console) as bars:
        display = Bars("tail", bars)
        display.advance(512, 0, 4)
        display.advance(512, 3, 4)
        (task,) = bars.tasks
        assert (task.description, task.completed, task.total) == ("tail 512", 3, 4)
        display.done({"length": 512, "perplexity": 3.0, "windows": 4}, kept=False)
    assert lines() == []


def test_only_the_first_process_shows_anything(lines):
    with progress("tail", shown=False) as display:
        display.advance(512, 0, 4)
        display.done({"length": 512, "perplexity": 3.0, "windows": 4}, kept=False)
    assert lines() == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (99, "99 s"),
        (100, "2 min"),
        (7140, "119 min"),
        (11100, "3 h 05 min"),
    ],
)
def test_a_duration_is_short(seconds, text):
    assert duration(seconds) == text
