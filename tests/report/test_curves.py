import html
import math
import re

import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from megatron.errors import UserError
from megatron.positions import REGISTRY
from megatron.report.curves import (
    LOOKS,
    draw_by_position,
    draw_over_training,
    draw_perplexity,
    looks,
    plot_results,
    write,
)
from megatron.results.labels import kinds, runs
from megatron.results.row import by_text
from tests.results.rows import answers, rows

ROWS = [
    *rows("mep_free", {512: 12.3, 1024: 12.1, 2048: 12.0}),
    *rows("rotary", {512: 12.4, 1024: 80.0, 2048: 900.0}),
    *rows("learned", {512: 13.0, 1024: None, 2048: None}),
    *rows("t5", {512: None}),
]


def words(path):
    """The texts of an SVG."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
    return [html.unescape(text).strip() for text in texts]


def curves_of(axes):
    """The points of each curve, by the text of its legend."""
    points = {}
    for curve in axes.containers:
        line, _, _ = curve.lines
        points[curve.get_label()] = line.get_xydata().tolist()
    return points


def test_the_picture_names_curves_with_their_last_values_lengths_and_training_length(tmp_path):
    figure = draw_perplexity(runs(ROWS), title="Perplexity of $$ \\frac{ <b>")
    write(figure, tmp_path / "curves.svg")
    shown = words(tmp_path / "curves.svg")
    labels = ["rotary: 900.0", "learned: 13.00 at 512", "mep_free: 12.00"]
    assert [text for text in shown if text in labels] == labels
    assert {"Perplexity of $$ \\frac{ <b>", "512", "1024", "2048"} <= {*shown}
    assert "evaluation length (tokens); dashed: training length 512" in shown
    assert "perplexity at the right end; not drawn: t5" in shown
    with pytest.raises(UserError, match=r"is written as .png, .svg or .pdf"):
        plot_results(ROWS, tmp_path / "curves.txt")


NAMES = ["mep_free", "kerple_bias_2para", *["rotary"] * 3, "t5", "fire", "alibi", "tanh", "xpos"]


def texts_of(figure, monkeypatch):
    """The texts that are drawn, each with its box."""
    drawn = []
    monkeypatch.setattr(Text, "draw", lambda text, _: drawn.append(text))
    figure.draw_without_rendering()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    return [(text.get_window_extent(), text) for text in shown]


def test_no_text_is_cut_or_covered_and_each_curve_has_a_look_of_its_own(monkeypatch):
    measured = []
    for number, name in enumerate(NAMES):
        curve = dict.fromkeys([2**power for power in range(6, 16)], 10.0 + number)
        method = f"yarn,factor={number}" * number if name == "rotary" else None
        measured += rows(name, curve, method=method)
    figure = draw_perplexity(*map(runs, by_text(measured)), title="Longer than the figure " * 6)
    boxes = texts_of(figure, monkeypatch)
    for number, (box, text) in enumerate(boxes):
        assert Bbox.intersection(box, figure.bbox).bounds == box.bounds, text
        assert not [other for place, other in boxes[:number] if box.overlaps(place)], text
    (axes,) = figure.axes
    assert axes.bbox.height > 200, "a long legend takes nothing of the axes"
    lines = [curve.lines[0] for curve in axes.containers]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(NAMES)


def test_a_picture_over_training_has_a_panel_for_each_length():
    """As a run with stages writes them: its window and options change, its hash does not."""
    measured = []
    for seed, shift in ((1234, 0.0), (1235, 2.0)):
        for step, facts in ((100, {"window": 64}), (200, {}), (400, {"pos_emb_args": {"base": 5}})):
            numbers = {512: 10 + shift, 2048: 1000 / step + shift}
            grown = {"step": step, "seed": seed, "config_hash": f"{seed}", **facts}
            measured += rows("rotary", numbers, **grown)
    shorter, longer = [[100, 11], [200, 11], [400, 11]], [[100, 11], [200, 6], [400, 3.5]]
    measured += rows("alibi", {512: 11.0}, step=400, config_hash="0123")
    figure = draw_over_training(measured[::-1], over_seeds=True)
    assert figure.axes[0].get_xscale() == "linear"
    assert {axes.get_xlabel(): curves_of(axes) for axes in figure.axes} == {
        "step, at 512 tokens": {"rotary: 11.00": shorter, "alibi: 11.00": [[400, 11]]},
        "step, at 2048 tokens": {"rotary: 3.50": longer},
    }


def test_a_pass_by_position_is_drawn_as_the_difference_from_an_encoding(tmp_path):
    row = ROWS[0] | {"position_edges": [0, 1, 256, 512], "position_losses": [0.0, 3.0, 2.0]}
    other = row | {"window": 256, "position_losses": [0.0, 3.0, 2.5]}
    (axes,) = draw_by_position(runs([row, other]), minus="mep_free").axes
    curves = curves_of(axes)
    assert curves.keys() == {"mep_free: 0.00", "mep_free, window 256: 0.50"}
    assert [y for _, y in curves["mep_free, window 256: 0.50"]] == [0, 0.5]
    plot_results([row, other], tmp_path / "a.svg")
    assert "position (tokens); dashed: training length 512" in words(tmp_path / "a.svg")


def test_means_over_seeds_need_all_of_them_and_no_line_joins_lengths_of_different_texts():
    seeds = rows("t5", {512: 12.0, 1024: 9.0, 2048: None}, seed=1)
    seeds += rows("t5", {512: 10.0, 1024: 9.0, 2048: 7.0}, seed=2)
    for protocol, style in (("paper", "None"), ("position", "None"), ("tail", "-")):
        (axes,) = draw_perplexity(kinds([row | {"protocol": protocol} for row in seeds])).axes
        assert curves_of(axes) == {"t5: 9.00": [[512, 11], [1024, 9]]}
        line, _, (bars,) = axes.containers[0].lines
        assert line.get_linestyle() == style
        assert bars.get_segments()[0][1][1] == pytest.approx(11 + math.sqrt(2))


def test_a_heatmap_has_a_panel_for_each_task_and_the_best_line_first(tmp_path):
    tasks = answers("rotary", {512: 1.0, 1024: 0.5}, seed=1)
    tasks += answers("rotary", {512: 1.0, 1024: 0.4}, seed=2)
    tasks += answers("learned", {512: 0.973, 1024: None, 2048: 0.0}, reason="it ends")
    tasks += answers("none", {512: 0.6, 1024: 0.5}, corpus="task:parity")
    plot_results(tasks, tmp_path / "map.svg", over_seeds=True)
    shown = words(tmp_path / "map.svg")
    assert {"copy", "parity", "512*", "2048"} <= {*shown}
    cells = [text for text in shown if re.fullmatch(r"\d+±\d+|\d{1,3}", text)]
    assert cells == ["100", "45±7", "97", "0", "60", "50"]


def test_the_look_of_an_encoding_is_its_own_in_every_figure(tmp_path):
    assert {*LOOKS} <= {*REGISTRY}
    assert len({*map(tuple, LOOKS.values())}) == len(LOOKS)
    names = ["rotary", "bump", "mep_free"]  # a new encoding needs no line there
    assert looks(names) == [looks([name])[0] for name in names]
    figure = draw_perplexity(runs(ROWS))
    for name in ("a.png", "b.png"):
        write(figure, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
