"""What a sweep will cost: tokens, floating point operations, hours on this machine's device, disk."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config import Config
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.model import flops
from megatron.sweeps.plan import Evaluation, Sweep
from megatron.sweeps.state import State, seconds_per_step

UTILISATION = (
    0.35  # of a large matrix product's speed; assumed where no run of this shape was timed
)
VOCAB = 50304  # GPT-2's, where the data are not there to ask
BYTES = 16  # per parameter of a checkpoint: float32 weights, the engine's copy, Adam's two averages


@dataclass(frozen=True)
class Cost:
    """What is still to be done; seconds of one device."""

    tokens: int
    flops: float
    seconds: float
    disk: int
    measured: bool
    """Whether every training's speed was measured in this sweep rather than assumed."""


def cost(sweep: Sweep, states: Sequence[State], device_flops: float) -> Cost:
    """Of all that is missing. device_flops: of a large matrix product, see `speed_of`."""
    tokens, flops, seconds, disk, measured = 0, 0.0, 0.0, 0, True
    timed = _timed(sweep)
    for cell, state in zip(sweep.cells, states, strict=True):
        config, vocab = cell.config, _vocab(cell.config)
        trained = (cell.steps - state.step) * windows_per_step(config) * config.model.seq_length
        training = trained * 3 * forward_flops(config, vocab, config.model.seq_length)
        evaluating = sum(_evaluation_flops(one, config, vocab) for one in state.missing)
        speed = timed.get(_shape(config))
        measured = measured and (speed is not None or not trained)
        tokens, flops = tokens + trained, flops + training + evaluating
        rate = device_flops * UTILISATION if speed is None else speed
        seconds += (training + evaluating) / rate
        if state.kind != "done":
            disk += (
                BYTES * parameters(config, vocab) * (_kept(config) + 1)
            )  # one more while the next is written
    return Cost(tokens, flops, seconds, disk, measured)


def forward_flops(config: Config, vocab: int, length: int) -> float:
    """Operations of one token in a causal window of `length`: it attends to half of it."""
    model = config.model
    return flops.forward_flops(model.num_layers, model.hidden_size, vocab, keys=length / 2)


def parameters(config: Config, vocab: int) -> int:
    """Numbers in the model's matrices; biases and norms are less than a percent more."""
    model = config.model
    looked_up = vocab * model.hidden_size if model.no_weight_tying else 0
    return flops.matrix_weights(model.num_layers, model.hidden_size, vocab) + looked_up


def windows_per_step(config: Config) -> int:
    return (
        config.training.train_micro_batch_size_per_gpu * config.training.gradient_accumulation_steps
    )


def speed_of(device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """Operations per second of a square matrix product, the best of five."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _timed(sweep: Sweep) -> dict[tuple, float]:
    """Operations per second that this sweep's own runs reached in training, by shape."""
    found: dict[tuple, list[float]] = {}
    for cell in sweep.cells:
        if seconds := seconds_per_step(cell):
            length = cell.config.model.seq_length
            per_step = 3 * windows_per_step(cell.config) * length
            per_step *= forward_flops(cell.config, _vocab(cell.config), length)
            found.setdefault(_shape(cell.config), []).append(per_step / seconds)
    return {shape: statistics.median(values) for shape, values in found.items()}


def _shape(config: Config) -> tuple:
    model = config.model
    return model.num_layers, model.hidden_size, model.seq_length, config.precision.precision


def _evaluation_flops(evaluation: Evaluation, config: Config, vocab: int) -> float:
    said = evaluation.options
    lengths = _several(
        said.get("lengths", said.get("eval_lengths", config.evaluation.eval_lengths))
    )
    protocols = _several(said.get("protocol", "equal_tokens"))
    variants = len(_several(said.get("window", 0))) * len(_several(said.get("logn_scale", 0)))
    text = said.get("eval_tokens", config.evaluation.eval_tokens)
    total = 0.0
    for protocol in protocols:
        for length, count in window_counts(protocol, lengths, text, said).items():
            total += variants * count * length * forward_flops(config, vocab, length)
    return total


def window_counts(
    protocol: str, lengths: Sequence[int], text: int, said: Mapping[str, Any]
) -> dict[int, int]:
    """Windows of each length that a protocol computes on `text` tokens (see megatron.evaluation.protocols), at most."""
    longest = max(lengths)
    region = text // longest * longest
    if protocol == "paper":
        return dict.fromkeys(lengths, int(said.get("windows", 320)))
    if protocol == "tail":
        return dict.fromkeys(
            lengths, len(range(longest, region + 1, max(said.get("tail", 256), longest // 4)))
        )
    if protocol == "position":
        return {longest: region // longest}
    if protocol == "sliding":
        return {
            length: len(range(0, region + 1 - length, said.get("stride") or max(1, length // 2)))
            for length in lengths
        }
    return {length: len(range(0, region + 1 - length, length)) for length in lengths}


def _several(value: object) -> list:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _kept(config: Config) -> int:
    interval, keep = config.checkpoint.save_interval, config.checkpoint.keep_last_n_checkpoints
    written = -(-config.training.train_iters // interval) if interval else 1
    return min(written, keep) if keep else written


def _vocab(config: Config) -> int:
    try:
        known = TokenFile.open(config.data.data_path or "").meta.get("tokenizer", {})
    except UserError:
        known = {}
    rows, multiple = known.get("vocab_size", VOCAB), config.model.make_vocab_size_divisible_by
    return -(-rows // multiple) * multiple
