"""What no key can say alone: faults between keys."""

from typing import Any

import torch

from megatron.config.legacy import Report
from megatron.errors import UserError
from megatron.positions import REGISTRY, Shape, build, options_of


def check_together(sections: dict[str, Any], merged: dict[str, Any], report: Report) -> None:
    """What no key can say alone."""
    for names, check in CHECKS:
        if all(name in sections for name in names):
            for line in check(*(sections[name] for name in names)):
                report.fault(line)
    if "parallel" in sections and "precision" in sections:
        sections["parallel"] = _zero_for(
            sections["precision"], sections["parallel"], merged, report
        )


def _heads(model: Any) -> list[str]:
    heads, hidden = model.num_attention_heads, model.hidden_size
    if hidden % heads == 0:
        return []
    fits = max(hidden // heads, 1) * heads
    return [
        f"hidden_size: {hidden} cannot be split over num_attention_heads = {heads}; try hidden_size = {fits}"
    ]


def _table(model: Any) -> list[str]:
    rows, length = model.max_position_embeddings, model.seq_length
    return (
        []
        if rows >= length
        else [
            f"max_position_embeddings: {rows} is less than seq_length = {length}; set it to {length} or more"
        ]
    )


def _name(position: Any) -> list[str]:
    try:
        options_of(position.pos_emb)
    except UserError as fault:
        return [str(fault)]
    return []


def _encoding(model: Any, position: Any) -> list[str]:
    """Build the encoding, which alone knows its options."""
    heads = model.num_attention_heads
    if model.hidden_size % heads or position.pos_emb not in REGISTRY:
        return []  # reported already
    shape = Shape(heads, model.hidden_size // heads, model.hidden_size, model.seq_length)
    try:
        with torch.random.fork_rng(
            devices=[]
        ):  # drawing first values must not move the caller's generator
            build(position.pos_emb, shape, **position.pos_emb_args)
    except UserError as fault:
        return [str(fault)]
    return []


def _batch(training: Any) -> list[str]:
    whole, part = (
        training.train_batch_size,
        (training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps),
    )
    if whole is None or whole % part == 0:
        return []
    return [
        f"train_batch_size: {whole} is not a multiple of train_micro_batch_size_per_gpu *"
        f" gradient_accumulation_steps = {part}; try train_batch_size = {max(whole // part, 1) * part}"
    ]


def _compiled(training: Any, parallel: Any) -> list[str]:
    if not (training.torch_compile and parallel.zero_stage == 3):
        return []
    return [
        "torch_compile: compiles again for every hook of ZeRO stage 3 until it gives up; use stage 2, or set false"
    ]


def _rates(optimizer: Any) -> list[str]:
    if optimizer.min_lr <= optimizer.lr:
        return []
    return [
        f"min_lr: {optimizer.min_lr:g} is more than optimizer.params.lr = {optimizer.lr:g}; lower it"
    ]


def _data(data: Any) -> list[str]:
    found = []
    path = data.data_path or ""
    if "," in path:
        found.append(
            f"data_path: {path!r} names several files; give one prefix, mixing corpora is not offered yet"
        )
    if path.endswith((".bin", ".idx")):
        found.append(f"data_path: {path} is a file; give the prefix {path[:-4]}")
    try:
        shares = [float(part) for part in data.split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        found.append(f'split: {data.split!r} is not up to three shares such as "949,50,1"')
    return found


def _launch(launch: Any) -> list[str]:
    found = []
    if launch.include and launch.exclude:
        found.append("exclude: cannot be combined with include; keep one of them")
    if (launch.include or launch.exclude) and (launch.num_gpus or launch.num_nodes):
        found.append(
            "num_gpus: num_gpus and num_nodes cannot be combined with include or exclude; keep one kind"
        )
    if (launch.num_nodes or 1) > 1 and not launch.hostfile:
        found.append(
            f"num_nodes: {launch.num_nodes} machines need a hostfile with lines `host slots=8`; set hostfile"
        )
    return found


CHECKS = (
    (("model",), _heads),
    (("model",), _table),
    (("position",), _name),
    (("model", "position"), _encoding),
    (("training",), _batch),
    (("training", "parallel"), _compiled),
    (("optimizer",), _rates),
    (("data",), _data),
    (("launch",), _launch),
)


def _zero_for(precision: Any, parallel: Any, merged: dict[str, Any], report: Report) -> Any:
    """bf16 and fp16 need ZeRO 1, and buckets mean something only from there on."""
    zero = parallel.zero_optimization
    if zero.stage == 0 and precision.dtype != "fp32":
        if (
            isinstance(merged.get("zero_optimization"), dict)
            and "stage" in merged["zero_optimization"]
        ):
            report.note(
                f"zero_optimization.stage: 0 runs as 1 with {precision.dtype}:"
                " from there on DeepSpeed has float32 gradients for bf16 and hands out its float32 master weights"
            )
        return parallel.model_copy(
            update={"zero_optimization": zero.model_copy(update={"stage": 1})}
        )
    unused = [
        key for key in type(zero).model_fields if key != "stage" and getattr(zero, key) is not None
    ]
    if zero.stage == 0 and unused:
        report.note(
            f"zero_optimization.{', '.join(unused)}: accepted, have no effect here: they act from stage 1 on"
        )
    return parallel
