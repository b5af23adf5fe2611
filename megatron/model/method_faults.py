"""What is wrong with methods for longer texts, before anything is computed with them."""

from collections.abc import Iterator, Sequence

from megatron.errors import UserError
from megatron.model.methods import MOST, Method, NearFar, Sinks, has_table, method_of
from megatron.model.settings import AttentionSettings
from megatron.positions import REGISTRY, Position


def faults_of(
    attention: AttentionSettings, positions: Sequence[Position], train_length: int
) -> list[str]:
    """What is wrong with sinks, clip_distance and method for layers with these encodings."""
    pattern = attention.window_layers or (attention.window,)
    windows = list(dict.fromkeys(attention.windows(len(pattern), train_length)))
    faults = [*_faults_of_numbers(attention), *_faults_of_sinks(attention, windows)]
    if attention.clip_distance is not None and not any(has_table(one) for one in positions):
        faults.append(
            f"--clip-distance {attention.clip_distance}: {_names(positions)} has no table by"
            " distance; for rotations --method rerope is the same"
        )
    chosen: list[Method] = []
    if attention.method is not None:
        try:
            method = method_of(attention.method, train_length)
            chosen.append(method)
            of_windows = [_faults_beside(method, attention, window) for window in windows]
            faults += dict.fromkeys(fault for several in of_windows for fault in several)
        except UserError as fault:
            faults.append(str(fault))
    lengths = [window for window in windows if window is not None]
    if attention.sinks is not None and lengths and attention.sinks >= 1:
        chosen.append(Sinks(lengths[0], attention.sinks))
    for one in chosen:
        faults += _faults_of_encodings(one, positions)
        if attention.reset_attention_mask:
            faults.append(
                f"{_where(one)}: reads a text as one document; set reset_attention_mask=false"
            )
    return faults


def _faults_of_numbers(attention: AttentionSettings) -> Iterator[str]:
    values = {"--sinks": attention.sinks, "--clip-distance": attention.clip_distance}
    for option, value in values.items():
        if value is not None and not 1 <= value <= MOST:
            yield f"{option} {value}: give a number of tokens of 1 to {MOST}, or none"


def _faults_of_sinks(attention: AttentionSettings, windows: Sequence[int | None]) -> Iterator[str]:
    if attention.sinks is None:
        return
    where = f"--sinks {attention.sinks}"
    if windows == [None]:
        yield f"{where}: without a window all keys are visible; give --window too"
    if attention.blockwise:
        yield f"{where}: has no meaning beside blockwise: true"
    if attention.method is not None:
        yield f"{where}: excludes --method {attention.method}"


def _faults_beside(
    method: Method, attention: AttentionSettings, window: int | None
) -> Iterator[str]:
    """Other settings that a method excludes."""
    if not isinstance(method, NearFar):
        return
    where = f"--method {method.text}"
    if attention.blockwise:
        yield f"{where}: has no meaning beside blockwise: true"
    if attention.clip_distance is not None:
        yield f"{where}: excludes --clip-distance {attention.clip_distance}, since it clips itself"
    if window is None:
        return
    if method.first_keys is not None:
        yield f"{where}: has a window of its own; give --window none"
    elif window <= method.window:
        yield f"{where}: changes nothing within window {window}; give --window none or more"


def _faults_of_encodings(method: Method, positions: Sequence[Position]) -> Iterator[str]:
    where = _where(method)
    needs = method.needs
    if needs is not None and not any(getattr(one, needs) for one in positions):
        yield f"{where}: {_names(positions)} {LACKS[needs]}"
        return
    obstacles = {name_of(one): method.obstacle(one) for one in positions if method.applies_to(one)}
    for name, obstacle in obstacles.items():
        if obstacle is not None:
            yield f"{where}: {name} cannot be read so: {obstacle}"


def _where(method: Method) -> str:
    if isinstance(method, Sinks):
        return f"--sinks {method.sinks}"
    return f"--method {method.text}"


def rotating() -> str:
    """The encodings that turn queries and keys by position."""
    return ", ".join(name for name, kind in REGISTRY.items() if kind.rotates)


def name_of(position: Position) -> str:
    """The name of an encoding in the registry."""
    names = [name for name, kind in REGISTRY.items() if kind is type(position)]
    return names[0] if names else type(position).__name__


def _names(positions: Sequence[Position]) -> str:
    return " or ".join(dict.fromkeys(name_of(one) for one in positions))


LACKS = {
    "rotates": (
        f"does not turn queries and keys by position; it is for {rotating()}, and for sum with one"
        " of them"
    ),
    "stretches": "has no base that can grow; it is for rotary without scaling, alone or in sum",
}
"""What an encoding lacks without an attribute that a method needs."""
