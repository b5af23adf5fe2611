"""Read a GGUF file of llama.cpp's by transformers, and name its quantisation. Nothing of it is run.

transformers leaves out keys and tensors that it does not know, so these are refused here first.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.hugging_face import BESIDE, WHOLE
from megatron.errors import UserError, in_words
from megatron.interop.families import FAMILIES, Family

ENDING = ".gguf"
LONGEST = 32 * 2**20  # bytes before the weights: keys, the vocabulary, names of tensors
VALUES = ("F32", "F16", "BF16")  # kinds of tensors that are not quantised
CHECKED_BY_SHAPES = ("vocab_size", "attention.key_length", "attention.value_length")
UNSET = (None, False, 0, "", "none")
# tokenizer.ggml.pre, by which llama.cpp splits a text: as GPT-2, with or without each digit alone
AS_GPT2 = ("gpt-2", "gpt2", "olmo", "mpt")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
INSTEAD = "import the model's Hugging Face folder"


def is_gguf(source: Path) -> bool:
    """Whether a source is a GGUF file, by its name."""
    return source.suffix == ENDING and source.is_file()


def header_of(file: Path) -> tuple[dict[str, Any], Sequence[Any]]:
    """The keys of a file, and its tensors as transformers lists them.

    Raises UserError without the optional packages, and for a file that is damaged or another.
    """
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as fault:
        raise UserError(
            f"{file}: needs optional packages ({fault}) - pip install gguf accelerate"
        ) from None
    try:
        metadata, _ = read_gguf_metadata(str(file))
        header = GgufHeader.from_file(str(file))
        if header.data_start > LONGEST:
            raise ValueError(f"{header.data_start:,} bytes of keys")
    except Exception as fault:  # it raises many kinds
        raise UserError(
            f"{file}: is no GGUF file that can be read ({in_words(fault):.300}) - copy it again"
        ) from None
    return metadata, header.tensors


def quantization_of(file: Path) -> str:
    """Kinds of its quantised weights, most numbers first, such as "Q4_K + Q6_K"; "" for none."""
    from gguf import GGMLQuantizationType

    counts: Counter[str] = Counter()
    for tensor in header_of(file)[1]:
        counts[GGMLQuantizationType(tensor.ggml_type).name] += prod(tensor.shape)
    return " + ".join(kind for kind, _ in counts.most_common() if kind not in VALUES)


@contextmanager
def place_of(source: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder that transformers shall open, and the option that names a GGUF file in it.

    The file is linked into an empty folder, so that nothing that lies beside it is read. What
    transformers raises for it becomes a UserError.
    """
    if not is_gguf(source):
        yield source, {}
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(source.resolve())
        try:
            yield Path(folder), {"gguf_file": link.name}
        except Exception as fault:  # it raises many kinds
            raise UserError(
                f"{source}: transformers cannot open it ({in_words(fault):.300}) - copy it again,"
                f" or {INSTEAD}"
            ) from None


def settings_of(file: Path) -> tuple[Family, dict[str, Any]]:
    """The family of the model in a file, and its keys as those of a config.json.

    Raises UserError for a key that transformers does not read and that may change the result.
    """
    from transformers import AutoConfig  # only here: importing it takes seconds
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    metadata, _ = header_of(file)
    with place_of(file) as (place, option):
        theirs = AutoConfig.from_pretrained(place, **option).to_dict()
    kind = metadata["general.architecture"]
    known_keys = GGUF_CONFIG_MAPPING.get(kind)
    families = {family.model_type: family for family in FAMILIES.values()}
    family = families.get(theirs["model_type"])
    if family is None or known_keys is None:
        raise UserError(f"{file}: general.architecture: {kind!r} is not offered - {INSTEAD}")
    for name, value in metadata.items():
        key = name.removeprefix(f"{kind}.")
        is_read = known_keys.get(key) or key == name or key in CHECKED_BY_SHAPES
        if not is_read and value not in UNSET:
            raise UserError(
                f"{file}: {name}: {value!r:.60} may change what the model computes, and"
                f" transformers leaves it out - {INSTEAD}"
            )
    theirs.pop("_model_name_or_path", None)  # a name of the file's own
    return family, {**theirs, "architectures": [family.architecture]}


def check_tensors(file: Path, numbers: int) -> None:
    """Raises UserError unless a file has all weights of its model, and no other.

    transformers leaves out tensors without a place, such as the divisors of Llama 3's frequencies.
    """
    _, tensors = header_of(file)
    total = sum(prod(tensor.shape) for tensor in tensors)
    if total != numbers:
        raise UserError(
            f"{file}: holds {total:,} numbers, the model of its keys has {numbers:,} - {INSTEAD},"
            " or join a model's parts by llama-gguf-split"
        )


@contextmanager
def tokenizer_folder(source: Path) -> Iterator[Path]:
    """Where a source's tokenizer lies: the source, or for a GGUF file a folder made for a while.

    That folder is empty if transformers makes none that splits a text as llama.cpp does.
    """
    if not is_gguf(source):
        yield source
        return
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer  # only here: importing it takes seconds
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    metadata, _ = header_of(source)
    split = metadata.get("tokenizer.ggml.pre")
    is_split = split in (*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGITS_ALONE)
    with tempfile.TemporaryDirectory() as folder:
        if is_split or metadata.get("tokenizer.ggml.model") != "gpt2":
            with place_of(source) as (place, option):
                made = AutoTokenizer.from_pretrained(place, **option)
            if split in DIGITS_ALONE:
                digits = pre_tokenizers.Digits(individual_digits=True)
                words = pre_tokenizers.ByteLevel(add_prefix_space=False)
                made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
            made.backend_tokenizer.save(f"{folder}/{WHOLE}")
            beside = json.dumps({"eos_token": made.eos_token})
            Path(folder, BESIDE).write_text(beside, encoding="utf-8")
        yield Path(folder)
