"""Keys of current GPT-NeoX that no key here is the same as: what each means, or why it cannot."""

from collections.abc import Sequence
from typing import Any

from megatron.config.faults import Report
from megatron.config.paths import CORPORA
from megatron.config.sections.fields import as_list

LOCAL = "local"
WINDOWED = ("flash", LOCAL)  # kinds of attention that sliding_window_width acts on
FULL_ATTENTION = ("global",)
MOST_LAYERS = 1000
DATA_WEIGHTS = ("train_data_weights", "valid_data_weights", "test_data_weights")
OFF: dict[str, str] = {  # only false or nothing; else why not
    **dict.fromkeys(
        (
            "te_columnparallel",
            "te_rowparallel",
            "te_layernorm_mlp",
            "te_mha",
            "te_fp8_format",
            "te_fp8_wgrad",
            "te_fp8_amax_history_len",
            "te_fp8_amax_compute_algo",
            "te_fp8_margin",
            "te_fp8_mha",
        ),
        "TransformerEngine and fp8 are not used; drop the key",
    ),
    "use_bnb_optimizer": "optimizers of bitsandbytes are not offered; drop the key",
    "deepspeed_slurm": "write launcher: slurm",
    "deepspeed_extra_args": (
        "DeepSpeed gets settings of its own from the keys here; drop it, or write their keys"
    ),
}
OF_ZERO = {
    "load_from_fp32_weights": "a checkpoint's weights are read in float32 in any case",
    "round_robin_gradients": "it changes speed alone",
}
# Read where all sources are merged.
AT_THE_END = ("mlp_multiple_of",)
NAMES = {
    "attention_config",
    "sliding_window_width",
    "data_types",
    *OFF,
    *AT_THE_END,
}


def translate_neox(given: dict[str, Any], report: Report) -> None:
    """Replace or refuse, in one source, the keys that GPT-NeoX alone has."""
    for key in sorted(OFF.keys() & given.keys()):
        if given.pop(key):
            report.fault(f"{key}: {OFF[key]}")
        else:
            report.note(f"{key}: accepted, has no effect here: it is off")
    _attention(given, report)
    _data_types(given, report)
    _zero(given, report)
    _data_paths(given, report)


def _attention(given: dict[str, Any], report: Report) -> None:
    """attention_config and sliding_window_width become `window` or `window_layers`."""
    has_kinds = "attention_config" in given
    value = given.pop("attention_config", None)
    window = _sliding_window(given, report)
    kinds = _kinds(value) if has_kinds else ["flash"]
    if kinds is None:
        report.fault(
            f'attention_config: must be like [[["global"], 12]], got {value!r}; drop it for full'
            " attention in every layer"
        )
        return
    others = sorted({*kinds} - {*WINDOWED, *FULL_ATTENTION})
    if others:
        report.fault(
            f"attention_config: {', '.join(others)} is not offered, only global, flash and local;"
            " drop it, or see the keys window, window_layers and blockwise"
        )
    elif window is None and LOCAL in kinds:
        report.fault(
            "attention_config: local needs sliding_window_width here, which GPT-NeoX counts in"
            " blocks of DeepSpeed's sparse attention; give it, or window_layers: [256, null]"
        )
    elif window is None or len({*kinds}) == 1:
        if window is not None:
            given.setdefault("window", window)
        if has_kinds:
            report.note(
                "attention_config: accepted, has no effect here: every layer is the same, and"
                " global and flash are full attention"
            )
    else:
        pattern = [window if kind in WINDOWED else None for kind in kinds]
        given.setdefault("window_layers", pattern)
        report.note(
            f"attention_config: means window_layers: {_shown(pattern)}, exactly so many tokens,"
            " where GPT-NeoX's local attention has blocks"
        )


def _shown(pattern: Sequence[int | None]) -> str:
    words = ["null" if one is None else str(one) for one in pattern]
    return f"[{', '.join(words)}]"


def _kinds(value: Any) -> list[str] | None:
    """The kinds of an attention_config, which repeat over the layers; None for another form."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, str) for item in value):  # one for each layer
        return list(value)
    kinds: list[str] = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], list):
            return None
        names, times = [str(name) for name in item[0]], item[1]
        if times == "all":
            return names
        if not isinstance(times, int) or not 0 < times <= MOST_LAYERS:
            return None
        kinds += names * times
    return kinds


def _sliding_window(given: dict[str, Any], report: Report) -> int | None:
    """GPT-NeoX counts the tokens before the query, and `window` counts the query too."""
    width = given.pop("sliding_window_width", None)
    if width is None:
        return None
    if not isinstance(width, int) or isinstance(width, bool) or width < 0:
        report.fault(f"sliding_window_width: must be a whole number, got {width!r}")
        return None
    report.note(
        f"sliding_window_width: {width} means window: {width + 1}, as GPT-NeoX does not count the"
        " token itself"
    )
    return width + 1


def _data_types(given: dict[str, Any], report: Report) -> None:
    if given.pop("data_types", None) is not None:
        report.note(
            "data_types: accepted, has no effect here: precision and fp32_allreduce say what"
            " gradients are summed in"
        )


def _zero(given: dict[str, Any], report: Report) -> None:
    zero = given.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    found = OF_ZERO.keys() & zero.keys()
    for key in sorted(found):
        report.note(f"zero_optimization.{key}: accepted, has no effect here: {OF_ZERO[key]}")
    rest = {key: value for key, value in zero.items() if key not in found}
    given["zero_optimization"] = type(zero)(rest)  # dict, or Nested from dotted words


def _data_paths(given: dict[str, Any], report: Report) -> None:
    """One corpus for training, validation and test, as in the files of Pythia, is data_path."""
    paths = [given.get(key) for key in CORPORA]
    corpora = {str(path) for value in paths for path in as_list(value)}
    if None in paths or len(corpora) != 1:
        return
    for key in (*CORPORA, *DATA_WEIGHTS):
        given.pop(key, None)
    given["data_path"] = corpora.pop()
    report.note(
        f"{', '.join(CORPORA)}: mean data_path, whose parts split divides; GPT-NeoX would"
        " validate on the text of the training"
    )


def fold_neox(merged: dict[str, Any], report: Report) -> None:
    """mlp_multiple_of says that intermediate_size is counted as in GPT-NeoX."""
    multiple = merged.pop("mlp_multiple_of", None)
    if multiple is None:
        return
    hidden = merged.get("hidden_size")
    width = merged.get("intermediate_size") or (4 * hidden if isinstance(hidden, int) else 0)
    if not isinstance(width, int) or width <= 0:
        return  # reported with the other keys
    if not isinstance(multiple, int) or multiple <= 0:
        report.fault(f"mlp_multiple_of: must be a whole number > 0, got {multiple!r}")
        return
    if merged.get("activation") != "swiglu":
        step, wanted = 2 * multiple, width
    else:  # two thirds for gate and values together, so that the MLP has as many weights
        step, wanted = multiple, int(width * 2 / 3) // 2
    actual = -(-wanted // step) * step
    merged["intermediate_size"] = actual
    report.note(
        f"mlp_multiple_of: {multiple} with a width of {width} means intermediate_size: {actual}, as"
        " GPT-NeoX counts it"
    )
