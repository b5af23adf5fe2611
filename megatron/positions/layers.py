"""Which encoding each layer has, where layers differ."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import ALIASES, build, encoding_called, named

ATTENTION, LATENT = "attention", "mla"
WITH_ENCODING = {ATTENTION, LATENT}
"""Kinds of layers that have an encoding and a window."""
SHOWN = 6  # layers that a label names


@dataclass(frozen=True)
class Entry:
    """An encoding of some layers: its name and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

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
    return sum(layers[kind] for kind in WITH_ENCODING)


def encoded_features(section: Any) -> int:
    """Features of a head that the encoding acts on; section: `model` of the configuration.

    In mla layers half of head_dim, if nothing else is set, as in DeepSeek-V2 (arXiv 2405.04434).
    """
    head_dim = section.head_dim or section.hidden_size // section.num_attention_heads
    if LATENT not in section.layers:
        return head_dim
    return section.qk_rope_head_dim or max(1, head_dim // 2)


def shape_of(section: Any) -> Shape:
    """The sizes that an encoding is built for; section: `model` of the configuration."""
    heads, features = section.num_attention_heads, encoded_features(section)
    return Shape(heads, features, section.hidden_size, section.seq_length)


def entries_of(section: Any) -> list[Entry]:
    """The encodings of the first layers, which repeat over the others; one where none differ.

    section: `position` of the configuration. UserError for an entry that is no encoding.
    """
    if not section.pos_emb_layers:
        return [Entry(section.pos_emb, dict(section.pos_emb_args))]
    items = enumerate(section.pos_emb_layers, 1)
    return [entry_of(f"pos_emb_layers: entry {number}", item) for number, item in items]


def linear_entries(section: Any) -> list[Entry]:
    """The encoding of layers with a state, if they have one; section: as of `layers_of_kinds`."""
    item = section.linear_pos_emb
    return [] if item is None else [entry_of("linear_pos_emb", item)]


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


def build_entry(
    section: Any, entry: Entry, shape: Shape, options: Mapping[str, Any] | None = None
) -> Position:
    """The encoding of an entry; UserError for its options, naming the key.

    options: in place of the entry's own
    """
    chosen = entry.options if options is None else options
    try:
        return build(entry.name, shape, **chosen)
    except UserError as fault:
        if not section.pos_emb_layers:
            raise
        raise UserError(f"pos_emb_layers: {fault}") from None


def build_linear(section: Any) -> Position | None:
    """The encoding of layers with a state; UserError for one that they cannot have.

    section: `model` of the configuration
    """
    if section.linear_pos_emb is None:
        return None
    entry = entry_of("linear_pos_emb", section.linear_pos_emb)
    head_dim = section.linear_key_head_dim or section.head_dim
    head_dim = head_dim or section.hidden_size // section.num_attention_heads
    shape = replace(shape_of(section), head_dim=head_dim)
    try:
        position = build(entry.name, shape, **entry.options)
    except UserError as fault:
        raise UserError(f"linear_pos_emb: {fault}") from None
    if not position.only_rotates:
        raise UserError(
            f"linear_pos_emb: {entry.name} does not only turn queries and keys by their positions,"
            " which alone a state can have; take rotary, or a change of its frequencies such as"
            " p_rope or yarn"
        )
    return position
