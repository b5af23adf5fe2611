"""Colours, markers and dashes of curves."""

import subprocess
import sys

from megatron.positions import REGISTRY
from megatron.report.figures.look import ENCODINGS, looks


def test_every_encoding_of_the_table_has_a_colour_and_marker_of_its_own():
    # A new encoding needs no line there: its name gives it a look.
    assert set(ENCODINGS) <= set(REGISTRY)
    assert len(set(ENCODINGS.values())) == len(ENCODINGS)


def test_the_look_depends_on_the_name_and_not_on_the_others_or_their_order():
    alone = looks([("mep_free", "")])[0]
    among = [("rotary", ""), ("bump", ""), ("mep_free", ""), ("alibi", "window 512")]
    assert looks(among)[2] == alone
    assert looks(among[::-1])[1] == alone
    assert looks(among)[1] == looks([("bump", "")])[0]


def test_an_own_encoding_looks_the_same_in_every_process():
    code = (
        "from megatron.report.figures.look import looks; print(looks([('bump', ''), ('dip', '')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == str(looks([("bump", ""), ("dip", "")]))


def test_a_window_is_dashed_and_other_variants_have_other_dashes():
    plain, window, blockwise = looks(
        [("rotary", ""), ("rotary", "window 512"), ("rotary", "blockwise on")]
    )
    assert (plain.dashes, window.dashes) == ("-", "--")
    assert blockwise.dashes not in ("-", "--")
    assert plain.colour == window.colour == blockwise.colour
    assert plain.marker == window.marker == blockwise.marker
    assert looks([("t5", "window 512")])[0].dashes == "--"


def test_curves_of_one_figure_that_would_look_the_same_do_not():
    several = looks([("mep", "")] * 4 + [("mep", "window 64"), ("mep", "window 512")])
    assert len(set(several)) == len(several)
    own = looks([(f"kernel_{number}", "") for number in range(32)])
    assert len({(look.colour, look.marker) for look in own}) == 32
