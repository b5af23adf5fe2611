"""torch.compile for the layers of a model."""

import torch

from megatron.attention import TRUSTED
from megatron.errors import UserError
from megatron.model import GPT


def compile_layers(model: GPT, device: torch.device) -> None:
    """Compile every layer in place, for fixed shapes; names in the state dict stay.

    UserError where this machine cannot compile. That is tried here, before any training.
    """
    try:
        trial = torch.compile(_trial, dynamic=False)
        trial(torch.ones(64, device=device, requires_grad=True)).backward()
    except Exception as fault:  # without compiler, headers or Triton: each raises its own kind
        lines = (str(fault).strip() or repr(fault)).splitlines()
        cure = "install a C++ compiler (g++) and Python's headers, or set torch_compile: false"
        raise UserError(
            f"torch_compile: this machine cannot compile ({lines[0]}) - {cure}"
        ) from None
    for layer in model.layers:
        layer.compile(dynamic=False)


def check_attention(model: GPT, device: torch.device) -> None:
    """Compute one window without compilation, so that a backend is checked at its first use.

    Compiled code leaves this check out.
    """
    if model.backends <= set(TRUSTED):
        return
    ids = torch.zeros(1, model.train_length, dtype=torch.long, device=device)
    with torch.compiler.set_stance("force_eager"):
        model(ids, labels=ids, mean=True)


def _trial(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).sum()
