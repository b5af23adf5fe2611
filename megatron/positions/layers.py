"""Which encoding each layer has, where layers differ."""

from collections import Counter
from typing import Any, NamedTuple

from megatron.errors import UserError
from megatron.layer_kinds import ATTENTION, layer_called
from megatron.positions.base import Position, Shape
from megatron.positions.registry import ALIASES, encoding_called, named

SHOWN = 6  # layers that a label names


class Entry(NamedTuple):
    """An encoding of some layers: its name and its options."""

    name: str
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        options = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


class Placed(NamedTuple):
    """An encoding of a model, the layers that have it, and its name where layers differ."""

    position: Position
    layers: tuple[int, ...]
    name: str = ""

    @property
    def label(self) -> str:
        """`layer 3`, or where layers differ `layers 0, 1, 2 (rotary)`."""
        shown = ", ".join(map(str, self.layers[:SHOWN]))
        more = ", …" if len(self.layers) > SHOWN else ""
        layers = f"layer{'s' if len(self.layers) > 1 else ''} {shown}{more}"
        return f"{layers} ({self.name})" if self.name else layers


def layers_of_kinds(section: Any) -> Counter[str]:
    """How many layers each kind has, by `layers`; section: `model` of the configuration.

    Counted without a list of the layers: num_layers may be a typing error of many digits.
    """
    kinds = section.layers or (ATTENTION,)
    rounds, rest = divmod(section.num_layers, len(kinds))
    counts: Counter[str] = Counter(kinds[:rest])
    for kind in kinds:
        counts[kind] += rounds
    return counts


def attention_count(section: Any) -> int:
    """How many layers have an encoding; section: `model` of the configuration."""
    layers = layers_of_kinds(section)
    return sum(layers[kind] for kind in layers if layer_called(kind).has_encoding)


def features_of_head(section: Any) -> int:
    """head_dim, also where it is not set; section: `model`. UserError if heads do not divide."""
    hidden, heads = section.hidden_size, section.num_attention_heads
    if section.head_dim is None and hidden % heads:
        raise UserError(
            f"hidden_size: {hidden} cannot be split over num_attention_heads = {heads};"
            f" try hidden_size = {max(hidden // heads, 1) * heads}"
        )
    return section.head_dim or hidden // heads


def shape_of(section: Any) -> Shape:
    """The sizes that an encoding is built for; section: `model` of the configuration.

    UserError if layers of several kinds want others.
    """
    widths = {}
    for name in layers_of_kinds(section):
        kind = layer_called(name)
        if kind.has_encoding:
            widths[name] = kind.encoded_features(section)
    if not widths:
        raise UserError(
            "layers: no layer has attention, which the encoding is for;"
            " add attention to the pattern"
        )
    if len({*widths.values()}) > 1:
        listed = " and ".join(f"{width} in {name}" for name, width in widths.items())
        raise UserError(
            f"layers: the encoding has one width, and would act on {listed} of a head's features;"
            " give all the same"
        )
    heads, features = section.num_attention_heads, next(iter(widths.values()))
    return Shape(heads, features, section.hidden_size, section.seq_length)


def entries_of(section: Any) -> list[Entry]:
    """The encodings of the first layers, which repeat over the others; one where none differ.

    section: `position` of the configuration. UserError for an entry that is no encoding.
    """
    if not section.pos_emb_layers:
        return [Entry(section.pos_emb, dict(section.pos_emb_args))]
    items = enumerate(section.pos_emb_layers, 1)
    return [entry_of(f"pos_emb_layers: entry {number}", item) for number, item in items]


def entry_of(where: str, item: Any) -> Entry:
    """An encoding as YAML names it; UserError, which begins with `where`, if it is none."""
    name, options = named(where, item)
    try:
        encoding_called(name)
    except UserError as fault:
        raise UserError(f"{where}: {fault}") from None
    return Entry(ALIASES.get(name, name), options)


def name_of_layers(section: Any) -> str:
    """The name of a model's encoding: pos_emb, or the pattern as in `rotary, rotary, none`."""
    if not section.pos_emb_layers:
        return section.pos_emb
    return ", ".join(str(entry) for entry in entries_of(section))
