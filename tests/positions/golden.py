"""Numbers of authors' code: the files of tests/golden/encodings, or of GOLDEN_ENCODINGS."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron.positions import Shape

HERE = Path(__file__).resolve().parents[1] / "golden" / "encodings"
FOLDER = Path(os.environ.get("GOLDEN_ENCODINGS", HERE))


@dataclass
class Golden:
    """The numbers of one variant of an encoding, and the inputs that they belong to.

    numbers: by name, without the variant; inputs: `L16.q` and so on
    """

    variant: str
    numbers: dict[str, Tensor]
    inputs: dict[str, Tensor]

    def shape(self, train_length: int = 512) -> Shape:
        heads, _, head_dim = self.inputs[f"{self.lengths[0]}.q"].shape[1:]
        hidden = self.inputs[f"{self.lengths[0]}.x"].shape[-1]
        return Shape(heads, head_dim, hidden, train_length)

    @property
    def lengths(self) -> list[str]:
        """`L16` and so on, where this variant has numbers and inputs."""
        lengths = {name.split(".")[0] for name in self.numbers if re.match(r"L\d+\.", name)}
        return sorted(length for length in lengths if f"{length}.q" in self.inputs)

    def of_length(self, length: str) -> dict[str, Tensor]:
        """The numbers at one length, by name."""
        return {
            key.removeprefix(f"{length}."): value
            for key, value in self.numbers.items()
            if key.startswith(f"{length}.")
        }

    def param(self, name: str) -> float:
        return self.numbers[f"param.{name}"].item()

    def params(self, names: dict[str, str]) -> dict[str, Tensor]:
        """The values that the file has, by our names. `names` gives ours for each of theirs."""
        theirs = {name: self.numbers.get(f"param.{name}") for name in names}
        return {names[name]: value for name, value in theirs.items() if value is not None}

    def values(self, options: Any) -> Any:
        """Options of authors.yml, with the numbers and sizes of the file that they name."""
        if isinstance(options, dict):
            return {name: self.values(value) for name, value in options.items()}
        if isinstance(options, list):
            return [self.values(value) for value in options]
        if not isinstance(options, str):
            return options
        if " / " in options:
            above, below = (self.values(part) for part in options.split(" / "))
            return above / below
        if options == "heads":
            return self.shape().heads
        kind, _, name = options.partition(".")
        if kind in ("rows", "last"):
            return self.numbers[name].shape[0 if kind == "rows" else -1]
        return self.numbers[options].tolist() if options in self.numbers else options


def load(name: str, variant: str) -> Golden:
    path = FOLDER / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    numbers = load_file(path)
    prefix = "" if variant == "only" else f"{variant}."
    named = {}
    for start in ("param.", prefix):  # those of all variants, and its own
        for key, value in numbers.items():
            if key.startswith(start):
                named[key.removeprefix(prefix)] = value
    inputs = load_file(FOLDER / "inputs.safetensors")
    return Golden(variant, named, inputs)
