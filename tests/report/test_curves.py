import html
import math
import re

import matplotlib.image
import pytest

from megatron.errors import UserError
from megatron.positions import REGISTRY
from megatron.report.curves import (
    draw_by_position,
    draw_perplexity,
    looks,
    looks_of_encodings,
    plot_perplexity,
    write,
)
from megatron.results.labels import runs
from tests.results.rows import rows

LENGTHS = (512, 1024, 2048)


def curve(pos_emb, *perplexities, **facts):
    return rows(pos_emb, dict(zip(LENGTHS, perplexities, strict=True)), **facts)


ROWS = [
    *curve("mep_free", 12.3, 12.1, 12.0),
    *curve("rotary", 12.4, 80.0, 900.0),
    *curve("learned", 13.0, None, None),
]


def words(path):
    """The texts of an SVG."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())
    return [html.unescape(text).strip() for text in texts]


def test_the_picture_names_curves_with_their_last_values_lengths_and_training_length(tmp_path):
    plot_perplexity(ROWS, tmp_path / "curves.svg", title="Perplexity of three")
    found = words(tmp_path / "curves.svg")
    labels = ["rotary  900.0", "learned  13.00 at 512", "mep_free  12.00"]
    assert [text for text in found if text in labels] == labels
    assert {"trained at 512", "Perplexity of three", "512", "1024", "2048"} <= {*found}
    assert {"evaluation length (tokens)", "perplexity, log scale"} <= {*found}
    assert any(text.startswith("stdlib valid") for text in found)
    plot_perplexity(ROWS, tmp_path / "curves.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "curves.png").shape
    assert (width, height) == (1152, 720)


def test_a_pass_by_position_is_drawn_by_position(tmp_path):
    measured = {"position_edges": [0, 1, 256, 512], "position_losses": [0.0, 3.0, 2.0]}
    row = ROWS[0] | measured
    other = row | {"window": 256, "position_losses": [0.0, 3.0, 2.5]}
    write(draw_by_position(runs([row, other]), "By position"), tmp_path / "two.svg")
    found = words(tmp_path / "two.svg")
    for window, last in (("none", 2), (256, 2.5)):
        assert f"mep_free, window {window}  {last:.2f}" in found
    assert {"position (tokens)", "loss (nats per token)", "trained at 512"} <= {*found}
    with pytest.raises(UserError, match=r"is written as .png, .svg or .pdf"):
        plot_perplexity([row], tmp_path / "position.txt")


def test_a_mean_over_seeds_has_a_band_and_every_length_needs_all_seeds():
    seeds = [*curve("t5", 12.0, 9.0, None, seed=1), *curve("t5", 10.0, 9.0, 7.0, seed=2)]
    (axes,) = draw_perplexity({"t5": seeds}).axes
    line = next(line for line in axes.lines if line.get_label().startswith("t5"))
    assert line.get_xydata().tolist() == [[512, 11.0], [1024, 9.0]]
    (band,) = axes.collections
    top = max(y for _, y in band.get_paths()[0].vertices)
    assert top == pytest.approx(11 + math.sqrt(2))


def test_the_look_of_an_encoding_is_its_own_in_every_figure():
    known = looks_of_encodings()
    assert {*known} <= {*REGISTRY}
    assert len({*map(tuple, known.values())}) == len(known)
    names = ("rotary", "bump", "mep_free")  # a new encoding needs no line there
    together = looks([{"pos_emb": name} for name in names])
    alone = [looks([{"pos_emb": name}])[0] for name in names]
    assert together == alone
    windows = [{"pos_emb": "t5", "window": window} for window in (None, 512, 256)]
    assert len({look["linestyle"] for look in looks(windows)}) == 3
