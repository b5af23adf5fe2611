"""What the names of MEP's experiment files say about their mixtures.

400 of its files have one and the same pos-emb, 176 another: the authors chose the kernels by
commenting source lines in and out, and noted them in the file's name. docs/published_files.md lists
the words.
"""

import re
from dataclasses import dataclass
from typing import Any

EXPERIMENT = re.compile(r"(.+)_(openwebtext2|github|arxiv|pg19)_\d+")
SIZES = ("len1024_", "medium_")
# Names of mixtures that lines of the code's comments weigh unequally.
NINTH = 0.1111111111
THIRD = 0.3333333333
WITH_WEIGHTS = {
    "ali_tanh025_gau025": (["exp", "tanh", "gaussian"], [0.5, 0.25, 0.25]),
    "t5_kerplelog_ali_ali05_gau": (
        ["t5", "kerple_log", "exp", {"exp": 0.5}, "gaussian"],
        [THIRD, THIRD, NINTH, NINTH, NINTH],
    ),
}
Kernel = str | dict[str, float]
KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("ali", "alibi", "exp"), "exp"),
    "ali05": {"exp": 0.5},
    "05": {"exp": 0.5},  # ali_05 is two kernels
    **dict.fromkeys(("gau", "gauss", "gaussian"), "gaussian"),
    "gaussian05": {"gaussian": 0.5},
    "tanh": "tanh",
    "kerplelog": "kerple_log",
    "t5": "t5",
}
# fp32: the softmax; hall: all heads; def: the slopes as they are.
SILENT = ("fp32", "hall", "def")
COUNT = re.compile(r"all00(\d)")  # that many kernels of equal weight
UNKNOWN = {
    "sigmoid": "the released code has no sigmoid kernel, so its slopes are not known",
    "poly": "the released code uses no polynomial kernel, so its numbers are not known",
    "slopes": "the slopes of this experiment are not in the released code",
}


@dataclass(frozen=True)
class Named:
    """The mixture that a name gives: options of `mep`, or why it gives none."""

    options: dict[str, Any] | None
    why_not: str = ""


def mixture_named(stem: str, pos_emb: str) -> Named:
    """What a file's name, without .yml, says about its kernels; pos_emb as the file has it."""
    match = EXPERIMENT.fullmatch(stem)
    name = match[1] if match else stem
    if name.startswith(pos_emb):
        return Named(None, "it repeats pos-emb and names no kernels")
    for prefix in (*SIZES, "snope_"):
        name = name.removeprefix(prefix)
    if name.removesuffix("_fp32") in WITH_WEIGHTS:
        kernels, weights = WITH_WEIGHTS[name.removesuffix("_fp32")]
        return Named({"kernels": [*kernels], "weights": [*weights]})
    return _from_words(_words(name))


def _words(name: str) -> list[str]:
    words = name.replace("gaussian_def05", "gaussian05").split("_")
    return [word for word in words if word and word not in SILENT]


def _from_words(words: list[str]) -> Named:
    kernels: list[Kernel] = []
    said = 0
    for word in words:
        count = COUNT.fullmatch(word)
        if count:
            said = int(count[1])
        elif word in KERNELS:
            kernels.append(KERNELS[word])
        else:
            reasons = [why for known, why in UNKNOWN.items() if word.startswith(known)]
            return Named(None, reasons[0] if reasons else f"its word {word!r} is not known")
    if not kernels:
        return Named(None, "it names no kernels")
    if said and said != len(kernels):
        return Named(None, f"it names {len(kernels)} kernels and says that they are {said}")
    return Named({"kernels": kernels})
