import html
import math
import re

import matplotlib.image
import pytest

from megatron.errors import UserError
from megatron.positions import REGISTRY
from megatron.report.curves import (
    ENCODINGS,
    Curve,
    apart,
    draw_curves,
    looks,
    perplexity_curves,
    plot_by_position,
    plot_perplexity,
)

LENGTHS = (512, 1024, 2048)


def rows(pos_emb, perplexities):
    shared = {
        "pos_emb": pos_emb,
        "step": 10,
        "config_hash": "ab",
        "train_length": 512,
        "corpus": "stdlib",
    }
    return [
        {
            **shared,
            "length": length,
            "windows": 1,
            "tokens": length,
            "loss": 1.0,
            "perplexity": perplexity,
        }
        for length, perplexity in zip(LENGTHS, perplexities, strict=True)
    ]


ROWS = (
    rows("mep_free", [12.3, 12.1, 12.0])
    + rows("rotary", [12.4, 80.0, 900.0])
    + rows("learned", [13.0, None, None])
)


def words(path):
    """The texts of an SVG."""
    return [
        html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
    ]


def test_the_picture_names_curves_with_their_last_values_lengths_and_training_length(tmp_path):
    plot_perplexity(ROWS, tmp_path / "curves.svg", title="Perplexity of three")
    found = words(tmp_path / "curves.svg")
    for text in (
        "mep_free  12.00",
        "rotary  900.0",
        "learned  13.00 at 512",
        "trained at 512",
        "Perplexity of three",
    ):
        assert text in found
    ticks = {"512", "1024", "2048"}
    assert ticks | {"evaluation length (tokens)", "perplexity, log scale"} <= set(found)
    assert any(text.startswith("stdlib") for text in found)


def test_a_pass_by_position_is_drawn_by_position(tmp_path):
    row = ROWS[0] | {"position_edges": [0, 1, 256, 512], "position_losses": [0.0, 3.0, 2.0]}
    other = row | {"window": 256, "position_losses": [0.0, 3.0, 2.5]}
    plot_by_position([row, other], tmp_path / "two.svg", title="By position")
    found = words(tmp_path / "two.svg")
    for window, last in (("none", 2), (256, 2.5)):
        assert f"mep_free, window {window}  {last:.2f}" in found
    assert {"position (tokens)", "loss (nats per token)", "trained at 512"} <= set(found)
    with pytest.raises(UserError, match=r"is written as .png, .svg or .pdf"):
        plot_by_position([row], tmp_path / "position.txt", title="")


def test_labels_stand_beside_the_ends_of_their_curves_on_plain_axes_too():
    curves = [Curve("upper", [0, 1000], [6.7, 3.9]), Curve("lower", [0, 1000], [6.7, 3.5])]
    (axes,) = draw_curves(curves, "step", "loss").axes
    upper, lower = (text.get_position()[1] for text in axes.texts)
    low, high = axes.get_ylim()
    assert upper == pytest.approx((3.9 - low) / (high - low), abs=0.05)
    assert lower == pytest.approx((3.5 - low) / (high - low), abs=0.05)


def test_a_png_is_a_picture_of_some_size(tmp_path):
    plot_perplexity(ROWS, tmp_path / "curves.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "curves.png").shape
    assert (width, height) == (1152, 720)
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_labels_that_would_touch_are_moved_apart_and_others_stay():
    placed = apart([0.9, 0.1, 0.1, 0.5], 0.05)
    assert placed == pytest.approx([0.9, 0.1, 0.15, 0.5])
    assert apart([], 0.05) == []


def test_rows_of_different_texts_are_no_curve(tmp_path):
    first, other = ([one | {"text": text, "tokens": 4096} for one in ROWS[:2]] for text in "ab")
    other[1]["text"] = "c"
    plot_perplexity([*first, *other], tmp_path / "a.svg")
    found = [text for text in words(tmp_path / "a.svg") if text.startswith("mep_free, text")]
    assert len(found) == 3


def test_a_mean_over_seeds_has_a_band_and_every_length_needs_all_seeds():
    seeds = [one | {"seed": seed} for seed in (1, 2) for one in rows("t5", [10.0, 9.0, None])]
    seeds[0]["perplexity"], seeds[5]["perplexity"] = 12.0, 7.0
    (curve,) = perplexity_curves({"t5": seeds})
    assert (curve.at, curve.values) == ([512, 1024], [11.0, 9.0])
    assert curve.std == pytest.approx([math.sqrt(2), 0.0])


def test_the_look_of_an_encoding_is_its_own_in_every_figure():
    # A new encoding needs no line there: its name gives it a look.
    assert set(ENCODINGS) <= set(REGISTRY)
    assert len(set(ENCODINGS.values())) == len(ENCODINGS)
    alone = looks([("mep_free", "")])[0]
    among = [("rotary", ""), ("bump", ""), ("mep_free", ""), ("alibi", "window 512")]
    assert looks(among)[2] == alone
    assert looks(among[::-1])[1] == alone
    assert looks(among)[1] == looks([("bump", "")])[0]
    plain, windowed, other = looks([("t5", ""), ("t5", "window 512"), ("t5", "window 256")])
    assert len({plain.dashes, windowed.dashes, other.dashes}) == 3
