"""Faults between keys, which no key can show alone."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron.config.corpora_checks import data_faults, epoch_faults
from megatron.config.faults import Report, contradiction
from megatron.config.schema import (
    Attention,
    Checkpoint,
    Launch,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Position,
    Precision,
    Section,
    Training,
)
from megatron.errors import UserError
from megatron.positions import Position as Encoding
from megatron.positions import Shape, options_of
from megatron.positions.base import check_key_heads
from megatron.positions.layers import (
    build_entry,
    check_embeddings,
    entries_of,
    name_of_layers,
)
from megatron.positions.outline import Outline


def check_together(sections: Mapping[str, Section], report: Report) -> None:
    """Report what does not fit together; a check is left out if one of its sections is missing."""
    for names, check in CHECKS:
        if not all(name in sections for name in names):
            continue
        for line in check(*(sections[name] for name in names)):
            report.fault(line)


def _heads(model: Model) -> list[str]:
    heads, hidden = model.num_attention_heads, model.hidden_size
    faults = []
    if model.head_dim is None and hidden % heads:
        fitting = max(hidden // heads, 1) * heads
        faults.append(
            f"hidden_size: {hidden} cannot be split over num_attention_heads = {heads};"
            f" try hidden_size = {fitting}"
        )
    kv_heads = model.num_key_value_heads or heads
    if heads % kv_heads:
        fitting = max(divisor for divisor in range(1, kv_heads + 1) if heads % divisor == 0)
        faults.append(
            f"num_key_value_heads: {kv_heads} do not divide num_attention_heads = {heads};"
            f" try num_key_value_heads = {fitting}"
        )
    return faults


def _table(model: Model) -> list[str]:
    rows, length = model.max_position_embeddings, model.seq_length
    if rows >= length:
        return []
    return [
        f"max_position_embeddings: {rows} is less than seq_length = {length};"
        f" set it to {length} or more"
    ]


def _name(position: Position) -> list[str]:
    try:
        for entry in entries_of(position):
            options_of(entry.name)
    except UserError as fault:
        return [str(fault)]
    if not position.pos_emb_layers:
        return []
    default = type(position).model_fields["pos_emb"].default
    given = "pos_emb" if position.pos_emb != default else None
    if given or position.pos_emb_args:
        return [contradiction(given or "pos_emb_args", "pos_emb_layers")]
    return []


def _patterns(model: Model, position: Position, attention: Attention) -> list[str]:
    """Patterns that no model of so many layers can repeat, or beside what they replace."""
    faults = []
    patterns = {
        "pos_emb_layers": position.pos_emb_layers,
        "window_layers": attention.window_layers,
    }
    for key, pattern in patterns.items():
        if len(pattern) > model.num_layers:
            faults.append(
                f"{key}: {len(pattern)} entries are more than num_layers = {model.num_layers};"
                " leave entries out"
            )
    if attention.window_layers and attention.window is not None:
        faults.append(contradiction("window", "window_layers"))
    return faults


def _encoding(model: Model, position: Position) -> list[str]:
    """Build the encoding, which alone knows its options."""
    if not _can_be_built(model, position):
        return []  # reported already
    try:
        encodings = _built(model, position)
        for encoding in encodings:
            check_key_heads(encoding, model.num_key_value_heads or model.num_attention_heads)
        check_embeddings(encodings, [str(entry) for entry in entries_of(position)])
    except UserError as fault:
        return [str(fault)]
    except RuntimeError as fault:  # a tensor that no memory holds
        reason = str(fault).splitlines()[0]
        return [f"pos_emb: {name_of_layers(position)} cannot be built: {reason}"]
    return []


def _paper(model: Model, position: Position, attention: Attention) -> list[str]:
    """The forks' rounding is known for their own encodings alone."""
    if not attention.paper_precision or not _can_be_built(model, position):
        return []
    if _encoding(model, position):
        return []  # reported already
    try:
        for encoding in _built(model, position):
            encoding.use_paper_precision(True)
    except UserError as fault:
        return [str(fault)]
    return []


def _documents(model: Model, position: Position, attention: Attention) -> list[str]:
    """What keeps documents apart needs an encoding that can."""
    if attention.reset_position_ids and not attention.reset_attention_mask:
        return [
            "reset_position_ids: needs reset_attention_mask: true, because the distance to a token"
            " of another document would mean nothing; set both, or neither"
        ]
    if not attention.reset_attention_mask or not _can_be_built(model, position):
        return []
    if _encoding(model, position):
        return []  # reported already
    try:
        for encoding in _built(model, position):
            encoding.check_documents(restart=attention.reset_position_ids)
    except UserError as fault:
        return [str(fault)]
    return []


def _can_be_built(model: Model, position: Position) -> bool:
    has_shape = model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0
    return has_shape and not _name(position)


def _built(model: Model, position: Position) -> list[Encoding]:
    """The encodings of the pattern; one where layers do not differ."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    head_dim = model.head_dim or hidden // heads
    shape = Shape(heads, head_dim, hidden, model.seq_length)
    # Drawing first values must not move the caller's generator.
    with torch.random.fork_rng(devices=[]), Outline():
        return [build_entry(position, entry, shape) for entry in entries_of(position)]


def _batch(training: Training) -> list[str]:
    whole = training.train_batch_size
    part = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
    if whole is None or whole % part == 0:
        return []
    fitting = max(whole // part, 1) * part
    return [
        f"train_batch_size: {whole} is not a multiple of train_micro_batch_size_per_gpu *"
        f" gradient_accumulation_steps = {part}; try train_batch_size = {fitting}"
    ]


FLEX_VARIES = (
    "flex sums gradients of tables in an order that changes;"
    " set attention_backend to triton, sdpa or eager, or deterministic to false"
)


def _repeats(training: Training, attention: Attention) -> list[str]:
    if training.deterministic and attention.attention_backend == "flex":
        return [f"attention_backend: {FLEX_VARIES}"]
    return []


def _compiled(training: Training, parallel: Parallel) -> list[str]:
    if not (training.torch_compile and parallel.zero_stage == 3):
        return []
    return [
        "torch_compile: compiles again for every hook of ZeRO stage 3 until it gives up;"
        " use stage 2, or set false"
    ]


def _saves(checkpoint: Checkpoint) -> list[str]:
    if checkpoint.checkpoint_scale == "linear" or checkpoint.save_interval >= 2:
        return []
    return [
        f"checkpoint_scale: log saves at the powers of save_interval = {checkpoint.save_interval};"
        " set save_interval to 2 or more"
    ]


def _schedule(checkpoint: Checkpoint) -> list[str]:
    if not (checkpoint.override_lr_scheduler and checkpoint.use_checkpoint_lr_scheduler):
        return []
    return [
        "override_lr_scheduler: takes the schedule of this configuration, and"
        " use_checkpoint_lr_scheduler that of the checkpoint; keep one of them"
    ]


def _rates(optimizer: Optimizer) -> list[str]:
    if optimizer.min_lr <= optimizer.lr:
        return []
    return [
        f"min_lr: {optimizer.min_lr:g} is more than optimizer.params.lr = {optimizer.lr:g};"
        " lower it"
    ]


def _launch(launch: Launch) -> list[str]:
    faults = []
    filters = launch.include or launch.exclude
    counts = launch.num_gpus or launch.num_nodes
    if launch.include and launch.exclude:
        faults.append("exclude: cannot be combined with include; keep one of them")
    if filters and counts:
        faults.append(
            "num_gpus: num_gpus and num_nodes cannot be combined with include or exclude;"
            " keep one kind"
        )
    machines = launch.num_nodes or 1
    if machines > 1 and not launch.hostfile:
        faults.append(
            f"num_nodes: {machines} machines need a hostfile with lines `host slots=8`;"
            " set hostfile"
        )
    return faults


def _secrets(logging: Logging) -> list[str]:
    address = urlsplit(logging.wandb_host or "")
    if address.username is None and address.password is None:
        return []
    # The value is not repeated: a message goes into logs.
    return [
        "wandb_host: holds a name or password, which every checkpoint would keep;"
        " write the address alone, and give the key in WANDB_API_KEY"
    ]


def _profiled_steps(logging: Logging) -> list[str]:
    first, last = logging.profile_step_start, logging.profile_step_stop
    wanted = logging.profile or logging.memory_profiling
    if not wanted or first <= last:
        return []
    return [f"profile_step_stop: {last} is before profile_step_start = {first}; raise it"]


CHECKS: tuple[tuple[tuple[str, ...], Callable[..., list[str]]], ...] = (
    (("model",), _heads),
    (("model",), _table),
    (("position",), _name),
    (("model", "position"), _encoding),
    (("model", "position", "attention"), _patterns),
    (("model", "position", "attention"), _paper),
    (("model", "position", "attention"), _documents),
    (("training",), _batch),
    (("training", "parallel"), _compiled),
    (("training", "attention"), _repeats),
    (("checkpoint",), _saves),
    (("checkpoint",), _schedule),
    (("optimizer",), _rates),
    (("data",), data_faults),
    (("data", "training"), epoch_faults),
    (("launch",), _launch),
    (("logging",), _secrets),
    (("logging",), _profiled_steps),
)


def zero_that_runs(
    precision: Precision, parallel: Parallel, merged: Mapping[str, Any], report: Report
) -> Parallel:
    """The section `parallel` as it runs: bf16 and fp16 need at least ZeRO stage 1.

    merged: the given keys; a note says where a given stage or bucket has no effect.
    """
    zero = parallel.zero_optimization
    if zero.stage > 0:
        return parallel
    if precision.dtype == "fp32":
        names = [name for name in type(zero).model_fields if name != "stage"]
        unused = [name for name in names if getattr(zero, name) is not None]
        if unused:
            report.note(
                f"zero_optimization.{', '.join(unused)}: accepted, have no effect here:"
                " they act from stage 1 on"
            )
        return parallel
    given = merged.get("zero_optimization")
    if isinstance(given, dict) and "stage" in given:
        report.note(
            f"zero_optimization.stage: 0 runs as 1 with {precision.dtype}: from there on DeepSpeed"
            " has float32 gradients for bf16 and hands out its float32 master weights"
        )
    stage_1 = zero.model_copy(update={"stage": 1})
    return parallel.model_copy(update={"zero_optimization": stage_1})
