"""The cross entropy in blocks of tokens: the logits of 16384 tokens would be 3.3 GB in float32."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

HEAD_TOKENS = 2048
"""Tokens whose logits exist at one time."""
HEAD_TOKENS_CUDA = 8192
"""The same on a GPU, where each block reads and writes the matrix and its gradient once more."""
SUMMED = 64
"""Sums over a block of tokens are formed as those of so many: float16 ends at 65504."""


def tokens_at_once(device: torch.device) -> int:
    """Tokens of a block, whose logits exist at one time."""
    return HEAD_TOKENS_CUDA if device.type == "cuda" else HEAD_TOKENS


def token_losses(x: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cross entropy of each token in float32.

    x [tokens, hidden], matrix [vocab, hidden], labels [tokens], bias [vocab] -> [tokens]

    Autograd keeps the logits of all blocks; where the mean alone is wanted, `mean_loss` does not.
    """
    losses = []
    size = tokens_at_once(x.device)
    blocks = zip(x.split(size), labels.split(size), strict=True)
    for part, targets in blocks:
        # The logits have no name, so that they are freed before those of the next block exist.
        block = F.cross_entropy(F.linear(part, matrix, bias).float(), targets, reduction="none")
        losses.append(block)
    return torch.cat(losses)


def loss_of_block(
    x: Tensor, matrix: Tensor, labels: Tensor, counted: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sum of a block's losses [] float32, and its gradients by the logits and by the bias.

    x [block, hidden], labels, counted [block] -> [], [block, vocab] as x, [vocab] float32
    """
    # [block, vocab]; the logits have no name, so that they are freed here
    log_probabilities = F.log_softmax(F.linear(x, matrix, bias), dim=1, dtype=torch.float32)
    target_log_probabilities = log_probabilities.gather(1, labels[:, None])
    if counted is not None:
        target_log_probabilities = target_log_probabilities * counted[:, None]
    loss = -target_log_probabilities.sum()
    dlogits = log_probabilities.exp_()
    dlogits[torch.arange(len(labels), device=x.device), labels] -= 1
    if counted is not None:
        dlogits *= counted[:, None]
    dbias = None if bias is None else dlogits.sum(dim=0)
    return loss, dlogits.to(x.dtype), dbias


def mean_loss(
    x: Tensor,
    matrix: Tensor,
    labels: Tensor,
    counted: Tensor | None = None,
    bias: Tensor | None = None,
    block_loss: Callable = loss_of_block,
) -> Tensor:
    """The mean of `token_losses`, [] float32; one block of logits exists, also with gradients.

    counted [tokens] bool: whose losses the mean is taken over, None for all; 0 where it is of none
    block_loss: `loss_of_block`, or what torch.compile makes of it
    """
    return cast(Tensor, MeanLoss.apply(block_loss, x, matrix, labels, counted, bias))


class MeanLoss(torch.autograd.Function):
    """Computes its gradients in the forward pass, while the logits of a block exist.

    torch's own `linear_cross_entropy` (2.13) does so too, but rounds the loss to the model's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block_loss: Callable,
        x: Tensor,
        matrix: Tensor,
        labels: Tensor,
        counted: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        total = x.new_zeros((), dtype=torch.float32)
        dx = torch.empty_like(x)
        dmatrix = torch.zeros_like(matrix, dtype=torch.float32)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        size = tokens_at_once(x.device)
        headroom = size / SUMMED
        for start in range(0, len(x), size):
            block = slice(start, start + size)
            part = x[block]
            marked = None if counted is None else counted[block]
            loss, dlogits, bias_sum = block_loss(part, matrix, labels[block], marked, bias)
            total += loss
            if dbias is not None:
                dbias += bias_sum
            torch.mm(dlogits, matrix, out=dx[block])
            dmatrix.add_(dlogits.T @ (part / headroom), alpha=headroom)
        count = len(x) if counted is None else counted.sum().clamp(min=1)
        ctx.save_for_backward(dx, dmatrix, dbias)
        ctx.count, ctx.dtype = count, matrix.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled only now: float16's loss scale comes with the gradient. Without it 1 / tokens
        # underflows.
        dx, dmatrix, dbias = ctx.saved_tensors
        scale = gradients[0] / ctx.count
        if dbias is not None:
            dbias = (dbias * scale).to(ctx.dtype)
        return None, dx * scale, (dmatrix * scale).to(ctx.dtype), None, None, dbias
