"""Read a file of torch.save that somebody else wrote: plain tensors, and no code."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch


def load_plain(path: Path) -> Any:
    """The content of a file, on the CPU; ValueError with the reason where it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as fault:  # torch.load raises a kind of its own for each damage
        reason = str(fault).partition("\n")[0] or repr(fault)
        # torch's own words advise to load such a file in the way that runs its code.
        if isinstance(fault, UnpicklingError) or "weights_only" in reason:
            reason = "it is damaged, or holds more than plain tensors; code in it is never run"
        raise ValueError(f"{reason:.200}") from None
