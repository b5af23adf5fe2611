"""Open a folder of Hugging Face's by transformers. Nothing in it is run."""

import logging
import re
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from megatron import strict_json
from megatron.checkpoints.read import fill
from megatron.config import Config
from megatron.errors import UserError, in_words
from megatron.files import read_small
from megatron.interop.families import (
    ENCODING,
    FAMILIES,
    IGNORED_HF_KEYS,
    IN_TRUNK,
    Family,
    each_weight,
)
from megatron.interop.reference import WRAPPERS
from megatron.model import GPT, Architecture, from_config

logger = logging.getLogger(__name__)

SETTINGS = "config.json"
WHOLE = "model.safetensors"
LONGEST = 10_000_000  # bytes of config.json
QUANTIZED = "quantization_config"
OF_WHOLE = {"tie_word_embeddings", QUANTIZED, "auto_map"}  # keys beside text_config that count
TOLERANCE = 1e-5  # of logits up to 1; larger ones may differ by this part of the largest one
# Of ours in float32. In float64 programs differ by as much: rotary's frequencies, and norms that
# files hold minus 1, stay rounded to float32.
ROUNDINGS = 4


def open_folder(folder: Path) -> tuple[GPT, Config, Any]:
    """The model in float32 and eval mode, its configuration, and transformers' own of its class.

    Raises UserError for another architecture, for a key that changes the result and is not offered,
    and for weights that are damaged, missing, left over or of another shape.
    """
    family, config, theirs = read_settings(folder)
    vocab = theirs["vocab_size"]
    loaded = load_class(folder, family, theirs)
    weights = loaded.state_dict()
    prefix = family.trunk + IN_TRUNK
    names = [name for name in weights if name.startswith(prefix)]
    encodings = {f"positions.{name.removeprefix(prefix)}": weights.pop(name) for name in names}
    embedding = loaded.get_input_embeddings().weight
    head = weights.pop("lm_head.weight")
    is_tied = head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    if not config.model.no_weight_tying and not is_tied:
        raise UserError(
            f"{folder / SETTINGS}: tie_word_embeddings: says that the output matrix is that of the"
            " input, which differs from it - set it to false for a model with a head of its own, or"
            " copy the folder again"
        )
    if config.model.no_weight_tying:
        weights[f"{family.head}.weight"] = head
    model = from_config(config, vocab=vocab)
    architecture = Architecture.of(config.model)
    read = each_weight(family, weights, architecture)
    fill(model, chain(read, encodings.items()))
    return model.eval(), config, loaded


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, as transformers chooses them: others may lie there."""
    names, index = [WHOLE], folder / f"{WHOLE}.index.json"
    if index.is_file() and not (folder / WHOLE).is_file():
        shards = read_json(index).get("weight_map")
        names = {str(name) for name in shards.values()} if isinstance(shards, dict) else []
    return [folder / name for name in sorted(names) if (folder / name).is_file()]


def load_class(folder: Path, family: Family, settings: dict[str, Any]) -> Any:
    """transformers' own model of a folder in float32 and eval mode.

    No code of the folder is run. UserError if weights are damaged, missing, left over or of another
    shape.
    """
    import transformers  # only here: importing it takes seconds

    from megatron.interop.in_transformers import use  # so that encodings are loaded

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    program = f"transformers {transformers.__version__} {family.architecture}"
    try:
        loaded, report = getattr(transformers, family.architecture).from_pretrained(
            folder,
            config=transformers.CONFIG_MAPPING[family.model_type].from_dict(
                family.nested(settings)
            ),
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",  # config.json may ask for one that is not installed
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
            key_mapping={f"^{re.escape(family.inside)}" if family.inside else WRAPPERS.pattern: ""},
        )
    except Exception as fault:  # it raises many kinds
        raise UserError(
            f"{folder}: {program} cannot open it ({in_words(fault):.300}) - correct its"
            " config.json, or copy all weights beside it again; transformers' save_pretrained"
            " writes those of a pytorch_model.bin anew"
        ) from None
    if ENCODING in settings:
        use(loaded)
    weights = loaded.state_dict()
    faults = [f"{name} missing" for name in report["missing_keys"] if name in weights]
    for name in report["unexpected_keys"]:
        is_old = name.endswith(".masked_bias")  # a fixed tensor of old files
        if not is_old and name not in weights and not name.startswith(tuple(family.beside)):
            faults.append(f"{name} left over")
    for name, shape, expected in report["mismatched_keys"]:
        faults.append(f"{name} {list(shape)}, not {list(expected)}")
    if faults:
        raise UserError(
            f"{folder}: the weights are not those of its config.json"
            f" ({'; '.join(sorted(faults)[:8])}) - copy the folder again"
        )
    bias_max = settings.get("attn_config.alibi_bias_max")
    if bias_max is not None:  # transformers 5.23 leaves out this argument of its own function
        model = loaded.transformer
        build = model.build_mpt_alibi_tensor
        model.build_mpt_alibi_tensor = partial(build, alibi_bias_max=bias_max)
    return loaded.eval()


class InFloat64(TorchFunctionMode):
    """float32 becomes float64, also where a class of transformers asks for float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        inputs = args, kwargs or {}
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, inputs)
        return function(*args, **kwargs)


@torch.no_grad()
def compare_logits(
    program: str, theirs: Any, model: GPT, ids: Tensor, last: int = 0
) -> tuple[float, float]:
    """The largest difference of a program's logits from ours, and the largest of them.

    ids [batch, length]; last: how many tokens of each text are compared, 0 for all
    Raises UserError if they differ by more than TOLERANCE of the largest logit, at least 1, and in
    float64 by more than ROUNDINGS times the rounding of ours in float32.
    """

    def both(theirs: Any, model: GPT) -> tuple[Tensor, Tensor]:
        logits = model.logits(model.features(ids)[:, -last:])
        return theirs(ids, logits_to_keep=last).logits, logits

    their_logits, logits = both(theirs, model)
    difference, largest = float((their_logits - logits).abs().max()), float(logits.abs().max())
    # `not <=`: nan is no agreement
    if not difference <= TOLERANCE * max(1.0, largest):
        # Steep weights, states and long texts multiply rounding, and each program's is its own.
        with InFloat64():
            their_logits, exact = both(deepcopy(theirs).double(), deepcopy(model).double())
        if not (their_logits - exact).abs().max() <= ROUNDINGS * (logits - exact).abs().max():
            raise UserError(
                f"logits of {program} differ from ours by {difference:.3g} at {ids.shape[1]}"
                f" tokens, where the largest is {largest:.3g} - nothing was written; please report"
                " this model"
            )
    return difference, largest


def read_settings(folder: Path) -> tuple[Family, Config, dict[str, Any]]:
    """The family of the model in a folder, its configuration, and the keys of its config.json."""
    place = folder / SETTINGS
    theirs = read_json(place)
    names = theirs.get("architectures")
    families = dict(FAMILIES)
    for family in FAMILIES.values():
        families |= dict.fromkeys(family.names, family)
        if family.whole:
            families[family.whole] = family
    family = families.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if family is None:
        raise UserError(
            f"{place}: architectures: {names!r} is not offered; known are {', '.join(FAMILIES)},"
            " and PositionsGPTForCausalLM with the checkpoint.json and config.yml of its export"
        )
    if names == [family.whole]:
        whole, theirs = theirs, theirs.get("text_config")
        if not isinstance(theirs, dict):
            raise UserError(f"{place}: text_config: holds no keys - copy it again")
        theirs |= {key: whole[key] for key in OF_WHOLE & whole.keys()}
        logger.warning("%s: of %s the text model alone is read", place, family.whole)
    theirs = family.flat(theirs)
    unknown = [key for key in theirs.keys() - family.known_keys - IGNORED_HF_KEYS if theirs[key]]
    read = [key for key in unknown if "auto_map" in theirs or family.reads(key, theirs[key])]
    if read:
        raise UserError(
            f"{place}: {', '.join(sorted(read)[:8])}: not known for {family.architecture}, and may"
            " change what it computes - open a model without it (quantised weights: save them anew"
            " after transformers' model.dequantize())"
        )
    if unknown:
        logger.warning(
            "%s: %s left out: transformers' %s does not read it",
            place,
            ", ".join(sorted(unknown)[:8]),
            family.architecture,
        )
    try:
        config = family.configuration(theirs)
    except UserError as fault:
        raise UserError(f"{place}: {fault}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        raise UserError(f"{place}: has a value of the wrong kind ({fault})") from None
    if "auto_map" in theirs:
        logger.warning(
            "%s: names code of its own, which is not run; %s is computed by our model",
            place,
            family.architecture,
        )
    return family, config, theirs


def read_json(path: Path) -> dict[str, Any]:
    """The keys in a file; UserError if it is not such a file."""
    try:
        value = strict_json.parse(read_small(path, LONGEST))
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: cannot be read ({fault}) - copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no keys - copy it again")
    return value
