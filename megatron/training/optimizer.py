"""The optimizer, Adam or Muon, and its learning rate at each step."""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.config.schedules import SHAPES
from megatron.config.schema import Optimizer

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Keys of Adam's averages in its state, in torch and in NVIDIA's apex."""
MOMENTUM = ("momentum_buffer",)
"""Keys of Muon's averages."""
PROGRESS_OF_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's dynamic loss scale that are state rather than settings."""
MATRIX = r"layers\.(?!.*\.(beta_decay|beta)\.weight$)"
"""Names of the matrices that Muon optimises: those of the layers, except two that have only a row
or two for each head."""


def learning_rate(step: int, optimizer: Optimizer) -> float:
    """The learning rate of a step (the first is 0); settings: the section `optimizer`.

    Standard: linear warm-up, then a decay that would reach the floor one step after the last.
    wsd: in between the rate stays at its peak (arXiv 2404.06395; shapes as in Megatron-LM).
    neox-2022: as GPT-NeoX computed it at the time of KERPLE and MEP (learning_rates.py at 738b87e).
    The first step has rate 0, and the floor applies only after the warm-up. The decay is divided by
    the whole length, not by what remains after the warm-up, so the rate stays constant in the last
    `warmup` steps.
    """
    peak, floor = optimizer.lr, optimizer.min_lr
    steps = max(1, optimizer.lr_decay_iters)
    warmup = optimizer.warmup * optimizer.lr_decay_iters
    old = optimizer.lr_schedule == "neox-2022"
    reached = min(step, steps - warmup) if old else step + 1
    if warmup and (step <= warmup if old else reached < warmup):
        rate = peak * reached / warmup
        return rate if old else max(floor, rate)
    start, style = warmup, optimizer.lr_decay_style
    if style == "wsd":
        style = optimizer.lr_wsd_decay_style
        start = steps - optimizer.lr_wsd_decay_iters
        if reached <= start or not optimizer.lr_wsd_decay_iters:
            return peak
    left = steps if old else steps + 1 - start
    progress = min(1.0, (reached - start) / left)
    shape = SHAPES[style](progress)
    return max(floor, peak * shape if old else floor + (peak - floor) * shape)


def build_optimizer(
    model: nn.Module, settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, or Muon with Adam; settings: the section `optimizer`."""
    matrices, decayed, exempt = (
        [parameter for _, parameter in group] for group in named_groups(model, settings)
    )
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    adam = settings.optimizer.params
    options: dict[str, Any] = {"lr": adam.lr, "betas": tuple(adam.betas), "eps": adam.eps}
    if matrices:
        muon = torch.optim.Muon(
            matrices,
            lr=adam.lr,
            weight_decay=settings.weight_decay,
            momentum=adam.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        return MuonBesideAdam(muon, torch.optim.AdamW(groups, fused=True, **options))
    # NVIDIA's apex if its kernels are installed; PyPI's apex is another package without amp_C.
    if device.type == "cuda" and importlib.util.find_spec("amp_C"):
        return importlib.import_module("apex.optimizers").FusedAdam(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


class MuonBesideAdam(torch.optim.Optimizer):
    """Two of torch's optimizers as one: Muon has the first group of parameters, Adam the others.

    Their groups and states are joined in one list and one dictionary, so that the engine can set
    rates, save and load as for any optimizer.
    """

    def __init__(self, muon: torch.optim.Muon, adam: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adam.param_groups], {})
        self.muon, self.adam = muon, adam

    def step(self, closure: None = None) -> None:
        groups = self.param_groups  # new objects after a checkpoint was loaded, like the state
        for part, part_groups in ((self.muon, groups[:1]), (self.adam, groups[1:])):
            part.param_groups, part.state = part_groups, self.state
            part.step()


Named = list[tuple[str, nn.Parameter]]


def named_groups(model: nn.Module, settings: Optimizer) -> tuple[Named, Named, Named]:
    """The groups of a model's parameters, in the optimizer's order: Muon's, then Adam's with and
    without weight decay. settings: the section `optimizer`

    Weight decay applies to matrices, not to norms and biases, and to an encoding's parameters only
    with pos_emb_weight_decay. Muon optimises the matrices of the layers.
    """
    matrices, decayed, exempt = [], [], []
    is_muon = settings.optimizer.type == "Muon"
    for name, parameter in model.named_parameters():
        # ZeRO 3 leaves an empty parameter that remembers its shape.
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        group = decayed if dimensions >= 2 else exempt
        if name.startswith("positions."):
            group = decayed if settings.pos_emb_weight_decay else exempt
        elif is_muon and dimensions == 2 and re.match(MATRIX, name):
            group = matrices
        group.append((name, parameter))
    return matrices, decayed, exempt


def averages_of(model: nn.Module, settings: Optimizer) -> Mapping[str, tuple[str, ...]]:
    """The keys of the averages that the optimizer keeps for each parameter that learns."""
    matrices, *_ = named_groups(model, settings)
    keys: dict[str, tuple[str, ...]] = dict.fromkeys(dict(matrices), MOMENTUM)
    for name, parameter in model.named_parameters():
        keys.setdefault(name, AVERAGES if parameter.requires_grad else ())
    return keys
