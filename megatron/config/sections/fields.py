"""The types of values in the configuration, and what a section of keys is."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.splits import canonical_split


def _number(value: Any) -> Any:
    """YAML 1.1 reads 6e-4 and 1e-8 as text; give the number that was meant."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    number = _number(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


def as_tuple(value: Any) -> Any:
    """A list, one value, or "512,1024" as it is handy on the command line -> tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,)


def as_list(value: Any) -> Any:
    """As `as_tuple`, with none for null."""
    return () if value is None else as_tuple(value)


def as_split(value: Any) -> Any:
    """A list of shares, or a text with `,` or `/` between them -> text with `,`."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return canonical_split(value) if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
# Bounds keep sums and products of keys within 64 bits, and numbers within float32.
Positive = Annotated[Int, Field(gt=0, le=10**9)]
Count = Annotated[Int, Field(ge=0, le=10**9)]
Length = Annotated[Int, Field(gt=0, le=2**24)]  # beyond, positions are not exact in float32
Fraction = Annotated[Float, Field(ge=0, le=1)]
Scale = Annotated[Float, Field(ge=0, le=1e30)]
Decay = Annotated[Float, Field(ge=0, lt=1)]
# Windows of a blend are counted in one byte each by GPT-NeoX, hence its bound.
Corpora = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(as_list),
    Field(max_length=254),
]
Weights = Annotated[
    tuple[Annotated[Float, Field(gt=0, le=1e9)], ...],
    BeforeValidator(as_list),
    Field(max_length=254),
]

EncodingsOfLayers = Annotated[
    tuple[str | dict[str, Any], ...], BeforeValidator(as_list), Field(max_length=1000)
]
WindowsOfLayers = Annotated[
    tuple[Length | Literal["train_length"] | None, ...],
    BeforeValidator(as_list),
    Field(max_length=1000),
]

# What is known of a field beyond its type; see Key in keys.py for the meanings and defaults.
FREE: dict[str, Any] = {"shapes_result": False}
SHAPES: dict[str, Any] = {"shapes_result": True}
INPUT: dict[str, Any] = {"names_input": True}
INPUT_BY_NAME: dict[str, Any] = {"names_input": True, "hash_by_file_name": True}


def follows(key: str, shapes_result: bool = True) -> dict[str, Any]:
    """The default is the value of another key."""
    return {"follows": key, "shapes_result": shapes_result}


class Section(BaseModel):
    """A group of keys. shapes_result: whether they count for the hash that names a model."""

    shapes_result: ClassVar[bool] = True
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )
