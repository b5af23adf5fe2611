"""What a new model takes from its parent: the rule by names, kinds and shapes, without an engine.

Everything but the encoding is taken, number for number. Of the encoding is taken what has the same
name, sits in the same kind of module and has the same shape. A table with a row for each position
keeps the rows that both have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.errors import UserError

POSITIONS = "positions"
SHOWN = 6  # names in a line of the log


@dataclass(frozen=True)
class Learned:
    """What is known of a tensor of a model.

    kind: of the module that holds it; "" outside the encoding
    by_position: whether each row belongs to a position, so that a table may grow or shrink
    """

    shape: tuple[int, ...]
    kind: str = ""
    by_position: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Graft:
    """Where the numbers of a new model come from.

    sources: the parent's name of every tensor that is taken
    rows: how many first rows are taken, where not all rows are
    kept, dropped, new: how many numbers of a tensor, by name; `dropped` by the parent's names
    """

    sources: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    new: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """What is kept, dropped and new, with names and numbers."""
        of_model = sum(count for name, count in self.kept.items() if not is_of_encoding(name))
        of_encoding = {name: count for name, count in self.kept.items() if is_of_encoding(name)}
        return [
            f"kept: {of_model:,} numbers of the model, and of its encoding {_named(of_encoding)}",
            f"dropped: {_named(self.dropped)}",
            f"new: {_named(self.new)}",
        ]


def _named(counts: Mapping[str, int]) -> str:
    """`1,234 numbers (name 1,000, other 234)`."""
    if not counts:
        return "nothing"
    names = [f"{name} {count:,}" for name, count in counts.items()]
    if len(names) > SHOWN:
        names = [*names[:SHOWN], f"and {len(names) - SHOWN} more"]
    return f"{sum(counts.values()):,} numbers ({', '.join(names)})"


def is_of_encoding(name: str) -> bool:
    """Whether a tensor of a model is one that its encoding learns."""
    return name.startswith(f"{POSITIONS}.")


def graft(
    old: Mapping[str, Learned],
    new: Mapping[str, Learned],
    old_layers: Sequence[int],
    new_layers: Sequence[int],
) -> Graft:
    """What a model with the tensors `new` takes from one with the tensors `old`.

    old_layers, new_layers: which of the model's encodings each layer has

    An encoding that layers share is copied to every layer. Those of several layers are not merged
    into one: they are dropped. UserError where the models differ in more than their encodings.
    """
    _check_same_model(old, new)
    found = Graft()
    for name, tensor in new.items():
        source = _source(name, old_layers, new_layers)
        rows = _rows_taken(old[source], tensor) if source in old else 0
        taken = rows * (tensor.numel // tensor.shape[0])
        if taken:
            found.sources[name] = source
            found.kept[name] = taken
        if 0 < rows < tensor.shape[0]:
            found.rows[name] = rows
        if taken < tensor.numel:
            found.new[name] = tensor.numel - taken
    _count_dropped(found, old)
    return found


def _count_dropped(found: Graft, old: Mapping[str, Learned]) -> None:
    taken: dict[str, int] = {}
    for name, source in found.sources.items():
        taken[source] = found.kept[name]
    for name, tensor in old.items():
        left = tensor.numel - taken.get(name, 0)
        if left:
            found.dropped[name] = left


def _check_same_model(old: Mapping[str, Learned], new: Mapping[str, Learned]) -> None:
    faults = []
    for name in [*new, *(name for name in old if name not in new)]:
        there, here = old.get(name), new.get(name)
        if is_of_encoding(name) or there == here:
            continue
        faults.append(f"{name}: {_shape(there)} there, {_shape(here)} here")
    if faults:
        raise UserError("; ".join(faults[:SHOWN]))


def _shape(tensor: Learned | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))


def _source(name: str, old_layers: Sequence[int], new_layers: Sequence[int]) -> str:
    """The parent's tensor that has the same place; "" where several have it."""
    if not is_of_encoding(name):
        return name
    _, index, rest = name.split(".", 2)
    there = {old for old, new in zip(old_layers, new_layers, strict=True) if new == int(index)}
    return f"{POSITIONS}.{there.pop()}.{rest}" if len(there) == 1 else ""


def _rows_taken(old: Learned, new: Learned) -> int:
    """First rows of the new tensor that come from the old one; 0 where the two do not agree."""
    if old.kind != new.kind or old.shape[1:] != new.shape[1:]:
        return 0
    if old.shape == new.shape:
        return new.shape[0]
    return min(old.shape[0], new.shape[0]) if new.by_position else 0
