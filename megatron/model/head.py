"""The cross entropy of the output matrix in blocks of tokens: the logits of a 16384 window are 3.3 GB in float32."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HEAD_TOKENS = 2048  # tokens whose logits exist at one time
HEADROOM = (
    32  # sums over a block of tokens are formed smaller by this power of two: float16 ends at 65504
)


def token_losses(x: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token in float32: [tokens, hidden], [vocab, hidden], [tokens] -> [tokens].

    Autograd keeps the logits of all blocks; where the mean alone is wanted, `mean_loss` does not.
    """
    parts = [
        F.cross_entropy(F.linear(part, matrix).float(), target, reduction="none")
        for part, target in zip(x.split(HEAD_TOKENS), labels.split(HEAD_TOKENS), strict=True)
    ]
    return torch.cat(parts)


def mean_loss(x: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
    """The mean of `token_losses`, [] float32; no more than one block of logits exists, with gradients neither."""
    return cast(Tensor, MeanLoss.apply(x, matrix, labels))


class MeanLoss(torch.autograd.Function):
    """Computes its gradients in the forward pass, while the logits of a block are there.

    torch's own `linear_cross_entropy` is like this from 2.13 on, but rounds the loss to the model's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, labels: Tensor) -> Tensor:
        total, x_grad = x.new_zeros((), dtype=torch.float32), torch.empty_like(x)
        matrix_grad = torch.zeros_like(matrix, dtype=torch.float32)
        for part, target, part_grad in zip(
            *(every.split(HEAD_TOKENS) for every in (x, labels, x_grad)), strict=True
        ):
            logs = F.log_softmax(
                F.linear(part, matrix), dim=1, dtype=torch.float32
            )  # [block, vocab]
            total -= logs.gather(1, target[:, None]).sum()
            grad = logs.exp_()
            grad[torch.arange(len(target), device=x.device), target] -= 1
            grad = grad.to(x.dtype)
            torch.mm(grad, matrix, out=part_grad)
            matrix_grad.add_(grad.T @ (part / HEADROOM), alpha=HEADROOM)
        ctx.save_for_backward(x_grad, matrix_grad)
        ctx.dtype = matrix.dtype
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        # Scaled only now: in float16 the loss scale comes with the gradient, and before it 1 / tokens underflows.
        x_grad, matrix_grad = ctx.saved_tensors
        scale = gradients[0] / len(x_grad)
        return x_grad * scale, (matrix_grad * scale).to(ctx.dtype), None
