"""Models of Hugging Face's classes and ours, in both directions, by the table families.yml.

`Family.settings_of` and `each_weight` open a model of theirs, `config_of` and `write_weights`
describe one of ours as theirs. transformers itself fills in what a config.json leaves out.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from megatron.config import Config, load
from megatron.config.schema import KEYS, plain
from megatron.errors import UserError
from megatron.files import ROOT
from megatron.layer_kinds import ATTENTION, layer_called, options_of_layers
from megatron.model import Architecture, AttentionSettings, options_of_entry
from megatron.positions.layers import entries_of
from megatron.positions.registry import named
from megatron.positions.rotary import spelled_out

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
DENSE = "dense"  # a kind of MLP
BASE, SHARE = "rope_theta", "partial_rotary_factor"
CAUSAL, ORIGINAL = "is_causal", "original_max_position_embeddings"
PROPORTIONAL = "proportional"  # a rope_type
ROOT_OF_WIDTH = "sqrt(hidden_size)"
ENCODING = "megatron_positions"
"""The key of config.json in a model that `use` gave an encoding of ours: {name: options}.

Its attn_implementation has this name, too, which transformers alone refuses.
"""
IN_TRUNK = "encodings."  # its parameters in such a model
TRAINING_ALONE = (
    "seq_length",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "layer_args",
    "hidden_dropout",
    "init_method",
    "init_method_std",
    "output_layer_init_method",
)
"""Keys of section `model` that do not change what a trained model computes."""


class Family(NamedTuple):
    """A class of Hugging Face's or another trainer's; families.yml says what each field means."""

    architecture: str
    model_type: str
    keys: Mapping[str, Sequence[str]]
    values: Mapping[str, Mapping[Any, Any]]
    modules: Mapping[str, Sequence[str]]
    positions: str
    trunk: str
    head: str = "lm_head"
    fixed: Mapping[str, Any] = {}
    only: Mapping[str, Any] = {}
    written: Mapping[str, Any] = {}
    layered: Sequence[str] = ()
    unused: Sequence[str] = ()
    kinds: Mapping[str, str] = {}
    state_modules: Mapping[str, Sequence[str]] = {}
    whole: str = ""
    inside: str = ""
    beside: Sequence[str] = ()
    names: Sequence[str] = ()
    section: str = ""
    absent: Mapping[str, Any] = {}
    types: Mapping[str, str] = {}
    position_keys: Mapping[str, str] = {}
    position_args: Mapping[str, Any] = {}
    computed: Mapping[str, Any] = {}
    ends: bool = False
    dimensions: str = ""
    still: str = ""
    rope_by_kind: bool = False

    @property
    def known_keys(self) -> set[str]:
        """Keys of config.json that this family reads, those of its section as `flat` has them."""
        keys = {*self.keys, *self.only, *self.layered, *self.unused, *self.position_keys, ENCODING}
        keys |= {"vocab_size", CAUSAL}
        if self.dimensions:
            return keys | {self.dimensions}
        return keys | {*(TABLE["rope_keys"] if self.turns else ())}

    @property
    def turns(self) -> bool:
        """Whether its encoding is rotary."""
        return self.positions in ("part", "whole")

    def flat(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of a config.json with those of its section beside them, as `section.key`."""
        rest = dict(keys)
        if isinstance(rest.get(self.section), Mapping):
            inner = rest.pop(self.section)
            for key in inner.keys() - IGNORED_HF_KEYS:
                rest[f"{self.section}.{key}"] = inner[key]
        return self.typed(rest)

    def typed(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The same with whole numbers and others as transformers asks for them."""
        result = dict(keys)
        for key, name in self.types.items():
            kind = {"int": int, "float": float}[name]
            number = keys.get(key)
            if type(number) in (int, float):
                with suppress(OverflowError):  # of hundreds of digits: refused with its key
                    if kind(number) == number:
                        result[key] = kind(number)
        return result

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json again from those of `flat`."""
        prefix = f"{self.section}."
        inner, keys = {}, {}
        for key, value in flat.items():
            if self.section and key.startswith(prefix):
                inner[key.removeprefix(prefix)] = value
            else:
                keys[key] = value
        return keys | {self.section: inner} if inner else keys

    def reads(self, key: str, value: Any) -> bool:
        """Whether transformers' class may read a key of config.json."""
        import transformers  # only here: importing it takes seconds

        if key == "layer_types" and isinstance(value, list) and {*map(str, value)} == {FULL}:
            return "sliding_window" in self.layered  # else as without the key
        is_known = hasattr(transformers.CONFIG_MAPPING[self.model_type](), key)
        return is_known or key in TABLE["keys_of_every_class"]

    def filled_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json with all keys that transformers' class has."""
        from transformers import CONFIG_MAPPING  # only here: importing it takes seconds

        keys = {key: value for key, value in config.items() if key in self.known_keys}
        try:
            settings = CONFIG_MAPPING[self.model_type].from_dict(self.nested(keys))
            if self.turns and not self.dimensions:
                # As its model does: original_max_position_embeddings beside the others counts most.
                settings.standardize_rope_params()
        except Exception as fault:  # it raises many kinds
            reason = " ".join(str(fault).split())
            raise UserError(f"{self.architecture} refuses it ({reason:.300})") from None
        return self.flat(settings.to_dict())

    def settings_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Our keys and values for a config.json; UserError for what we do not compute."""
        filled_in = self.filled_in(config) if self.model_type else config
        theirs = {**self.absent, **filled_in}

        for key, value in {CAUSAL: True, **self.only}.items():
            if theirs.get(key, value) != value:
                raise UserError(
                    f"{key}: {theirs[key]!r} changes what the model computes, and is not offered"
                )
        dense, mlp_types = theirs.get("first_k_dense_replace"), theirs.get("mlp_layer_types")
        for key, is_dense in {
            "first_k_dense_replace": dense is None or dense >= theirs["num_hidden_layers"],
            "mlp_layer_types": {*(mlp_types or [DENSE])} == {DENSE},
        }.items():
            if not is_dense:
                raise UserError(
                    f"{key}: {theirs[key]!r} gives layers experts, which are not offered"
                )
        settings = dict(self.fixed)
        for key, ours in self.keys.items():
            value = theirs.get(key)  # Qwen 2 has no head_dim
            if key in self.values:
                if value not in self.values[key]:
                    choices = ", ".join(map(str, self.values[key]))
                    raise UserError(
                        f"{key}: {value!r} is not offered; open a model with one of {choices}"
                    )
                value = self.values[key][value]
            settings |= dict.fromkeys(ours, value)
        if settings.get("embedding_scale") == ROOT_OF_WIDTH:
            settings["embedding_scale"] = math.sqrt(settings["hidden_size"])

        # A matrix of both ends has no bias here: a tied one with a bias is read as two matrices.
        settings["no_weight_tying"] |= settings.get("use_bias_in_output", False)

        # Layers may have a window, or not; or a state in the place of attention.
        window = theirs.get("sliding_window")
        kinds = theirs.get("layer_types") or [FULL if window is None else SLIDING]
        other = LINEAR if LINEAR in self.kinds else SLIDING
        if not {other, FULL} >= {*kinds}:
            raise UserError(f"layer_types: must name {other} or {FULL} for each layer")
        if SLIDING in kinds and window is None:
            raise UserError(f"sliding_window: is not set, and layer_types names {SLIDING}")
        names = [self.kinds.get(kind, ATTENTION) for kind in kinds]
        if {*names} != {ATTENTION}:
            settings |= one_or_pattern("layers", "layers", names)
        read = {*KEYS, *options_of_layers(names)}
        settings = {key: value for key, value in settings.items() if key in read}
        windows = [window if kind == SLIDING else None for kind in kinds]
        settings |= one_or_pattern("window", "window_layers", windows)

        arguments = {option: theirs[key] for key, option in self.position_keys.items()}
        arguments |= self.position_args
        if not self.turns:
            return settings | {"pos_emb": self.positions, "pos_emb_args": arguments}
        rope = theirs.get("rope_parameters") or {"rope_type": "default", BASE: 10000.0}
        if self.dimensions:
            features = settings["hidden_size"] // settings["num_attention_heads"]
            rope = {**rope, SHARE: theirs[self.dimensions] / features}
        options_by_kind = {}
        for kind in {*kinds}:
            completed = {**theirs, "rope_parameters": rope.get(kind, rope)}
            options_by_kind[kind] = arguments | rotary_options(completed)
        for options in options_by_kind.values():
            if options["rotary_pct"] != 1 and self.positions == "whole":
                raise UserError(
                    f"{SHARE}: {options['rotary_pct']} is not what {self.architecture} computes;"
                    " it turns all features"
                )
        turning = theirs.get("no_rope_layers") or [1]  # 1 for a layer that turns
        layers: list[Any] = []
        for layer in range(max(len(kinds), len(turning))):
            kind = kinds[layer % len(kinds)]
            turns = turning[layer % len(turning)] and kind != self.still
            if kind != LINEAR:
                layers.append(rotary_entry(options_by_kind[kind]) if turns else "none")
        if "none" not in layers and all(layer == layers[0] for layer in layers):
            [(name, options)] = rotary_entry(options_by_kind[kinds[0]]).items()
            return settings | {"pos_emb": name, "pos_emb_args": options}
        return settings | one_or_pattern("pos_emb", "pos_emb_layers", layers)

    def configuration(self, config: Mapping[str, Any]) -> Config:
        """The configuration of the model that a config.json describes."""
        settings = self.settings_of(config)
        if ENCODING in config:
            name, options = named(ENCODING, config[ENCODING])
            settings |= {"pos_emb": name, "pos_emb_args": options}
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        try:
            return load([], [*words, f"make_vocab_size_divisible_by={config.get('vocab_size')}"])
        except UserError as fault:
            _, *faults = str(fault).split("\n  ")
            raise UserError("; ".join(faults)) from None

    def config_of(self, config: Config, vocab: int) -> dict[str, Any]:
        """config.json for a model of ours; UserError, with all reasons, if it is another kind.

        vocab: rows of the embedding
        """
        ours = function_of(config)
        theirs: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": vocab,
            **self.only,
            **self.written,
        }
        for key, (name, *_) in self.keys.items():
            value = config.model.seq_length if name == "seq_length" else ours.get(name)
            if key in self.values:
                # Of several spellings the first is written.
                pairs = reversed(list(self.values[key].items()))
                spelled = {mine: other for other, mine in pairs}
                # One that has no spelling comes back as another, which is the reason to refuse it.
                value = spelled.get(value, next(iter(self.values[key])))
            theirs[key] = value

        window = next((size for size in ours["window"] if size is not None), None)
        turning = [int("none" not in entry) for entry in ours["pos_emb"]]
        kinds = [FULL if size is None else SLIDING for size in ours["window"]]
        spelled = {mine: other for other, mine in self.kinds.items()}
        for layer, kind in enumerate(ours["layers"]):
            if kind != ATTENTION:  # one that the class has not comes back as another
                kinds[layer] = spelled.get(kind, LINEAR)
        layers: dict[str, Any] = {
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "layer_types": kinds,
            "no_rope_layers": turning,
            "first_k_dense_replace": config.model.num_layers,
            "mlp_layer_types": [DENSE] * config.model.num_layers,
        }
        theirs |= {key: layers[key] for key in self.layered if key in layers}
        options_of_layers = [next(iter(entry.values())) for entry in ours["pos_emb"]]
        options = options_of_layers[turning.index(1) if any(turning) else 0]
        for key, option in self.position_keys.items():
            if option in options:
                theirs[key] = options[option]
        for key, (name, *_) in self.keys.items():
            if name == "seq_length" and "max_positions" in options:
                theirs[key] = options["max_positions"]
        if self.dimensions:
            features = ours["head_dim"] * options.get("rotary_pct", 1.0)
            theirs[self.dimensions] = round(features)
        elif self.rope_by_kind:
            theirs["rope_parameters"] = {}
            for kind in (FULL, SLIDING):
                layer = kinds.index(kind) if kind in kinds else 0
                theirs["rope_parameters"][kind] = rope_of(options_of_layers[layer])
        elif self.turns:
            theirs["rope_parameters"] = rope_of(options)
        theirs = self.typed(theirs)

        try:
            back = function_of(self.configuration(theirs))
        except UserError as fault:
            raise UserError(f"{self.architecture} is another model: {fault}") from None
        reasons = [f"{key}: {value}" for key, value in ours.items() if back.get(key) != value]
        for key, value in self.computed.items():
            if theirs.get(key, value) != value:
                reasons.append(f"{key}: {theirs[key]}, where transformers computes {value}")
        if reasons:
            raise UserError(f"{self.architecture} is another model: {'; '.join(reasons)}")
        return self.nested(theirs)

    def places(self, model: Architecture) -> Iterator[tuple[str, list[str], "MatrixForm"]]:
        """(our module, their modules, the form between them) of every module of a model."""
        outside = {ours: self.modules[ours] for ours in self.modules if ".attention." not in ours}
        for layer, kind in enumerate(model.kinds):
            number = f".{layer}."
            modules = {**outside, **self.state_modules}
            if layer_called(kind).has_encoding:
                modules = self.modules
            for ours, (form, *names) in modules.items():
                if layer == 0 or ".N." in ours:
                    theirs = [self.trunk + name.replace(".N.", number) for name in names]
                    yield ours.replace(".N.", number), theirs, FORMS[form]
        yield "final_linear", [self.head], FORMS["same"]


def rotary_options(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """pos_emb_args of `rotary` from the completed rope_parameters of a config.json.

    Raises UserError, which names the key, for a scaling that rotary cannot express.
    """
    rope = theirs["rope_parameters"]
    kind = rope["rope_type"]
    if kind not in SCALINGS:
        choices = ", ".join(SCALINGS)
        raise UserError(f"rope_type: {kind!r} is not offered; open a model with one of {choices}")
    for key in sorted(rope.keys() - {*TABLE["keys_of_every_rope"]} - SCALINGS[kind].keys()):
        if rope[key]:
            raise UserError(f"rope_parameters.{key}: {rope[key]!r} is not offered")
    share = 1.0 if SHARE in SCALINGS[kind] else rope.get(SHARE, 1.0)
    options: dict[str, Any] = {"base": rope[BASE], "rotary_pct": share}
    if kind == PROPORTIONAL and rope.get("factor", 1) != 1:
        options["scaling"] = "linear"
    elif kind not in ("default", PROPORTIONAL):
        options["scaling"] = kind
    if ORIGINAL in SCALINGS[kind]:  # for a factor that is not given
        original = rope[ORIGINAL]
        options["factor"] = max(1.0, theirs["max_position_embeddings"] / original)
    for key, option in SCALINGS[kind].items():
        if rope.get(key) is not None:
            options[option] = rope[key]
    return options


def rotary_entry(options: Mapping[str, Any]) -> dict[str, Any]:
    """The encoding of such options by its name."""
    return {"p_rope" if "fraction" in options else "rotary": options}


def rope_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters from all options of `rotary`; those of another encoding give the default."""
    kind = options.get("scaling", "none")
    if options.get("fraction", 1.0) != 1:
        kind = PROPORTIONAL
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        BASE: options.get("base", 10000.0),
        SHARE: options.get("rotary_pct", 1.0),
    }
    for key, option in SCALINGS.get(kind, {}).items():
        if options.get(option) is not None:
            rope[key] = options[option]
    return rope


def one_or_pattern(key: str, pattern_key: str, layers: Sequence[Any]) -> dict[str, Any]:
    """The key of ours for values of layers: `key` if all are equal, else the shortest pattern."""
    for size in range(1, len(layers) + 1):
        if all(value == layers[index % size] for index, value in enumerate(layers)):
            break
    return {key: layers[0]} if size == 1 else {pattern_key: list(layers[:size])}


def function_of(config: Config) -> dict[str, Any]:
    """The function that a model computes after training, by our keys, with all defaults."""
    model = Architecture.of(config.model)
    encodings = []
    for entry in entries_of(config.position):
        name, spelled = spelled_out(entry.name, options_of_entry(config, entry))
        options = plain(spelled)
        if "original_length" in options:
            options["original_length"] = options["original_length"] or model.seq_length
        encodings.append({name: options})
    attention = AttentionSettings.of(config.attention)
    sizes: dict[str, Any] = {}
    for kind in {*model.kinds}:
        sizes |= layer_called(kind).sizes(model)
    features = sizes.get("head_dim") or model.features_of_head
    keys = {
        **vars(model),
        **sizes,
        "layers": model.kinds,
        "num_key_value_heads": model.key_heads,
        "head_dim": features,
        "intermediate_size": model.mlp_width,
        "use_bias_in_attn_output": model.bias_in_attn_output,
        "use_bias_in_norms": model.norm == "layernorm"
        and model.use_bias_in_norms
        and model.use_weight_in_norms,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or features,
        "pos_emb": [encodings[layer % len(encodings)] for layer in range(model.num_layers)],
        "window": attention.windows(model.num_layers, model.seq_length),
        "blockwise": attention.blockwise,
        "logn_scale": attention.logn_scale,
        "paper_precision": attention.paper_precision,
    }
    return {key: value for key, value in keys.items() if key not in TRAINING_ALONE}


# --- Weights ---

ENDINGS = (".weight", ".bias", "")  # of a module's numbers; "": the module is a number itself


class MatrixForm(NamedTuple):
    """The way from matrices [rows, columns] of theirs, and their biases, to one of ours, and back.

    Every form but `above_one` only moves numbers, so ours -> theirs -> ours is equal bit for bit.
    """

    ours: Callable[[Sequence[Tensor], Architecture], Tensor]
    theirs: Callable[[Tensor, Architecture], Sequence[Tensor]]


def fused(parts: Sequence[Tensor], model: Architecture) -> Tensor:
    """Queries, keys and values, each [heads, head_dim], as ours: fused by key head.

    Gates stand after the queries of their head in theirs, of their key head in ours.
    """
    queries, keys, values = (part.unflatten(0, (model.key_heads, -1)) for part in parts)
    by_head = queries.unflatten(1, (model.num_attention_heads // model.key_heads, -1))
    queries, gates = by_head.tensor_split([model.features_of_head], dim=2)
    rows = [queries.flatten(1, 2), gates.flatten(1, 2), keys, values]
    return torch.cat(rows, dim=1).flatten(0, 1)


def parted(tensor: Tensor, model: Architecture) -> list[Tensor]:
    """Queries with their gates, keys and values of ours, one after the other."""
    by_key_head = tensor.unflatten(0, (model.key_heads, -1))
    group, features = model.query_heads // model.key_heads, model.features_of_head
    parts = [group * features, -2 * features, -features]
    queries, gates, keys, values = by_key_head.tensor_split(parts, dim=1)
    by_head = [part.unflatten(1, (group, part.shape[1] // group)) for part in (queries, gates)]
    queries = torch.cat(by_head, dim=2).flatten(1, 2)
    return [part.flatten(0, 1) for part in (queries, keys, values)]


def in_three(tensor: Tensor, model: Architecture) -> tuple[Tensor, ...]:
    """Rows of queries, keys and values, which stand one after the other."""
    keys = model.key_heads * model.features_of_head
    return tensor.tensor_split([-2 * keys, -keys])


def turned(tensor: Tensor) -> Tensor:
    """GPT-2's Conv1D keeps [columns, rows]; a bias [rows] stays as it is."""
    return tensor if tensor.dim() == 1 else tensor.T


FORMS = {
    "same": MatrixForm(lambda parts, _: parts[0], lambda tensor, _: [tensor]),
    "transposed": MatrixForm(lambda parts, _: turned(parts[0]), lambda tensor, _: [turned(tensor)]),
    "stacked": MatrixForm(
        lambda parts, _: torch.cat(list(parts)), lambda tensor, _: tensor.chunk(2)
    ),
    "stacked_three": MatrixForm(
        lambda parts, _: torch.cat(list(parts)), lambda tensor, _: tensor.chunk(3)
    ),
    "number_of_head": MatrixForm(
        lambda parts, _: parts[0].flatten(), lambda tensor, _: [tensor.view(1, 1, -1, 1)]
    ),
    "above_one": MatrixForm(lambda parts, _: parts[0] + 1, lambda tensor, _: [tensor - 1]),
    "heads": MatrixForm(fused, parted),
    # OPT's table has two rows before position 0, which no text reads.
    "after_two": MatrixForm(
        lambda parts, _: parts[0][2:],
        lambda tensor, _: [F.pad(tensor, (0, 0, 2, 0))],
    ),
    "rows_of_heads": MatrixForm(
        lambda parts, model: fused(in_three(parts[0], model), model),
        lambda tensor, model: [torch.cat(parted(tensor, model))],
    ),
    "columns_of_heads": MatrixForm(
        lambda parts, model: fused(turned(parts[0]).chunk(3), model),
        lambda tensor, model: [turned(torch.cat(parted(tensor, model)))],
    ),
}


def each_weight(
    family: Family, theirs: Mapping[str, Tensor], model: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """The weights of our model, by our names, from those of theirs, one after another."""
    for ours, modules, form in family.places(model):
        for ending in ENDINGS:
            names = [module + ending for module in modules]
            if names[0] in theirs:
                parts = [theirs[name] for name in names]
                yield ours + ending, form.ours(parts, model).contiguous()


def write_weights(
    family: Family, ours: Mapping[str, Tensor], model: Architecture
) -> dict[str, Tensor]:
    """Their weights, under the names of their files, from those of our model."""
    weights: dict[str, Tensor] = {}
    for name, modules, form in family.places(model):
        for ending in ENDINGS:
            if name + ending in ours:
                parts = form.theirs(ours[name + ending], model)
                for module, part in zip(modules, parts, strict=True):
                    weights[module + ending] = part.clone(memory_format=torch.contiguous_format)
    return weights


TEXTS = [
    folder.joinpath("families.yml").read_text(encoding="utf-8")
    for folder in (Path(__file__).parent, ROOT / "megatron/hybrids")
]
TABLE = yaml.safe_load("\n".join(TEXTS))
SCALINGS: dict[str, dict[str, str]] = TABLE["scalings"]
IGNORED_HF_KEYS = frozenset(TABLE["ignored_hf_keys"])
FAMILIES = {
    name: Family(name, **table)
    for name, table in (TABLE["families"] | TABLE["families_of_hybrids"]).items()
}
"""Every family by the name of Hugging Face's class."""
