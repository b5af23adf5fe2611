"""Spellings of GPT-NeoX, KERPLE and MEP: what each means here, or why it has no effect."""

from typing import Any

from megatron.config.faults import Report, contradiction
from megatron.config.neox_keys import AT_THE_END, fold_neox, translate_neox
from megatron.config.neox_keys import NAMES as OF_NEOX
from megatron.config.published_encodings import OF_ENCODINGS, fold_into_encoding, spelled_today
from megatron.config.read import Nested

SWITCHED_OFF = "_switched_off"
RENAMED = {
    "checkpoint_factor": "save_interval",
    "exit_duration_in_mins": "exit_duration",
    "bfloat16": "bf16",
    "gpt_j_residual": "parallel_residual",
    "num_kv_heads": "num_key_value_heads",
}
OLD_VALUES = {  # key -> {a value's older spelling: today's}
    "init_method": {"small_init_init": "small_init"},
    "output_layer_init_method": {"wang_init_method": "wang_init"},
}

PRECISIONS: dict[str, str] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "scaled_upper_triang_masked_softmax_fusion",
            "scaled_masked_softmax_fusion",
            "bias_gelu_fusion",
            "bias_dropout_fusion",
            "layernorm_fusion",
            "rope_fusion",
        ),
        "PyTorch's own kernels are used and nothing needs to be built",
    ),
    **dict.fromkeys(
        (
            "checkpoint_num_layers",
            "partition_activations",
            "synchronize_each_layer",
            "contiguous_checkpointing",
            "checkpoint_in_cpu",
        ),
        "checkpoint_activations recomputes every layer and has no variants",
    ),
    **dict.fromkeys(
        ("wall_clock_breakdown", "steps_per_print"),
        "time and tokens per second are logged every log_interval steps",
    ),
    **dict.fromkeys(
        (
            "log_param_norm",
            "log_grad_pct_zeros",
            "log_optimizer_states",
        ),
        "this is not measured",
    ),
    "attention_softmax_in_fp32": (
        "the softmax and the encoding's tables are computed in float32 anyway"
    ),
    "apply_query_key_layer_scaling": (
        "scores are scaled in float32 and the result does not depend on it"
    ),
    "checkpoint_validation_with_forward_pass": (
        "a saved checkpoint is not run through the model again"
    ),
    "no_load_rng": "the randomness of a step depends on the seed, the step and the rank alone",
    "output_layer_parallelism": "there is no tensor parallelism",
    "wandb_init_all_ranks": "the first rank logs what concerns all of them",
    "comment": "it was a comment for Slurm",
    "scale_factor_num": "it was read only by dead code of the MEP fork",
}
FIXED: dict[str, tuple[Any, str]] = {
    "gpt_j_tied": (False, "attention and MLP have a norm of their own each"),
    "use_qk_layernorm": (
        False,
        "GPT-NeoX normalises all heads of a token together; write qk_norm: true to do so head by"
        " head",
    ),
}
# Their meaning depends on the pos_emb and the norm that win.
AFTER_MERGE = (*OF_ENCODINGS, *AT_THE_END, "rms_norm_epsilon")
NAMES = {*RENAMED, *NO_EFFECT, *FIXED, *AFTER_MERGE, *OF_NEOX, "bf16"}


def translate(source: dict[str, Any], report: Report) -> dict[str, Any]:
    """One source in today's spelling, so that a later source wins whatever the spelling."""
    given = dict(source)
    for old, new in RENAMED.items():
        if old in given:
            _move(given, old, new, report)
    for key, spellings in OLD_VALUES.items():
        if isinstance(given.get(key), str):
            given[key] = spellings.get(given[key], given[key])
    _precision(given, report)
    _weight_decay(given, report)
    _zero(given, report)
    translate_neox(given, report)
    spelled_today(given, report)
    for key in list(given):
        if key in NO_EFFECT:
            del given[key]
            report.note(f"{key}: accepted, has no effect here: {NO_EFFECT[key]}")
        elif key in FIXED:
            only, why = FIXED[key]
            if given.pop(key) != only:
                report.fault(f"{key}: {why}; set it to {str(only).lower()} or drop it")
    return given


def _move(given: dict[str, Any], old: str, new: str, report: Report) -> None:
    value = given.pop(old)
    if new in given and given[new] != value:
        report.fault(contradiction(f"{new}: {given[new]}", f"{old}: {value}"))
    given[new] = value


def _precision(given: dict[str, Any], report: Report) -> None:
    """All older ways to choose a precision become `precision`; `fp16` keeps the loss scaling."""
    chosen: dict[str, str] = {}  # precision by the setting that chooses it
    word = given.get("precision")
    if isinstance(word, str):
        del given["precision"]
        chosen[f"precision: {word}"] = PRECISIONS.get(word, word)
    if "bf16" in given:
        chosen |= _bf16(given, report)
    if isinstance(given.get("fp16"), bool):
        given["fp16"] = Nested(enabled=given["fp16"])
    if isinstance(given.get("fp16"), dict):
        chosen |= _fp16(given, report)
    different = set(chosen.values())
    if len(different) > 1:
        report.fault(f"precision: {contradiction(*chosen)}")
    elif different:
        given["precision"] = different.pop()


def _bf16(given: dict[str, Any], report: Report) -> dict[str, str]:
    """{setting: bf16} if the key `bf16`, which is taken away, chooses it."""
    value = given.pop("bf16")
    enabled = value.get("enabled", False) if isinstance(value, dict) else value
    if not isinstance(enabled, bool):
        report.fault(f"bf16: must be {{enabled: true}} or {{enabled: false}}, got {value!r}")
        return {}
    if not enabled:
        given.setdefault(SWITCHED_OFF, []).append("bf16")
        return {}
    return {"bf16.enabled: true": "bf16"}


def _fp16(given: dict[str, Any], report: Report) -> dict[str, str]:
    """{setting: precision} if the mapping `fp16`, which keeps its loss scaling, chooses one."""
    same_kind = type(given["fp16"])  # dict, or Nested from dotted words
    scaling = same_kind(given.pop("fp16"))
    enabled = _enabled(scaling, report)
    kind = scaling.pop("type", None)
    if scaling:
        given["fp16"] = scaling
    if enabled not in (None, True, False):
        report.fault(f"fp16.enabled: must be true or false, got {enabled!r}")
        return {}
    meaning = "fp16" if kind is None else PRECISIONS.get(str(kind))
    if meaning not in ("bf16", "fp16"):
        report.fault(f"fp16.type: must be fp16 or bfloat16, got {kind!r}")
        return {}
    if enabled is False:
        given.setdefault(SWITCHED_OFF, []).append("fp16")
        return {}
    if kind is not None:
        if meaning == "bf16":
            report.note("fp16.type: bfloat16 means precision: bf16, as in GPT-NeoX of 2022")
        return {f"fp16.type: {kind}": meaning}
    return {"fp16.enabled: true": "fp16"} if enabled else {}


def _enabled(scaling: dict[str, Any], report: Report) -> Any:
    """`enabled`, for which GPT-NeoX's files also write `fp16: {fp16: true}`."""
    if scaling.pop("auto_cast", None) is not None:
        report.note("fp16.auto_cast: accepted, has no effect here: a model's inputs are token ids")
    older = scaling.pop("fp16", None)
    enabled = scaling.pop("enabled", older)
    if older is not None and older != enabled:
        report.fault(contradiction(f"fp16.enabled: {enabled}", f"fp16.fp16: {older}"))
    return enabled


def switch_off(merged: dict[str, Any], given: dict[str, Any], report: Report) -> None:
    """`fp16.enabled: false` in a later source cancels the fp16 of an earlier one only."""
    off = given.pop(SWITCHED_OFF, [])
    before = merged.get("precision")
    if "precision" in given or before not in ("bf16", "fp16"):
        return
    if before in off:
        merged["precision"] = "fp32"
    elif off:
        report.note(
            f"{off[0]}.enabled: false leaves precision at {before}; for float32 set precision: fp32"
        )


def _weight_decay(given: dict[str, Any], report: Report) -> None:
    """optimizer.params.weight_decay is weight_decay."""
    optimizer = given.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if optimizer is None or not isinstance(params, dict) or "weight_decay" not in params:
        return
    rest = type(params)(params)  # dict, or Nested from dotted words
    value = rest.pop("weight_decay")
    given["optimizer"] = type(optimizer)({**optimizer, "params": rest})
    kept = given.setdefault("weight_decay", value)
    if kept != value:
        report.fault(
            contradiction(f"weight_decay: {kept}", f"optimizer.params.weight_decay: {value}")
        )


def _zero(given: dict[str, Any], report: Report) -> None:
    zero = given.get("zero_optimization")
    if not isinstance(zero, dict) or "cpu_offload" not in zero:
        return
    rest = type(zero)(zero)  # dict, or Nested from dotted words
    offload = rest.pop("cpu_offload")
    given["zero_optimization"] = rest
    if offload:
        report.fault(
            "zero_optimization.cpu_offload: true is not offered; set it to false or drop it"
        )
        return
    report.note(
        "zero_optimization.cpu_offload: accepted, has no effect here:"
        " nothing is moved to the CPU's memory"
    )


def fold(merged: dict[str, Any], options: set[str], report: Report) -> None:
    """Old keys whose meaning depends on other keys; the chosen encoding takes `options`."""
    fold_into_encoding(merged, options, report)
    fold_neox(merged, report)
    _rms_norm_epsilon(merged, report)


def _rms_norm_epsilon(merged: dict[str, Any], report: Report) -> None:
    """GPT-NeoX has an epsilon for each kind of norm; here the one in use is layernorm_epsilon."""
    if "rms_norm_epsilon" not in merged:
        return
    value = merged.pop("rms_norm_epsilon")
    if merged.get("norm") != "rmsnorm":
        report.note("rms_norm_epsilon: accepted, has no effect here: norm is not rmsnorm")
        return
    merged["layernorm_epsilon"] = value
    report.note(f"rms_norm_epsilon: {value} means layernorm_epsilon, as norm is rmsnorm")
