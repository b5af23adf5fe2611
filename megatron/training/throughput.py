"""Speed of training: model FLOP/s by PaLM's formula, utilisation of the device, peak memory."""

import re
import resource
import sys
from dataclasses import dataclass

import torch

from megatron.config.schema import Model
from megatron.model import Architecture
from megatron.model.size import BACKWARD, attention_flops, palm_weights

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
"""Dense TFLOP/s by the device's full name and precision.

From NVIDIA's data sheets, and for GeForce from the architecture's white papers with float32
accumulation. Data sheets often print twice this, "with sparsity".
"""


@dataclass(frozen=True)
class Throughput:
    """FLOPs of one trained token: `linear` with weights, `attention` in scores and their sums.

    peak: TFLOP/s of one device, None where unknown
    """

    linear: float
    attention: float
    peak: float | None = None

    def numbers(self, tokens_per_second: float) -> dict[str, float]:
        """Model TFLOP/s of one device at that speed, and its utilisation where the peak is known.

        mfu is PaLM's model FLOP utilisation; mfu_without_attention counts weights alone.
        """
        teratokens = tokens_per_second / 1e12
        tflops = (self.linear + self.attention) * teratokens
        numbers = {"model_tflops_per_second": tflops}
        if self.peak is not None:
            numbers["mfu"] = tflops / self.peak
            numbers["mfu_without_attention"] = self.linear * teratokens / self.peak
        return numbers


def flops_per_token(model: Model, vocab: int) -> tuple[float, float]:
    """(6 N, 12 layers hidden length): FLOPs of one token, forward and backward.

    `hidden` stands for all heads' features.

    By PaLM (arXiv 2204.02311, appendix B). `model` is the configuration's section. N counts the
    weights that multiply: blocks, final norm and output matrix, not the looked-up input embedding
    and not the encoding. Attention counts all pairs of tokens, as PaLM does, although a causal
    token attends to half of them. Recomputation does not count.
    """
    architecture = Architecture.of(model)
    products = 2.0 * palm_weights(architecture, vocab)
    attention = attention_flops(architecture, keys=float(model.seq_length))
    return BACKWARD * products, BACKWARD * attention


def speed_text(numbers: dict[str, float]) -> str:
    """`Throughput.numbers` for the console: utilisation, or without a peak model FLOP/s."""
    if "mfu" not in numbers:
        return f"{numbers['model_tflops_per_second']:.3g} model TFLOP/s"
    return f"MFU {numbers['mfu']:.1%} ({numbers['mfu_without_attention']:.1%} without attention)"


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Dense TFLOP/s of this device by its data sheet; None for a CPU or an unknown device."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision)


def peak_of(name: str, precision: str) -> float | None:
    """The same by CUDA's name of the device: `NVIDIA A100-SXM4-80GB`, `Tesla V100-SXM2-16GB` …"""
    bare = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    for pattern, peaks in PEAKS:
        if re.fullmatch(pattern, bare):
            return peaks.get(precision)
    return None


def peak_memory(device: torch.device) -> int:
    """Bytes: on CUDA the most since the last call, on the CPU the most this process ever used."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
