"""Build modules to count their numbers, without the memory that large tensors would take."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**16
MAKERS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.randn.default,
}


class Outline(TorchDispatchMode):
    """While this is active, a large tensor is one number that is repeated, and is never filled.

    torch's meta device would do, but its first use imports 900 modules in three seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the guard against it is what imports so much

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MAKERS and math.prod(args[0]) > LARGE:
            return func([1], *args[1:], **kwargs).expand(args[0])
        written = kwargs.get("out", args[0] if args else None) if func._schema.is_mutable else None
        if isinstance(written, Tensor):
            # What is, or was cut from, one number that is repeated cannot be filled by torch.
            sides = zip(written.stride(), written.shape, strict=True)
            is_repeated = any(stride == 0 and size > 1 for stride, size in sides)
            if is_repeated or written.numel() > LARGE:
                return written
        return func(*args, **kwargs)
