"""How a curve looks: colour and marker for the encoding, in every figure; dashes for variants."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

# Okabe and Ito's colours without yellow, and Tol's wine: distinct for any colour vision.
BLUE, RED, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, BLACK, WINE = "#56B4E9", "#E69F00", "#000000", "#882255"
COLOURS = (BLUE, RED, GREEN, PINK, SKY, ORANGE, BLACK, WINE)

# One marker for each family. The pairs of colour and marker are unique.
ENCODINGS: dict[str, tuple[str, str]] = {
    "mep_free": (BLACK, "o"),
    "mep_param": (BLUE, "o"),
    "mep_param_t5": (GREEN, "o"),
    "mep": (ORANGE, "o"),
    "gaussian": (SKY, "o"),
    "kerple_log": (SKY, "s"),
    "kerple_power": (ORANGE, "s"),
    "kerple_log_3para": (BLUE, "s"),
    "kerple_bias_2para": (BLACK, "s"),
    "kerple_bias_3para": (GREEN, "s"),
    "kerple_bias_wht": (RED, "s"),
    "kerple_wht_1para": (PINK, "s"),
    "kerple_wht_2para": (WINE, "s"),
    "alibi": (PINK, "^"),
    "tanh": (BLUE, "^"),
    "sandwich": (RED, "^"),
    "bam": (GREEN, "^"),
    "scaled_distance": (ORANGE, "^"),
    "t5": (GREEN, "D"),
    "fire": (RED, "D"),
    "cable": (SKY, "D"),
    "rotary": (RED, "v"),
    "xpos": (ORANGE, "v"),
    "sinusoidal": (WINE, "P"),
    "learned": (BLUE, "P"),
    "randomized": (GREEN, "P"),
    "none": (BLACK, "P"),
}
OWN = tuple(product(COLOURS, ("X", "*", "p", "h")))  # for encodings of the user's own
PLAIN, WINDOW = "-", "--"
OTHERS = (":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))

Dashes = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Look:
    """The colour, marker and dashes of a curve."""

    colour: str
    marker: str
    dashes: Dashes

    def line(self) -> dict[str, Any]:
        """As arguments of matplotlib's plot."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


def looks(curves: Sequence[tuple[str, str]]) -> list[Look]:
    """A look for each (encoding, variant) of a figure.

    The encoding gives colour and marker. Without a variant the line is solid, with a window it is
    dashed. Curves that would look the same get other dashes; own encodings that would look the
    same get another colour or marker.
    """
    inks = _inks({encoding for encoding, _ in curves})
    used: dict[str, list[Dashes]] = {}
    found = []
    for encoding, variant in curves:
        used_here = used.setdefault(encoding, [])
        dashes = _dashes(variant, used_here)
        used_here.append(dashes)
        found.append(Look(*inks[encoding], dashes))
    return found


def _inks(encodings: set[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each encoding: from the table, or from a hash of the name."""
    inks = {name: ENCODINGS[name] for name in encodings & ENCODINGS.keys()}
    for name in sorted(encodings - ENCODINGS.keys()):
        digest = hashlib.sha256(name.encode()).digest()
        start = int.from_bytes(digest[:4], "big") % len(OWN)
        candidates = (*OWN[start:], *OWN[:start])
        used = set(inks.values())
        free = [ink for ink in candidates if ink not in used]
        inks[name] = free[0] if free else OWN[start]
    return inks


def _dashes(variant: str, used: Sequence[Dashes]) -> Dashes:
    """The pattern of a variant, or the first that no other curve of this encoding has."""
    patterns: list[Dashes] = [PLAIN, *OTHERS, WINDOW]
    if variant.startswith("window"):
        patterns = [WINDOW, *OTHERS, PLAIN]
    elif variant:
        patterns = [*OTHERS, PLAIN, WINDOW]
    free = [pattern for pattern in patterns if pattern not in used]
    return free[0] if free else patterns[len(used) % len(patterns)]
