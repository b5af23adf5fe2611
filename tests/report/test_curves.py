import html
import math
import re

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from megatron.errors import UserError
from megatron.positions import REGISTRY
from megatron.report.curves import (
    LOOKS,
    Design,
    by_length,
    by_position,
    draw,
    draw_over_training,
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
    """The points of each curve, by its label."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_xydata().tolist() for line in lines}


def names_of(axes):
    """The names at the ends of curves, from the bottom to the top."""
    assert axes.get_legend() is None
    heights = {text.get_text(): text.xyann[1] for text in axes.texts}
    return sorted(heights, key=heights.get)


def draw_lengths(*texts, **design):
    return draw([*map(by_length, texts)], Design(**design))


def test_the_picture_names_curves_with_their_last_values_lengths_and_training_length(tmp_path):
    figure = draw_lengths(runs(ROWS), title="Perplexity of $$ \\frac{ <b>")
    assert names_of(figure.axes[0]) == ["mep_free: 12.00", "learned: 13.00 at 512", "rotary: 900.0"]
    write(figure, tmp_path / "curves.svg")
    shown = words(tmp_path / "curves.svg")
    assert {"Perplexity of $$ \\frac{ <b>", "512", "1024", "2048"} <= {*shown}
    assert "evaluation length (tokens); dashed: training length 512" in shown
    about = "Perplexity on stdlib valid, 8,192 tokens (16 x 512 to 4 x 2048)"
    assert not [text for text in shown if "equal_tokens" in text], "the protocol's key is no title"
    assert f"{about}, protocol equal_tokens." in (tmp_path / "curves.svg").read_text()
    with pytest.raises(UserError, match=r"is written as .png, .svg or .pdf"):
        plot_results(ROWS, tmp_path / "curves.txt")


def test_a_curve_far_above_most_others_leaves_the_axes_at_an_arrow():
    """On a straight line from 12.4 at 512 to 80 at 1024, on a logarithmic level axis."""
    measured = [*ROWS[:6], *rows("alibi", {512: 11.0, 1024: 11.5, 2048: 13.0})]
    (axes,) = draw_lengths(runs(measured)).axes
    _, top = axes.get_ylim()
    assert axes.get_yscale() == "linear"
    assert 13 < top < 14
    (arrow,) = [
        line for line in axes.lines if line.get_marker() == "^" and line.get_clip_on() is False
    ]
    place, height = axes.transAxes.transform(arrow.get_xydata())[0]
    assert height == pytest.approx(axes.bbox.y1)
    length = axes.transData.inverted().transform((place, height))[0]
    assert math.log2(length / 512) == pytest.approx((top - 12.4) / (80 - 12.4), rel=1e-3)
    assert names_of(axes)[-1] == "rotary: 900.0"
    (axes,) = draw_lengths(runs(ROWS[:6])).axes
    assert axes.get_yscale() == "log", "neither of two is most"


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
    figure = draw_lengths(*map(runs, by_text(measured)), title="Longer than the figure " * 6)
    boxes = texts_of(figure, monkeypatch)
    for number, (box, text) in enumerate(boxes):
        assert Bbox.intersection(box, figure.bbox).bounds == box.bounds, text
        assert not [other for place, other in boxes[:number] if box.overlaps(place)], text
    assert [len(axes.texts) for axes in figure.axes] == [5, 5], "at most seven in a panel"
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["the lowest 5", "the next 5"]
    lines = [
        line for axes in figure.axes for line in axes.lines if line.get_label() in runs(measured)
    ]
    styles = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(styles) == len(NAMES)


def test_a_picture_over_training_has_a_panel_for_each_length():
    """As a run with stages writes them: its window and options change, its hash does not."""
    measured = []
    for seed, shift in ((1234, 0.0), (1235, 2.0)):
        for step, facts in ((100, {"window": 64}), (200, {}), (400, {"pos_emb_args": {"base": 5}})):
            numbers = {512: 10 + shift, 2048: 1000 / step + shift}
            grown = {"step": step, "seed": seed, "config_hash": f"{seed}", **facts}
            measured += rows("rotary", numbers, **grown)
    shorter, longer = [[100, 11], [200, 11], [400, 11]], [[100, 11], [200, 6], [400, 3.5]]
    alone = draw_over_training(measured, kinds).axes[0]
    assert curves_of(alone) == {"at 512 tokens": shorter, "at 2048 tokens": longer}
    shades = {line.get_label(): sum(line.get_color()[:3]) for line in alone.lines}
    assert shades["at 512 tokens"] > shades["at 2048 tokens"], "from light to dark"
    for row in measured:
        row["stage_ends"] = [100, 200]
    measured += rows("alibi", {512: 11.0}, step=400, config_hash="0123")
    figure = draw_over_training(measured[::-1], kinds)
    assert figure.axes[0].get_xscale() == "linear"
    assert {axes.get_title(loc="left"): curves_of(axes) for axes in figure.axes} == {
        "at 512 tokens": {"rotary": shorter, "alibi": [[400, 11]]},
        "at 2048 tokens": {"rotary": longer},
    }
    ends = {line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"}
    assert {100, 200} <= ends
    assert figure.axes[0].get_xlabel() == "step; dashed: ends of stages"


def test_a_pass_by_position_begins_at_64_and_may_be_a_difference(tmp_path):
    """Half octaves from 64 to 91 and from 362 on; the middles of 64 to 128 and 400 to 512."""
    edges = {"position_edges": [0, 1, 64, 128, 400, 512]}
    measured = []
    for seed, shift in ((1, 0.0), (2, 0.2)):
        losses = {"position_losses": [9.0, 5.0, 3.0, 3.0, 2.0 + shift]}
        measured += rows("mep_free", {512: 9.0}, seed=seed, **edges, **losses)
        losses = {"position_losses": [9.0, 5.0, 3.5, 3.0, 2.0]}
        measured += rows("mep_free", {512: 9.0}, seed=seed, window=256, **edges, **losses)
    groups = kinds(measured)
    panel = by_position(groups)
    (axes,) = draw([panel]).axes
    points = dict(curves_of(axes)["mep_free"])
    assert [*points] == [96, 264, 456]
    assert points[96] == pytest.approx(math.exp(3))
    assert points[456] == pytest.approx((math.exp(2) + math.exp(2.2)) / 2)
    spread = np.std([math.exp(2), math.exp(2.2)], ddof=1)
    assert panel.stds["mep_free"][456] == pytest.approx(spread)
    assert axes.collections, "a band"
    difference = by_position(groups, "mep_free")
    assert [*difference.means["mep_free, window 256"]] == pytest.approx([0.5, 0, -0.1])
    plot_results(measured, tmp_path / "a.svg", over_seeds=True, against="mep_free")
    shown = words(tmp_path / "a.svg")
    assert "position (tokens); dashed: training length 512" in shown
    assert "loss minus that of mep_free (nats per token)" in shown


def test_means_over_seeds_need_all_of_them_and_no_line_joins_lengths_of_different_texts():
    seeds = rows("t5", {512: 12.0, 1024: 9.0, 2048: None}, seed=1)
    seeds += rows("t5", {512: 10.0, 1024: 9.0, 2048: 7.0}, seed=2)
    for protocol, style in (("paper", "None"), ("tail", "-")):
        (axes,) = draw_lengths(kinds([row | {"protocol": protocol} for row in seeds])).axes
        assert curves_of(axes) == {"t5": [[512, 11], [1024, 9]]}
        (line,) = [line for line in axes.lines if line.get_label() == "t5"]
        assert line.get_linestyle() == style
        tops = [path.vertices[:, 1].max() for path in axes.collections[0].get_paths()]
        assert max(tops) == pytest.approx(11 + math.sqrt(2))


def test_a_heatmap_has_lengths_of_a_task_or_means_of_several_and_the_best_line_first(tmp_path):
    copy = answers("rotary", {512: 1.0, 1024: 0.5}, seed=1)
    copy += answers("rotary", {512: 1.0, 1024: 0.4}, seed=2)
    copy += answers("learned", {512: 0.973, 1024: None, 2048: 0.0}, reason="it ends")
    parity = answers("none", {512: 0.6, 1024: 0.5, 2048: 0.3}, corpus="task:parity")
    for more, numbers, columns in (
        ([], ["100", "45 ± 7", "97", "0"], {"512*", "1024", "2048"}),
        (parity, ["45 ± 7", "40"], {"copy", "parity"}),  # learned has no number at 1024
    ):
        plot_results([*copy, *more], tmp_path / "map.svg", over_seeds=True)
        shown = words(tmp_path / "map.svg")
        assert columns <= {*shown}
        cells = [text for text in shown if re.fullmatch(r"\d+ ± \d+|\d{1,3}", text)]
        assert cells == numbers


def test_a_user_chooses_size_style_and_what_stands_out(tmp_path):
    """As matplotlib has it: 72 points are an inch of an SVG."""
    style = tmp_path / "mine.mplstyle"
    style.write_text("xtick.labelsize: 5\n")
    design = Design("Mine", (3.0, 2.5), ["rotary"], style)
    figure = draw([by_length(runs(ROWS[:6]))], design)
    line = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert line["rotary"] == LOOKS["rotary"][0]
    assert line["mep_free"] == "#BBBBBB"
    write(figure, tmp_path / "a.svg", design)
    text = (tmp_path / "a.svg").read_text()
    assert 'width="216pt" height="180pt"' in text
    assert re.search(r"font: 5px|font-size: 5px", text)


def test_the_look_of_an_encoding_is_its_own_in_every_figure(tmp_path):
    assert {*LOOKS} <= {*REGISTRY}
    assert len({*map(tuple, LOOKS.values())}) == len(LOOKS)
    names = ["rotary", "bump", "mep_free"]  # a new encoding needs no line there
    assert looks(names) == [looks([name])[0] for name in names]
    for name in ("a.png", "b.png"):
        plot_results(ROWS, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
