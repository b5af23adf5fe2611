"""How far back a model looks: attention by distance, and the effective receptive field."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron.attention import BACKENDS, eager
from megatron.attention.eager import probabilities
from megatron.attention.terms import Terms
from megatron.errors import UserError
from megatron.model import GPT

QUERIES = 256  # the last queries of a window, whose attention is measured
BLOCK = 64  # queries at a time
LONGEST = 2048  # tokens, for an encoding that needs the whole matrix of scores
MOST = 0.99  # of the gradient: the tokens that hold so much are the receptive field


def edges(length: int) -> list[int]:
    """The distances at which the bins of `mass` begin, and `length`: 0, 1, 2, 4, 8, …"""
    powers = [2**power for power in range(length.bit_length())]
    return [0, *(power for power in powers if power < length), length]


@torch.no_grad()
def attention_by_distance(model: GPT, windows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Entropy and mass of attention, means over the last queries of all windows.

    windows: [length + 1] tokens each
    -> of the layers that have attention: entropy [layers, heads] in nats;
       mass [layers, bins], the probability by distance, a mean over heads; each layer sums to 1
    Raises UserError for a long window if the encoding needs the whole matrix of scores, and for
    methods that attend to near and far keys apart.
    """
    length = len(windows[0]) - 1
    if any(plan.method for plan in model.plans.values()):
        raise UserError(
            "attention by distance is not measured with sinks or a method that moves keys"
        )
    if model.looks_at_scores and length > LONGEST:
        raise UserError(
            f"attention of an encoding that looks at content is measured up to length {LONGEST}"
        )
    device = model.word_embeddings.weight.device
    key = torch.arange(length, device=device)
    inner_edges = torch.tensor(edges(length)[1:-1], device=device)
    entropies: list[Tensor] = []  # of each window and layer: [heads]
    masses: list[Tensor] = []  # of each window and layer: [bins]

    def recording(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
        blocks: list[Tensor] = []  # probabilities of the last queries: [heads, queries, keys] each
        if terms.on_scores is not None or terms.scores is not None:
            p = probabilities(q, k, terms)
            out, lse = (p @ v.to(p.dtype)).to(q.dtype), None  # beside the sink already
            blocks.append(p[0, :, -QUERIES:])
        else:
            out, lse = BACKENDS["sdpa"](q, k, v, terms)
            first = max(0, length - QUERIES)
            for start in range(first, length, BLOCK):
                rows, keys = slice(start, min(start + BLOCK, length)), slice(0, start + BLOCK)
                part = terms.part(rows, keys)
                blocks.append(probabilities(q[:, :, rows], k[:, :, keys], part)[0])
        mass: list[Tensor] = []  # [heads, queries, bins] each
        for p in blocks:
            heads, queries, keys = p.shape
            # Later keys have no probability: any bin will do.
            query = key[keys - queries : keys, None]
            distance = (query - key[:keys]).clamp(min=0)
            bins = torch.bucketize(distance, inner_edges, right=True)
            empty = p.new_zeros(heads, queries, len(inner_edges) + 1)
            mass.append(empty.scatter_add_(2, bins.expand(heads, -1, -1), p))
        entropy = [torch.special.entr(p).sum(dim=-1) for p in blocks]  # [heads, queries] each
        entropies.append(torch.cat(entropy, dim=1).mean(dim=1))
        masses.append(torch.cat(mass, dim=1).mean(dim=(0, 1)))
        return out, lse

    settings = model.attention
    model.use_attention(replace(settings, attention_backend="eager"))
    BACKENDS["eager"] = recording  # every layer calls it
    try:
        for window in windows:
            ids = torch.from_numpy(window[None, :-1].astype(np.int64))
            model.features(ids.to(device))
    finally:
        BACKENDS["eager"] = eager
        model.use_attention(settings)

    means = []
    for values in (entropies, masses):
        by_window = torch.stack(values).view(len(windows), len(model.attention_layers), -1)
        means.append(by_window.double().mean(dim=0).cpu())
    return means[0], means[1]


def receptive_field(model: GPT, windows: Sequence[np.ndarray]) -> Tensor:
    """The cumulative normalised gradient by distance, mean over windows: [length] float64, up to 1.

    windows: [length + 1] tokens each
    With g_d the norm of the gradient of the last position's loss by the input embedding d tokens
    back, entry d is (g_0 + … + g_d) / Σ g (Sandwich, arXiv 2212.10356). Activations are computed
    again layer by layer: memory grows with the length, not with its square.
    """
    total = torch.zeros(len(windows[0]) - 1, dtype=torch.float64)
    leaves: list[Tensor] = []

    def cut(module: torch.nn.Module, arguments: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    checkpointed = model.checkpoint_activations
    model.checkpoint_activations = True
    hook = model.word_embeddings.register_forward_hook(cut)
    try:
        for window in windows:
            ids = torch.from_numpy(window[None].astype(np.int64))
            ids = ids.to(model.word_embeddings.weight.device)
            with torch.enable_grad():
                last = model.features(ids[:, :-1])[:, -1:]  # [1, 1, hidden]
                loss = model.losses(last, ids[:, -1:]).sum()
                (gradient,) = torch.autograd.grad(loss, leaves.pop())  # [1, length, hidden]
            norms = gradient[0].double().norm(dim=-1).cpu()
            total += norms.flip(0).cumsum(0) / norms.sum()
    finally:
        hook.remove()
        model.checkpoint_activations = checkpointed
    return total / len(windows)


def sampled(length: int, count: int) -> Tensor:
    """Distances from 0 to length - 1 that look evenly spaced on a logarithmic axis.

    0, 1, 2, … and then fewer: [count + 1 or fewer] int64.
    """
    last_exponent = torch.log10(torch.tensor(float(max(length - 1, 1)))).item()
    spread = torch.logspace(0, last_exponent, count)
    with_zero = torch.cat([torch.zeros(1), spread])
    return with_zero.round().long().clamp(max=length - 1).unique()
