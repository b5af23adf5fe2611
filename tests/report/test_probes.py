"""The figure of the probes of one model."""

import math

from megatron.report.figures.probes import draw_probes

LENGTHS = (64, 128)


def task(length, depth, accuracy):
    row = {"probe": "copy", "length": length, "depth": depth, "accuracy": accuracy}
    return row | {"log_probability": -1.0, "without": -1.5}


ROWS = [task(length, depth, 0.25) for length in LENGTHS for depth in (0.0, 1.0)]
ROWS[-1]["accuracy"] = None


def test_a_map_has_a_colour_bar_with_a_label_and_cells_with_numbers():
    figure = draw_probes(ROWS, "mep")
    (copy,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "copy"]
    (bar,) = [axes for axes in figure.axes if "accuracy" in axes.get_ylabel()]
    assert bar.get_ylabel() == "accuracy (in a cell: accuracy, gain in nats)"
    assert bar.get_ylim() == (0, 1)
    texts = [text.get_text() for text in copy.texts]
    assert sorted(texts) == ["0.25\n+0.50"] * 3 + ["n/a"]
    shown = copy.images[0].get_array().filled(math.nan)
    assert shown[:, 0].tolist() == [0.25, 0.25]


def test_without_a_task_there_is_no_colour_bar():
    field = {"probe": "receptive_field", "length": 64, "reach": 3}
    curve = {"distances": [0, 1, 2], "cumulative": [0.5, 0.8, 1.0]}
    mass = {"probe": "attention", "length": 64, "edges": [0, 1, 64], "mass": [[0.5, 0.5]]}
    figure = draw_probes([field | curve, mass], "mep")
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [
        "fraction of the gradient within d",
        "fraction of attention at d or further",
    ]
    assert list(figure.axes[1].lines[0].get_ydata()) == [1.0, 0.5]


def test_a_task_with_another_axis_has_it_downward_and_guess_rates_in_its_cells():
    rows = []
    for hops in (0, 3):
        row = {"probe": "variable_tracking", "length": 512, "hops": hops, "guess": 0.25}
        rows.append(row | {"accuracy": 0.5, "log_probability": -1.0, "without": -3.0})
    refused = {"accuracy": None, "guess": None, "reason": "learned positions end at 512"}
    rows.append({"probe": "variable_tracking", "length": 1024, "hops": 0} | refused)
    figure = draw_probes(rows, "mep")
    (chains,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "variable tracking"]
    assert chains.get_ylabel() == "assignments to follow"
    assert [tick.get_text() for tick in chains.get_yticklabels()] == ["0", "3"]
    texts = sorted(text.get_text() for text in chains.texts)
    assert texts == ["0.50\n(0.25)\n+2.00"] * 2 + ["n/a"] * 2
    (bar,) = [axes for axes in figure.axes if "accuracy" in axes.get_ylabel()]
    assert bar.get_ylabel() == "accuracy (in a cell: accuracy, guess rate, gain in nats)"
