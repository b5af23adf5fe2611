"""`deterministic: true`: two runs on the same grid and hardware compute the same numbers.

On the CPU this is tested. On CUDA it rests on what torch, cuBLAS and NCCL document:
torch takes deterministic algorithms or refuses (flash attention's backward pass included), cuBLAS
needs a fixed workspace, and NCCL's ring sums in an order that its tuning cannot change.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.cross_checks import FLEX_VARIES
from megatron.errors import UserError
from megatron.model import GPT

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Read when CUDA and NCCL start; a value that the user gives stays."""
REFUSED = "does not have a deterministic implementation"  # torch's words


def use_deterministic_algorithms() -> None:
    """Switch torch and its libraries to deterministic algorithms; call it before CUDA starts."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Filling new memory finds reads of it that was not written, but costs time in every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def check_attention_repeats(model: GPT) -> None:
    """UserError where the attention that acts on the model's device may differ between runs."""
    if "flex" in model.backends:
        raise UserError(f"deterministic: attention {model.attention_choice}: {FLEX_VARIES}")


@contextmanager
def naming_operations() -> Iterator[None]:
    """Turn torch's refusal of an operation that is not deterministic into a UserError."""
    try:
        yield
    except RuntimeError as fault:
        if REFUSED not in str(fault):
            raise
        operation = str(fault).split(REFUSED)[0].strip()
        raise UserError(
            f"deterministic: {operation} {REFUSED} on this device"
            " - set deterministic: false, or take another encoding"
        ) from None
