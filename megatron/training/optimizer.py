"""The optimizer: Adam, fused where the machine has it."""

import importlib
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megatron.config.schema import Optimizer

logger = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module, settings: Optimizer, device: torch.device
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay; `settings` is the configuration's section `optimizer`.

    Weight decay acts on matrices, not on norms and biases. On what an encoding learns it acts
    only with pos_emb_weight_decay.
    """
    decayed, exempt = named_groups(model, encoding_decays=settings.pos_emb_weight_decay)
    groups = [
        {"params": [parameter for _, parameter in decayed], "weight_decay": settings.weight_decay},
        {"params": [parameter for _, parameter in exempt], "weight_decay": 0.0},
    ]
    return adam(device)(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


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
            shape = getattr(parameter, "ds_shape", parameter.shape)
            decays = len(shape) >= 2
        group = decayed if decays else exempt
        group.append((name, parameter))
    return decayed, exempt


def adam(device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    """NVIDIA apex's fused Adam on CUDA where it is installed, else torch's fused AdamW."""
    fused_adam = apex_fused_adam()
    if fused_adam is not None and device.type == "cuda":
        return fused_adam
    return partial(torch.optim.AdamW, fused=True)


def apex_fused_adam() -> Callable[..., torch.optim.Optimizer] | None:
    """FusedAdam of NVIDIA apex, or None.

    Warns where the package called apex is another one or lacks its kernels.
    """
    try:
        importlib.import_module("apex")
    except ImportError:
        return None
    try:
        optimizers = importlib.import_module("apex.optimizers")
        importlib.import_module(
            "amp_C"
        )  # its kernels: without them it fails only when it is called
        return optimizers.FusedAdam
    except (ImportError, AttributeError):
        logger.warning(
            "apex: the installed package is not NVIDIA apex with its kernels"
            " (PyPI's apex is an unrelated web toolkit)"
            " - torch's fused AdamW is used; pip uninstall apex to silence this"
        )
        return None
