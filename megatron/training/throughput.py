"""How fast training is: model FLOP/s by PaLM's formula, the share of the device's peak, and peak memory."""

import re
import resource
import sys
from dataclasses import dataclass

import torch

from megatron.config.schema import Model
from megatron.model.flops import BACKWARD, attention_flops, palm_weights

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM2-\d+GB", {"fp16": 125, "fp32": 15.7}),
    (r"V100-PCIE-\d+GB", {"fp16": 112, "fp32": 14}),
    (r"A100(-SXM4|-PCIE)?[- ]\d+GB( PCIe)?", {"fp16": 312, "bf16": 312, "fp32": 19.5}),
    (r"H100 80GB HBM3", {"fp16": 989, "bf16": 989, "fp32": 67}),
    (r"H100 PCIe", {"fp16": 756, "bf16": 756, "fp32": 51}),
    (r"H100 NVL", {"fp16": 835, "bf16": 835, "fp32": 60}),
    (r"H200", {"fp16": 989, "bf16": 989, "fp32": 67}),
    (r"H200 NVL", {"fp16": 835, "bf16": 835, "fp32": 60}),
    (r"B200", {"fp16": 2250, "bf16": 2250, "fp32": 75}),
    (r"L40S", {"fp16": 362, "bf16": 362, "fp32": 91.6}),
    (r"GeForce RTX 4090", {"fp16": 165.2, "bf16": 165.2, "fp32": 82.6}),
    (r"GeForce RTX 3090", {"fp16": 71, "bf16": 71, "fp32": 35.6}),
)
"""Dense TFLOP/s by device name (the whole of it) and precision, from NVIDIA's data sheets and, for GeForce, the
architecture's white papers with float32 accumulation; data sheets often print twice this, "with sparsity"."""


@dataclass(frozen=True)
class Throughput:
    """FLOPs of one trained token: `linear` in matrix products with weights, `attention` in scores and their sums.

    peak: TFLOP/s of one device, None where unknown
    """

    linear: float
    attention: float
    peak: float | None = None

    def numbers(self, tokens_per_second: float) -> dict[str, float]:
        """What one device achieves at that many tokens/s: model TFLOP/s, and shares of its peak where that is known.

        mfu is PaLM's model FLOP utilisation, mfu_without_attention the one that counts weights alone.
        """
        tera = tokens_per_second / 1e12
        found = {"model_tflops_per_second": (self.linear + self.attention) * tera}
        if self.peak is not None:
            found["mfu"] = found["model_tflops_per_second"] / self.peak
            found["mfu_without_attention"] = self.linear * tera / self.peak
        return found


def flops_per_token(model: Model, vocab: int) -> tuple[float, float]:
    """(6 N, 12 layers hidden length): FLOPs of one token forward and backward (PaLM, arXiv 2204.02311, appendix B).

    `model` is the configuration's section. N counts the weights that multiply: blocks, final norm and output matrix,
    not the rows looked up in the input embedding (PaLM's two are one matrix, which its N counts once), and not the
    encoding. Attention counts all pairs, as PaLM does, although a causal token sees half of them; nothing that is
    computed again counts.
    """
    layers, hidden = model.num_layers, model.hidden_size
    products = 2.0 * palm_weights(layers, hidden, vocab)
    attention = attention_flops(layers, hidden, keys=float(model.seq_length))
    return BACKWARD * products, BACKWARD * attention


def said(numbers: dict[str, float]) -> str:
    """`Throughput.numbers` on the console; without a peak the model FLOP/s stand for themselves."""
    if "mfu" not in numbers:
        return f"{numbers['model_tflops_per_second']:.3g} model TFLOP/s"
    return f"MFU {numbers['mfu']:.1%} ({numbers['mfu_without_attention']:.1%} without attention)"


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Dense TFLOP/s of this device by its data sheet; None for a CPU and for what the table does not know."""
    return peak_of(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_of(name: str, precision: str) -> float | None:
    """The same by the name that CUDA gives the device: `NVIDIA A100-SXM4-80GB`, `Tesla V100-SXM2-16GB` …"""
    bare = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    return next(
        (peaks.get(precision) for pattern, peaks in PEAKS if re.fullmatch(pattern, bare)), None
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: on CUDA the most that tensors took since the last call, on the CPU the most this process ever took."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
