"""Checks that involve several keys."""

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch

from megatron.config.config import staged
from megatron.config.legacy import CORPORA
from megatron.config.messages import Report, contradiction
from megatron.config.schema import (
    Attention,
    Checkpoint,
    Data,
    Launch,
    Model,
    Optimizer,
    Parallel,
    Position,
    Precision,
    Training,
    as_list,
)
from megatron.errors import UserError
from megatron.files import place_of
from megatron.layer_kinds import layer_called, options_of_layers
from megatron.positions import build, options_of
from megatron.positions.layers import (
    attention_count,
    entries_of,
    layers_of_kinds,
    name_of_layers,
    shape_of,
)
from megatron.positions.outline import Outline
from megatron.splits import PARTS, TASK_PREFIX, parse_split

Faults = Iterator[str]


def check_together(sections: Mapping[str, Any], report: Report, *, trains: bool) -> None:
    """Report keys that don't fit together; a check is skipped if one of its sections is missing.

    trains: False skips the checks that only matter for training
    """
    for check in CHECKS:
        needed = signature(check).parameters
        concerns = trains or check is not _sharing
        if concerns and needed.keys() <= sections.keys():
            for message in check(*(sections[name] for name in needed)):
                report.fault(message)


def _model(model: Model) -> Faults:
    heads, per_query = model.num_attention_heads, model.heads_per_query
    if heads % per_query:
        yield (
            f"heads_per_query: {per_query} does not divide num_attention_heads = {heads}; give a"
            " divisor of it"
        )
    queries = max(1, heads // per_query)
    kv_heads = model.num_key_value_heads or heads
    if kv_heads > heads or queries % min(kv_heads, queries):
        yield (
            f"num_key_value_heads: {kv_heads} do not divide num_attention_heads / heads_per_query ="
            f" {queries}; give a number that does"
        )
    rows, length = model.max_position_embeddings, model.seq_length
    if rows < length:
        yield (
            f"max_position_embeddings: {rows} is less than seq_length = {length};"
            f" set it to {length} or more"
        )
    if model.shared_norm and (not model.parallel_residual or model.norm_placement == "post"):
        yield (
            "shared_norm: attention and MLP can only share a norm if they read the same x; set"
            " parallel_residual: true and norm_placement: pre or both, or remove shared_norm"
        )
    if model.use_bias_in_output and not model.no_weight_tying:
        yield (
            "use_bias_in_output: the output matrix has no bias if it is the embedding; set"
            " no_weight_tying: true, or remove use_bias_in_output"
        )
    kinds = layers_of_kinds(model)
    for key in model.layer_args.keys() - options_of_layers(kinds):
        yield f"layer_args: {key}: no layer ({', '.join(kinds)}) has this option; remove it"
    try:
        for name in kinds:
            layer_called(name).sizes(model)
        shape_of(model)
    except UserError as fault:
        yield str(fault)


def _encoding(model: Model, position: Position, attention: Attention, parallel: Parallel) -> Faults:
    """Build the encoding, because only the encoding knows its options and abilities."""
    default = type(position).model_fields["pos_emb"].default
    other = "pos_emb" if position.pos_emb != default else "pos_emb_args"
    if position.pos_emb_layers and (position.pos_emb != default or position.pos_emb_args):
        yield contradiction(other, "pos_emb_layers")
    attending = attention_count(model)
    patterns = {
        "layers": (model.layers, model.num_layers),
        "pos_emb_layers": (position.pos_emb_layers, attending),
        "window_layers": (attention.window_layers, attending),
    }
    for key, (pattern, layers) in patterns.items():
        if len(pattern) > layers:
            yield (f"{key}: {len(pattern)} entries are too many for {layers} layer(s); remove some")
    if attention.window_layers and attention.window is not None:
        yield contradiction("window", "window_layers")
    if attention.reset_position_ids and not attention.reset_attention_mask:
        yield (
            "reset_position_ids: needs reset_attention_mask: true, because the distance to a token"
            " of another document would be meaningless; set both or neither"
        )
    heads = model.num_attention_heads
    try:
        entries = entries_of(position)
        for entry in entries:
            options_of(entry.name)
        kinds = [layer_called(name) for name in layers_of_kinds(model)]
        shape = shape_of(model)
        # Drawing initial values must not advance the caller's random generator.
        with torch.random.fork_rng(devices=[]), Outline():
            encodings = [build(entry.name, shape, **entry.options) for entry in entries]
        several = len({str(entry) for entry in entries}) > 1
        for encoding, entry in zip(encodings, entries, strict=True):
            if several and encoding.changes_embeddings:
                raise UserError(
                    f"pos_emb_layers: {entry} adds positions to the embeddings, which all layers"
                    " read; use this encoding for all layers or for none"
                )
            kv_heads = min(model.num_key_value_heads or heads, heads // model.heads_per_query)
            encoding.check_heads(kv_heads, model.heads_per_query)
            for kind in kinds:
                if kind.has_encoding:
                    kind.check_position(encoding)
            if attention.paper_precision:
                encoding.use_paper_precision(True)
            if attention.reset_attention_mask:
                encoding.check_documents(restart=attention.reset_position_ids)
            if parallel.context_parallel_size > 1:
                encoding.check_parts()
                if attention.paper_precision:
                    raise UserError(
                        "paper_precision: several ranks would round their sums in a different"
                        " order than a single rank; set it to false, or set context_parallel_size"
                        " to 1"
                    )
    except (UserError, RuntimeError) as fault:  # torch's: a tensor is too large
        yield str(fault)


def _training(model: Model, data: Data, training: Training, parallel: Parallel) -> Faults:
    if training.torch_compile is True and parallel.zero_stage == 3:
        yield (
            "torch_compile: recompiles for every hook of ZeRO stage 3 until it gives up; use stage"
            " 2, or set torch_compile to false"
        )
    key, before = "seq_length_schedule", 0
    schedule = training.seq_length_schedule
    for stage in schedule:
        length = stage.seq_length or model.seq_length
        if model.seq_length % length:
            yield (
                f"{key}: {length} does not divide seq_length = {model.seq_length}, and windows are"
                " cut into equal parts; give a divisor of it"
            )
        if stage.until is None and (stage is not schedule[-1] or length < model.seq_length):
            yield f"{key}: has no until, which only a last stage with all of seq_length may omit"
        elif stage.until is not None and stage.until <= before:
            yield f"{key}: until {stage.until} comes after {before}; sort the stages by until"
        before = stage.until or before
    if 0 < training.train_iters <= before:
        yield (
            f"{key}: covers all {training.train_iters} steps, so none is left for the whole"
            " seq_length; end it earlier"
        )
    if schedule and (data.data_path or "").startswith(TASK_PREFIX):
        yield f"{key}: cuts windows, but each window of a task is one problem; remove it"
    if schedule and training.torch_compile is True:
        yield f"{key}: torch_compile compiles for a single length; remove one of the two keys"


def _stages(
    model: Model, position: Position, attention: Attention, training: Training, parallel: Parallel
) -> Faults:
    """Check each stage as a configuration, and whether the encoding can change to it."""
    if not training.seq_length_schedule or any(_encoding(model, position, attention, parallel)):
        return  # this fault is reported already
    with torch.random.fork_rng(devices=[]), Outline():
        encodings = [
            build(entry.name, shape_of(model), **entry.options) for entry in entries_of(position)
        ]
    for stage in training.seq_length_schedule:
        end = "the end" if stage.until is None else f"step {stage.until}"
        where, options = f"seq_length_schedule: the stage until {end}", stage.pos_emb_args
        changeable = {key for encoding in encodings for key in encoding.changeable(options)}
        for key in options.keys() - changeable:
            yield (
                f"{where}: pos_emb_args.{key} cannot change within a run of"
                f" {name_of_layers(position)}; base and scaling of rotary can"
            )
        new_position, new_attention = staged(position, attention, stage)
        for fault in _encoding(model, new_position, new_attention, parallel):
            yield f"{where}: {fault}"


def _sharing(model: Model, data: Data, training: Training, parallel: Parallel) -> Faults:
    """Evaluation never compiles, always uses all_gather, and may have undivided windows."""
    size, heads = parallel.context_parallel_size, model.num_attention_heads
    stages = [stage.seq_length for stage in training.seq_length_schedule]
    for length in {model.seq_length, data.seq_length_val, *stages} - {None}:
        if length % size:
            yield (
                f"context_parallel_size: {length} tokens cannot be divided equally among {size}"
                " ranks; choose a multiple of it as length"
            )
    if parallel.cp_comm_type == "a2a" and heads % size:
        yield (
            f"context_parallel_size: num_attention_heads = {heads} cannot be divided equally among"
            f" {size} ranks; set cp_comm_type: all_gather, which doesn't divide heads"
        )
    if size > 1 and training.torch_compile is True:
        yield (
            "torch_compile: cannot compile the communication that context_parallel_size needs; set"
            " it to false"
        )


def _checkpoint(checkpoint: Checkpoint) -> Faults:
    if checkpoint.checkpoint_scale == "log" and checkpoint.save_interval < 2:
        yield (
            "checkpoint_scale: log saves at the powers of save_interval ="
            f" {checkpoint.save_interval}; set save_interval to 2 or more"
        )
    if checkpoint.override_lr_scheduler and checkpoint.use_checkpoint_lr_scheduler:
        yield contradiction("override_lr_scheduler", "use_checkpoint_lr_scheduler")


def _optimizer(optimizer: Optimizer, precision: Precision, parallel: Parallel) -> Faults:
    is_cut = precision.dtype != "fp32" or parallel.zero_stage > 0
    if optimizer.optimizer.type == "Muon" and is_cut:
        yield (
            "optimizer.type: Muon needs whole matrices, but bf16 and fp16 run with ZeRO, which"
            " divides them; set zero_optimization.stage: 0 and precision: fp32, or type: Adam"
        )
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"min_lr: {optimizer.min_lr:g} is more than optimizer.params.lr = {optimizer.lr:g};"
            " lower it"
        )
    is_wsd = optimizer.lr_decay_style == "wsd"
    if is_wsd and optimizer.lr_schedule != "standard":
        yield "lr_decay_style: wsd needs lr_schedule: standard, not neox-2022; change one of them"
    for key in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
        if not is_wsd and getattr(optimizer, key) != type(optimizer).model_fields[key].default:
            yield f"{key}: only works with lr_decay_style: wsd; set that, or remove this key"
    steps, decay = optimizer.lr_decay_iters, optimizer.lr_wsd_decay_iters
    if is_wsd and steps and decay + optimizer.warmup * steps > steps:
        yield (
            f"lr_wsd_decay_iters: {decay} steps of decay and the warm-up are more than"
            f" lr_decay_iters = {steps}; lower one of them"
        )


def _data(data: Data, training: Training) -> Faults:
    path, named = data.data_path, [key for key in CORPORA if getattr(data, key)]
    if data.task_args and not (path or "").startswith(TASK_PREFIX):
        yield "task_args: are the options of a task, but no task is set; add data_path=task:NAME"
    if path and named:
        yield (
            f"data_path: names one corpus for all parts (divided by split), and {named[0]} names"
            " whole corpora; keep only one, for example with data_path=null"
        )
    for part in PARTS:
        key = f"{part}_data_weights"
        weights, paths = getattr(data, key), getattr(data, f"{part}_data_paths")
        if weights and len(weights) != len(paths):
            yield (
                f"{key}: {len(weights)} weights for the {len(paths)} corpora of"
                f" {part}_data_paths; give one for each"
            )
        if data.weight_by_num_documents and weights:
            yield contradiction("weight_by_num_documents", key)
    trained = {place_of(prefix) for prefix in data.train_data_paths}
    for key in ("data_path", *CORPORA):
        for prefix in as_list(getattr(data, key)):
            if prefix.endswith((".bin", ".idx")):
                yield f"{key}: {prefix} is a file name; give the prefix {prefix[:-4]}"
            if key in CORPORA[1:] and place_of(prefix) in trained:
                yield (
                    f"{key}: {prefix} is also used for training (train_data_paths), so its loss"
                    " says nothing about new text; prepare held-out text"
                )
    try:
        parse_split(data.split)
    except UserError as fault:
        yield str(fault)


def _launch(launch: Launch) -> Faults:
    if (launch.num_nodes or 1) > 1 and not launch.hostfile:
        yield "num_nodes: several machines need a hostfile with lines `host slots=8`; set hostfile"


CHECKS: tuple[Callable[..., Faults], ...] = (
    _model,
    _encoding,
    _training,
    _stages,
    _sharing,
    _checkpoint,
    _optimizer,
    _data,
    _launch,
)
"""Each check gets the sections that its parameters name."""


def zero_that_runs(sections: dict[str, Any], merged: Mapping[str, Any], report: Report) -> None:
    """Set the ZeRO stage that is really used: bf16 and fp16 need at least stage 1.

    merged: the keys that were set; a note says if the stage among them is not the one that is used.
    """
    parallel, dtype = sections["parallel"], sections["precision"].dtype
    if parallel.zero_stage > 0 or dtype == "fp32":
        return
    if "stage" in merged.get("zero_optimization", {}):
        report.note(
            f"zero_optimization.stage: 0 runs as 1 with {dtype}: stage 1 has float32 gradients for"
            " bf16 and gives access to the float32 master weights"
        )
    stage_1 = parallel.zero_optimization.model_copy(update={"stage": 1})
    sections["parallel"] = parallel.model_copy(update={"zero_optimization": stage_1})
