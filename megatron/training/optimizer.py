"""The optimizer, Adam or Muon; and its learning rate by step."""

import importlib
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron.config.schema import Optimizer

GATES_OF_HEADS = (".beta_decay.weight", ".beta.weight")
"""Matrices with a row or two for each head, which Muon leaves to Adam."""


def learning_rate(step: int, optimizer: Optimizer) -> float:
    """The learning rate of a step (the first is 0) by the configuration's section `optimizer`.

    Standard: linear warm-up, then a decay that would reach the floor one step after the last.
    wsd: between them the rate stays at its peak (arXiv 2404.06395; shapes as in Megatron-LM).
    neox-2022: as GPT-NeoX computed it when KERPLE and MEP were made (learning_rates.py at 738b87e).
    The first step has rate 0, and the floor holds after the warm-up alone. The decay is divided by
    the whole length, not by what the warm-up leaves, so the rate stays constant in the last
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
    start = warmup
    if optimizer.lr_decay_style == "wsd":
        start = steps - optimizer.lr_wsd_decay_iters
        if reached <= start or not optimizer.lr_wsd_decay_iters:
            return peak
    left = steps if old else steps + 1 - start
    progress = min(1.0, (reached - start) / left)
    style = optimizer.lr_decay_style
    if style == "wsd":
        style = optimizer.lr_wsd_decay_style
    shape = 1.0
    if style == "cosine":
        shape = (math.cos(math.pi * progress) + 1) / 2
    elif style == "linear":
        shape = 1 - progress
    elif style == "exponential":
        shape = 2 * 0.5**progress - 1
    elif style == "minus_sqrt":
        shape = 1 - math.sqrt(progress)
    return max(floor, peak * shape if old else floor + (peak - floor) * shape)


def build_optimizer(
    model: nn.Module, settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, or Muon beside it; settings: the section `optimizer`.

    Weight decay acts on matrices, not on norms and biases. On what an encoding learns it acts
    only with pos_emb_weight_decay.
    """
    decayed, exempt = named_groups(model, encoding_decays=settings.pos_emb_weight_decay)
    is_muon = settings.optimizer.type == "Muon"
    turned: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in decayed:
        is_matrix = name.startswith("layers.") and parameter.dim() == 2
        is_matrix = is_matrix and not name.endswith(GATES_OF_HEADS)
        group = turned if is_muon and is_matrix else others
        group.append(parameter)
    groups = [
        {"params": others, "weight_decay": settings.weight_decay},
        {"params": [parameter for _, parameter in exempt], "weight_decay": 0.0},
    ]
    adam = settings.optimizer.params
    options: dict[str, Any] = {"lr": adam.lr, "betas": tuple(adam.betas), "eps": adam.eps}
    if is_muon:
        muon = torch.optim.Muon(
            turned,
            lr=adam.lr,
            weight_decay=settings.weight_decay,
            momentum=adam.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        return MuonBesideAdam(muon, torch.optim.AdamW(groups, fused=True, **options))
    # NVIDIA's apex where its kernels are installed; PyPI's apex, another package, has no amp_C.
    if device.type == "cuda" and importlib.util.find_spec("amp_C"):
        return importlib.import_module("apex.optimizers").FusedAdam(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


class MuonBesideAdam(torch.optim.Optimizer):
    """Two optimizers of torch as one: the first group of parameters is Muon's, the others Adam's.

    Groups and state are theirs, in one list and one dictionary, so that the engine sets rates,
    saves and loads them as those of any optimizer.
    """

    def __init__(self, muon: torch.optim.Muon, adam: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adam.param_groups], {})
        self.muon, self.adam = muon, adam

    def step(self, closure: None = None) -> None:
        groups = self.param_groups  # others after a checkpoint was loaded, as is the state
        for part, own in ((self.muon, groups[:1]), (self.adam, groups[1:])):
            part.param_groups, part.state = own, self.state
            part.step()


Named = list[tuple[str, nn.Parameter]]


def named_groups(model: nn.Module, *, encoding_decays: bool) -> tuple[Named, Named]:
    """Parameters with weight decay and those without, in the optimizer's order, with their names.

    encoding_decays: whether weight decay acts on what an encoding learns
    """
    decayed: Named = []
    exempt: Named = []
    for name, parameter in model.named_parameters():
        if name.startswith("positions."):
            decays = encoding_decays
        else:
            # ZeRO 3 leaves an empty parameter, which remembers its shape.
            decays = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
        group = decayed if decays else exempt
        group.append((name, parameter))
    return decayed, exempt


STATE_OF_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's dynamic loss scale that are no settings."""


@contextmanager
def keeping_settings(engine: Any) -> Iterator[None]:
    """Let an engine load its state, but no settings: those of its own configuration stay.

    DeepSpeed's files also hold weight decay, betas, eps, clipping and how the loss scale moves.
    """
    optimizer = engine.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    scaler = getattr(optimizer, "loss_scaler", None)
    yield
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        del kept["params"]
        kept.pop("step", None)  # where apex counts
        group.update(kept)
    if engine.zero_optimization():
        optimizer.clip_grad = engine.gradient_clipping()
    if scaler is not None:
        continue_scale(scaler, optimizer.loss_scaler)
        optimizer.loss_scaler = scaler


def continue_scale(scaler: Any, loaded: Any) -> None:
    """Let a dynamic loss scale go on from where a loaded one stands; a fixed one stays."""
    if not (scaler.dynamic and loaded.dynamic):
        return
    for name in STATE_OF_SCALE:
        setattr(scaler, name, getattr(loaded, name))
    scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)
