import html
import itertools
import math
import re

import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from megatron.errors import UserError
from megatron.positions import REGISTRY
from megatron.report.curves import (
    LOOKS,
    draw_accuracy,
    draw_by_position,
    draw_over_training,
    draw_perplexity,
    looks,
    plot_results,
    write,
)
from megatron.report.page import page_of_rows
from megatron.results.labels import kinds, runs
from megatron.results.row import by_text
from tests.results.rows import answers, rows

ROWS = [
    *rows("mep_free", {512: 12.3, 1024: 12.1, 2048: 12.0}),
    *rows("rotary", {512: 12.4, 1024: 80.0, 2048: 900.0}),
    *rows("learned", {512: 13.0, 1024: None, 2048: None}),
]


def words(path):
    """The texts of an SVG."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
    return [html.unescape(text).strip() for text in texts]


def test_the_picture_names_curves_with_their_last_values_lengths_and_training_length(tmp_path):
    plot_results(ROWS, tmp_path / "curves.svg", title="Perplexity of three")
    shown = words(tmp_path / "curves.svg")
    labels = ["rotary: 900.0", "learned: 13.00 at 512", "mep_free: 12.00"]
    assert [text for text in shown if text in labels] == labels
    assert {"Perplexity of three", "512", "1024", "2048", "perplexity, log scale"} <= {*shown}
    assert "evaluation length (tokens); dashed: training length 512" in shown
    assert any(text.startswith("stdlib valid") for text in shown)
    with pytest.raises(UserError, match=r"is written as .png, .svg or .pdf"):
        plot_results(ROWS, tmp_path / "curves.txt")


NAMES = ["mep_free", "kerple_bias_2para", *["rotary"] * 13, "t5", "fire", "alibi", "tanh", "xpos"]


@pytest.mark.parametrize("count", [2, 8, 20])
def test_no_text_is_cut_or_covered_and_each_curve_has_a_look_of_its_own(count, monkeypatch):
    measured = []
    for corpus in ("stdlib", "a corpus whose name is so long that no line has room for it"):
        for number, name in enumerate(NAMES[:count]):
            curve = dict.fromkeys([2**power for power in range(6, 21)], 10.0 + number)
            method = f"yarn,factor={number}" * number if name == "rotary" else None
            measured += rows(name, curve, corpus=corpus, method=method)
    texts = map(runs, by_text(measured))
    figure = draw_perplexity(*texts, title="Longer than the figure is wide " * 4)

    drawn = []
    monkeypatch.setattr(Text, "draw", lambda text, _: drawn.append(text))
    figure.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    boxes = [(text.get_window_extent(), text) for text in shown]
    for number, (box, text) in enumerate(boxes):
        assert Bbox.intersection(box, figure.bbox).bounds == box.bounds, text
        assert not [other for place, other in boxes[:number] if box.overlaps(place)], text
    for axes in figure.axes:
        assert axes.bbox.height > 200, "a long legend takes nothing of the axes"
        curves = axes.get_legend_handles_labels()[0]
        assert len({(curve.get_color(), curve.get_linestyle()) for curve in curves}) == count
        assert len({curve.get_color() for curve in curves}) == min(count, 8)


def test_a_picture_over_training_has_lengths_as_curves_of_one_run_and_as_panels_of_many(tmp_path):
    """As a run with stages writes them: its window and options change, its hash does not."""
    measured = []
    for seed, shift in ((1234, 0.0), (1235, 2.0)):
        for step, facts in ((100, {"window": 64}), (200, {}), (400, {"pos_emb_args": {"base": 5}})):
            numbers = {512: 10 + shift, 2048: 1000 / step + shift}
            grown = {"step": step, "seed": seed, "config_hash": f"{seed}", **facts}
            measured += rows("rotary", numbers, **grown)
    shorter, longer = [[100, 11], [200, 11], [400, 11]], [[100, 11], [200, 6], [400, 3.5]]
    figure = draw_over_training(measured[::-1], over_seeds=True)
    write(figure, tmp_path / "a.svg")
    assert "step of rotary" in words(tmp_path / "a.svg")
    [axes] = figure.axes
    assert axes.get_xscale() == "linear"
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {"512 tokens: 11.00": shorter, "2048 tokens: 3.50": longer}

    measured += rows("alibi", {512: 11.0}, step=400, config_hash="0123")
    panels = {}
    for axes in draw_over_training(measured[::-1], over_seeds=True).axes:
        curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        panels[axes.get_xlabel()] = curves
    assert panels == {
        "step, at 512 tokens": {"rotary: 11.00": shorter, "alibi: 11.00": [[400, 11]]},
        "step, at 2048 tokens": {"rotary: 3.50": longer},
    }
    each = draw_over_training(measured)
    assert [len(axes.lines) for axes in each.axes] == [3, 2]
    twice = [*measured, *rows("alibi", {512: 12.0}, step=400, config_hash="0123", window=64)]
    with pytest.raises(UserError, match="alibi: two rows of step 400 at 512 - give the rows of"):
        draw_over_training(twice)


def test_a_pass_by_position_is_drawn_as_the_difference_from_an_encoding(tmp_path):
    row = ROWS[0] | {"position_edges": [0, 1, 256, 512], "position_losses": [0.0, 3.0, 2.0]}
    other = row | {"window": 256, "position_losses": [0.0, 3.0, 2.5]}
    reference = "mep_free"
    write(draw_by_position(runs([row, other]), reference), tmp_path / "two.svg")
    shown = words(tmp_path / "two.svg")
    assert {f"{reference}: 0.00", "mep_free, window 256: 0.50"} <= {*shown}
    assert {f"Loss minus that of {reference}", "difference in loss (nats per token)"} <= {*shown}


@pytest.mark.parametrize(
    "name", ["$$", "$\\frac{", "_mine", "a_b^c\\d", "<script>", "{x}", "%s", "a & b"]
)
def test_a_name_is_drawn_as_it_is_written(name, tmp_path):
    texts, tasks = rows(name, {512: 12.0, 1024: 10.0}), answers(name, {512: 0.5})
    for measured, label in ((texts, f"{name}: 10.00"), (tasks, name)):
        plot_results(measured, tmp_path / "one.svg", title=f"Of {name}")
        assert {f"Of {name}", label} <= {*words(tmp_path / "one.svg")}
    page = page_of_rows(texts + tasks).html(name)
    assert f'equal_tokens; perplexity; {name}: 10.00"' in html.unescape(page), "it is spoken"


@pytest.mark.parametrize("protocol", ["paper", "position", "tail"])
def test_no_line_joins_lengths_of_different_texts(protocol):
    seeds = rows("t5", {512: 12.0, 1024: 9.0}, seed=1) + rows("t5", {512: 10.0, 1024: 8.0}, seed=2)
    other = rows("rotary", {512: 12.0, 1024: 9.0}, seed=1)
    (axes,) = draw_perplexity(kinds([row | {"protocol": protocol} for row in seeds + other])).axes
    curves = [line for line in axes.lines if line.get_marker() != "None"]
    assert [line.get_xdata().tolist() for line in curves] == [[512, 1024]] * 2
    assert {line.get_linestyle() for line in curves} == {"-" if protocol == "tail" else "None"}
    highest = max(y for _, y in axes.collections[0].get_paths()[0].vertices)
    assert highest == pytest.approx(11 + math.sqrt(2))


def test_a_mean_over_seeds_has_a_band_and_every_length_needs_all_seeds():
    seeds = rows("t5", {512: 12.0, 1024: 9.0, 2048: None}, seed=1)
    seeds += rows("t5", {512: 10.0, 1024: 9.0, 2048: 7.0}, seed=2)
    (axes,) = draw_perplexity({"t5": seeds}).axes
    line = next(line for line in axes.lines if line.get_label().startswith("t5"))
    assert line.get_xydata().tolist() == [[512, 11.0], [1024, 9.0]]
    (band,) = axes.collections
    top = max(y for _, y in band.get_paths()[0].vertices)
    assert top == pytest.approx(11 + math.sqrt(2))


# --- The heatmap of tasks ---


def test_a_heatmap_has_a_panel_for_each_task_with_the_mean_and_the_spread_of_every_cell(tmp_path):
    tasks = answers("rotary", {512: 1.0, 1024: 0.5}, seed=1)
    tasks += answers("rotary", {512: 1.0, 1024: 0.4}, seed=2)
    tasks += answers("learned", {512: 0.973, 1024: None, 2048: 0.0}, reason="it ends")
    tasks += answers("none", {512: 0.6, 1024: 0.5}, corpus="task:parity")
    plot_results(tasks, tmp_path / "map.svg", over_seeds=True)
    shown = words(tmp_path / "map.svg")
    headings = {"Token accuracy beyond the training length", "copy", "parity (guessing: 50 %)"}
    assert headings <= {*shown}
    assert any("mean ± standard deviation over seeds" in text for text in shown)
    cells = [text for text in shown if re.fullmatch(r"n/a|\d+(\*|±\d+)?", text)]
    copying = ["100±0", "45±7", "97", "n/a", "0"]
    assert cells == ["512*", "1024", "2048", *copying, "512*", "1024", "60", "50"]
    with pytest.raises(UserError, match="tasks and texts have no common plot"):
        plot_results([*tasks, *ROWS], tmp_path / "both.svg")


@pytest.mark.parametrize(("task", "title"), [("flip_flop", "Accuracy beyond"), ("copy", "")])
def test_no_heading_of_a_narrow_heatmap_is_cut(task, title):
    groups = kinds(answers("t5", {512: 0.6}, corpus=f"task:{task}"))
    figure = draw_accuracy({f"task:{task}": groups}, title)
    figure.draw_without_rendering()
    for text in figure.findobj(lambda text: isinstance(text, Text) and text.get_in_layout()):
        box = text.get_window_extent()
        if text.get_text():
            assert Bbox.intersection(box, figure.bbox).bounds == box.bounds, text


def luminance(colour):
    """The relative luminance of WCAG 2."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_the_cells_of_a_heatmap_darken_with_accuracy_and_their_numbers_stand_out():
    shares = {length: number / 100 for number, length in enumerate(range(512, 613))}
    figure = draw_accuracy({"task:copy": kinds(answers("alibi", shares))})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (cells,) = axes.collections
    grounds = [luminance(colour) for colour in cells.get_facecolor()]
    assert len(grounds) == 101
    assert grounds == sorted(grounds, reverse=True)
    inks = [luminance(text.get_color()) for text in axes.texts if text.get_text()]
    for ground, ink in zip(grounds, inks, strict=True):
        darker, lighter = sorted((ground, ink))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, "the contrast that WCAG asks for"


def test_fourteen_encodings_at_six_lengths_stay_readable():
    tasks = []
    for number, name in enumerate([*NAMES[:14], "rotary"]):
        for seed, shares in enumerate([(1.0, 0.09), (0.7, 0.0)]):
            lengths = {512 * 2**power: shares[power % 2] for power in range(6)}
            tasks += answers(name, lengths, seed=seed, pos_emb_args={"percent": number})
    figure = draw_accuracy({"copy": kinds(tasks), "parity": kinds(tasks)}, "Accuracy")
    figure.draw_without_rendering()
    for axes in figure.axes:
        cells = [text for text in axes.texts if text.get_text()]
        assert len(cells) == 15 * 6
        for text in cells:
            column, line = text.get_position()
            corners = [(column - 0.5, line + 0.5), (column + 0.5, line - 0.5)]
            cell = Bbox(axes.transData.transform(corners))
            box = text.get_window_extent()
            assert Bbox.intersection(box, cell).bounds == pytest.approx(box.bounds), text
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert not any(box.overlaps(above) for above, box in itertools.pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0


def test_the_look_of_an_encoding_is_its_own_in_every_figure():
    assert {*LOOKS} <= {*REGISTRY}
    assert len({*map(tuple, LOOKS.values())}) == len(LOOKS)
    names = ["rotary", "bump", "mep_free"]  # a new encoding needs no line there
    assert looks(names) == [looks([name])[0] for name in names]
    assert looks(["rotary", "rotary", "t5"])[-1] == looks(["t5"])[0], "its colour is not taken"
