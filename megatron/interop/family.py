"""What the table of a family of models says, and the keys of a configuration in both directions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config
from megatron.errors import UserError
from megatron.interop import rope
from megatron.interop.forms import Form, Same
from megatron.model import Architecture, AttentionSettings
from megatron.positions.layers import entries_of, name_of_layers

REQUIRED = object()
TRAINING_ALONE = (
    "seq_length",
    "hidden_dropout",
    "init_method",
    "init_method_std",
    "output_layer_init_method",
)
"""Keys of section `model` that do not change what a trained model computes."""


@dataclass(frozen=True)
class Setting:
    """A key of config.json and the keys of ours that it sets.

    default: the class's own, where the file leaves the key out
    values: our value by theirs, where they are spelled differently
    """

    theirs: str
    ours: tuple[str, ...]
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Module:
    """A module of ours, with {layer} for its number, and the modules of theirs that hold it."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = field(default_factory=Same)


def no_windows(config: Mapping[str, Any]) -> list[int | None]:
    """The windows of a class that has none; None: of any number of layers."""
    return [None]


def all_turn(config: Mapping[str, Any]) -> list[bool]:
    """Every layer turns its queries and keys."""
    return [True]


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's classes.

    settings: keys that set ours; fixed: keys of ours that the class implies
    only: keys of theirs that change what is computed, and the value that we compute
    written: keys of theirs without effect on logits, whose defaults fit only the published model
    rotary_share: the default part of head_dim that turns; None: learned absolute positions
    rotary_base: the base where the file says none; partial: whether a part of head_dim may turn
    windows, turning: from config.json, the window of each layer, and whether it turns; a shorter
        list repeats
    trunk: what names begin with, which files of the bare model leave out; head: the output matrix
    modules: where weights are; buffers: ends of names of fixed tensors, which are not read
    """

    architecture: str
    model_type: str
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    modules: tuple[Module, ...]
    trunk: str
    only: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    rotary_share: float | None = 1.0
    rotary_base: float = 10000.0
    partial: bool = False
    windows: Callable[[Mapping[str, Any]], list[int | None]] = no_windows
    window_keys: tuple[str, ...] = ()
    turning: Callable[[Mapping[str, Any]], list[bool]] = all_turn
    turning_keys: tuple[str, ...] = ()
    head: tuple[str, ...] = ("lm_head",)
    buffers: tuple[str, ...] = ()

    @property
    def known_keys(self) -> set[str]:
        """Keys of config.json that this family reads."""
        keys = {setting.theirs for setting in self.settings}
        of_encoding = set() if self.rotary_share is None else rope.KEYS | {rope.ORIGINAL}
        of_layers = {*self.window_keys, *self.turning_keys}
        return keys | set(self.only) | of_encoding | of_layers | {"vocab_size"}

    def settings_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Our keys and values for a config.json; UserError for what we do not compute."""
        for key, value in self.only.items():
            if config.get(key, value) != value:
                raise UserError(
                    f"{key}: {config[key]!r} changes what the model computes, and is not offered"
                )
        found = dict(self.fixed)
        for setting in self.settings:
            value = _our_value(setting, config)
            found |= dict.fromkeys(setting.ours, value)
        found |= _pattern_or_one("window_layers", "window", self.windows(config))
        if self.rotary_share is None:
            found["pos_emb"] = "learned"
        else:
            arguments = rope.options(
                config, default_share=self.rotary_share, default_base=self.rotary_base
            )
            if arguments["rotary_pct"] != 1 and not self.partial:
                raise UserError(
                    f"{rope.SHARE}: {arguments['rotary_pct']} is not what {self.architecture}"
                    " computes; it turns all features"
                )
            turning = self.turning(config)
            if all(turning):
                found |= {"pos_emb": "rotary", "pos_emb_args": arguments}
            else:
                layers = [{"rotary": arguments} if one else "none" for one in turning]
                found |= _pattern_or_one("pos_emb_layers", "pos_emb", layers)
        return _without_defaults(found)

    def config_of(self, config: Config, vocab: int) -> dict[str, Any]:
        """config.json for a model of ours; UserError, with all reasons, where it is another kind.

        vocab: rows of the embedding
        """
        ours = resolved(config)
        found: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": vocab,
            **self.only,
            **self.written,
        }
        reasons = []
        for setting in self.settings:
            value, spelled = _their_value(setting, ours[setting.ours[0]])
            if not spelled:
                reasons.append(f"{setting.ours[0]}: {value}")
            found[setting.theirs] = value
        found |= self._window_keys_of(config)
        try:
            found |= self._encoding_keys_of(config)
            back = self.settings_of(found)
        except UserError as fault:
            reasons.append(str(fault))
            back = {}
        reasons += [] if reasons else _differences(ours, back)
        for key in ("blockwise", "logn_scale"):
            if config[key]:
                reasons.append(f"{key}: true")
        if reasons:
            raise UserError(f"{self.architecture} is another model: {'; '.join(reasons)}")
        return found

    def _encoding_keys_of(self, config: Config) -> dict[str, Any]:
        entries = entries_of(config.position)
        layers = config.model.num_layers
        turning = [entries[layer % len(entries)].name != "none" for layer in range(layers)]
        acting = [entry for entry in entries if entry.name != "none"] or entries
        wanted = "learned" if self.rotary_share is None else "rotary"
        same_encoding = all(entry == acting[0] for entry in acting)
        layers_fit = all(turning) or bool(self.turning_keys)
        if acting[0].name != wanted or not same_encoding or not layers_fit:
            key = "pos_emb_layers" if config.position.pos_emb_layers else "pos_emb"
            raise UserError(f"{key}: {name_of_layers(config.position)}")
        chosen = dict(acting[0].options)
        if self.rotary_share is None:
            rows = chosen.get("max_positions") or config.model.max_position_embeddings
            lengths = [one.theirs for one in self.settings if one.ours == ("seq_length",)]
            return dict.fromkeys(lengths, rows)
        if chosen.get("scaling", "none") != "none":
            chosen["original_length"] = chosen.get("original_length") or config.model.seq_length
        values = {"no_rope_layers": [int(one) for one in turning]}
        of_layers = {key: values[key] for key in self.turning_keys if key in values}
        return {"rope_parameters": rope.parameters(chosen), **of_layers}

    def _window_keys_of(self, config: Config) -> dict[str, Any]:
        """Keys that give the layers the windows of ours; none where the class has no such keys."""
        layers = config.model.num_layers
        windows = AttentionSettings.of(config.attention).windows(layers, config.model.seq_length)
        window = next((one for one in windows if one is not None), None)
        kinds = ["full_attention" if one is None else "sliding_attention" for one in windows]
        values: dict[str, Any] = {
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0 if window else layers,
            "layer_types": kinds,
        }
        return {key: values[key] for key in self.window_keys if key in values}

    def places(self, layers: int) -> Iterator[tuple[str, tuple[str, ...], Form]]:
        """(our module, their modules, the form between them) of every module of a model."""
        for module in self.modules:
            for layer in range(layers if "{layer}" in module.ours else 1):
                theirs = tuple(name.format(layer=layer) for name in module.theirs)
                yield module.ours.format(layer=layer), theirs, module.form


def _pattern_or_one(several: str, one: str, layers: Sequence[Any]) -> dict[str, Any]:
    """The key of ours for values of layers: `one` where all are equal, else `several`."""
    pattern = repeated(layers)
    return {one: pattern[0]} if len(pattern) == 1 else {several: pattern}


def repeated(layers: Sequence[Any]) -> list[Any]:
    """The shortest beginning of a list that gives the whole list when it is repeated."""
    for size in range(1, len(layers)):
        if all(one == layers[index % size] for index, one in enumerate(layers)):
            return list(layers[:size])
    return list(layers)


def resolved(config: Config) -> dict[str, Any]:
    """The keys of section `model`, with those that are unset as they come out."""
    model = Architecture.of(config.model)
    return {
        **dict(config.model),
        "num_key_value_heads": model.key_heads,
        "head_dim": model.features_of_head,
        "intermediate_size": model.mlp_width,
        "use_bias_in_attn_output": model.bias_in_attn_output,
        "use_bias_in_norms": model.norm_has_bias,
    }


def _our_value(setting: Setting, config: Mapping[str, Any]) -> Any:
    value = config.get(setting.theirs, setting.default)
    if value is REQUIRED:
        raise UserError(f"{setting.theirs}: is missing, and the class cannot be built without it")
    if setting.values is None:
        return value
    try:
        return setting.values[value]
    except (KeyError, TypeError):
        known = ", ".join(map(str, setting.values))
        raise UserError(
            f"{setting.theirs}: {value!r} is not offered; open a model with one of {known}"
        ) from None


def _their_value(setting: Setting, ours: Any) -> tuple[Any, bool]:
    """Their value for ours, and whether there is one."""
    if setting.values is None:
        return ours, True
    for theirs, value in setting.values.items():
        if value == ours:
            return theirs, True
    return ours, False


def _without_defaults(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out sizes that follow from others anyway, so that one model has one hash."""
    names = Architecture.__dataclass_fields__.keys() & found.keys()
    whole = Architecture(**{name: found[name] for name in names})
    hidden, heads = whole.hidden_size, whole.num_attention_heads
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if whole.head_dim == hidden / heads:
            found = {**found, "head_dim": None}
        default = Architecture(hidden, 1, heads, 1, activation=whole.activation).mlp_width
        if whole.intermediate_size == default:
            found = {**found, "intermediate_size": None}
    return found


def _differences(ours: Mapping[str, Any], back: Mapping[str, Any]) -> list[str]:
    """What a model read back would have otherwise, by our keys."""
    names = Architecture.__dataclass_fields__.keys() & back.keys()
    model = Architecture(**{name: back[name] for name in names})
    again = {
        "num_key_value_heads": model.key_heads,
        "head_dim": model.features_of_head,
        "intermediate_size": model.mlp_width,
        "use_bias_in_attn_output": model.bias_in_attn_output,
        "use_bias_in_norms": model.norm_has_bias,
    }
    whole = {**{name: getattr(model, name) for name in Architecture.__dataclass_fields__}, **again}
    for key in TRAINING_ALONE:
        whole.pop(key)
    return [f"{key}: {ours[key]}" for key in whole if ours[key] != whole[key]]
