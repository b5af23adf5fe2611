"""The cost of a sweep: tokens, floating point operations, time on a device."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megatron.config import Config
from megatron.config.schema import as_list
from megatron.model import Architecture, size
from megatron.protocols import Request, protocol_of, usual_protocol
from megatron.results.row import ATTENTION_INPUTS
from megatron.sweeps.cells import State, Sweep
from megatron.training.batches import likely_rows, windows_per_step
from megatron.training.metrics import peak_of

UTILISATION = 0.35  # share of a device's speed in large matrix products that we assume for training

# --device NAME -> CUDA's name of the device, for its peak in training/metrics.py
DEVICES = {
    "v100": "V100-SXM2-32GB",
    "a100": "A100-SXM4-80GB",
    "h100": "H100 80GB HBM3",
    "h200": "H200",
    "b200": "B200",
    "l40s": "L40S",
    "rtx3090": "GeForce RTX 3090",
    "rtx4090": "GeForce RTX 4090",
}
Operations = dict[str, float]  # by the number format of matrix products


def cost(sweep: Sweep, states: Sequence[State]) -> tuple[int, Operations, Operations]:
    """The missing work: training tokens, and operations of training and evaluation."""
    tokens = 0
    training, evaluation = defaultdict(float), defaultdict(float)
    for cell, state in zip(sweep.cells, states, strict=True):
        config, vocab = cell.config, likely_rows(cell.config)
        precision = config.precision
        cell_tokens, cell_flops = training_cost(config, vocab, max(0, cell.steps - state.step))
        tokens += cell_tokens
        training[precision.products(precision.dtype)] += cell_flops
        for call in state.missing:
            products = precision.products(call.options.get("dtype", "fp32"))
            evaluation[products] += evaluation_flops(call.options, config, vocab)
    return tokens, training, evaluation


def hours(operations: Operations, device: str, share: float = UTILISATION) -> float:
    """Hours on a device in DEVICES, at a share of its data sheet's speed."""
    seconds = 0.0
    for products, flops in operations.items():
        # A V100 has no bf16, so it would use fp16.
        peak = peak_of(DEVICES[device], products) or peak_of(DEVICES[device], "fp16")
        seconds += flops / (cast(float, peak) * 1e12 * share)
    return seconds / 3600


def training_cost(config: Config, vocab: int, steps: int) -> tuple[int, float]:
    """Tokens and operations (forward and backward) of one rank's steps."""
    length = config.model.seq_length
    tokens = steps * windows_per_step(config) * length
    return tokens, tokens * size.BACKWARD * forward_flops(config, vocab, length)


def forward_flops(config: Config, vocab: int, length: int) -> float:
    """Operations per token in a causal window of `length`; on average a token attends to half of
    it."""
    return size.forward_flops(Architecture.of(config.model), vocab, keys=length / 2)


def evaluation_flops(options: Mapping[str, Any], config: Config, vocab: int) -> float:
    """Operations of one call of evaluate.py. options: of the call, with the keys that it sets.

    Each target counts once; `tail` and `sliding` compute some of them several times.
    """
    measured = config.evaluation
    lengths = as_list(options.get("lengths", options.get("eval_lengths", measured.eval_lengths)))
    request = Request(sorted(lengths), options.get("eval_tokens", measured.eval_tokens))
    names = as_list(options.get("protocol", usual_protocol(config.data.data_path)))
    varied = [options[key] for key in ATTENTION_INPUTS if options.get(key) is not None]
    variants = math.prod(len(as_list(values)) for values in varied)
    total = 0.0
    for name in names:
        protocol = protocol_of(name, options)
        for length in protocol.lengths(request):
            tokens = protocol.tokens(request, length)
            total += variants * tokens * forward_flops(config, vocab, length)
    return total
