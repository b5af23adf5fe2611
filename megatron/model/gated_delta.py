"""Gated DeltaNet and KDA: layers that read earlier tokens through a state of fixed size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.cache import LayerCache
from megatron.model.settings import CONVOLVED, Architecture
from megatron.positions.base import after_earlier
from megatron.positions.precision import at_least_float32, without_autocast

CHUNK = 64  # tokens that are computed at once
CHUNK_BY_FEATURE = 8  # the same where features have their own decays: less memory


class GatedDelta(nn.Module):
    """S_t = decay_t S_(t-1) (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ, read as S_t q_t.

    Gated DeltaNet (arXiv 2412.06464). For each head decay = exp(-A softplus(w·x + dt_bias)) and
    beta = sigmoid(u·x), or twice that with allow_neg_eigval (arXiv 2411.12537). q, k and v pass a
    causal convolution and silu, q and k get the norm 1, and what is read passes a norm and a gate,
    as in transformers' Qwen3.5. First values of A, dt_bias and the convolution are those of
    flash-linear-attention.

    The projection and the channels of the convolution are ordered [(q, k, v), heads, features],
    where groups of neighbouring heads share q and k, and beta_decay is [(beta, decay), heads].
    """

    activation = staticmethod(F.silu)  # of the gate

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        hidden = model.hidden_size
        key_heads, heads, _, value_dim = model.delta_sizes
        self.widths = model.delta_widths
        self.heads = key_heads, key_heads, heads
        self.largest_beta = 2.0 if model.allow_neg_eigval else 1.0
        channels, width = sum(self.widths), self.widths[2]
        self.query_key_value = nn.Linear(hidden, channels, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.beta_decay = nn.Linear(hidden, 2 * heads, bias=False)
        self.convolution = nn.Conv1d(channels, channels, CONVOLVED, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.dt_bias = first_steps(heads)
        self.norm = nn.RMSNorm(value_dim, eps=model.layernorm_epsilon)
        self.dense = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        """x [batch, length, hidden] -> same."""
        memory = {} if cache is None else cache.memory
        qkv = self.query_key_value(x).mT  # [batch, channels, length]
        qkv = after_earlier(qkv, CONVOLVED - 1, memory, "convolved")
        qkv = F.silu(self.convolution(qkv))

        with without_autocast(x):
            parts = at_least_float32(qkv).split(self.widths, dim=1)
            # [batch, heads, length, features]
            q, k, v = (
                for_each_query_head(part.unflatten(1, (heads, -1)).mT, self.heads[2] // heads)
                for part, heads in zip(parts, self.heads, strict=True)
            )
            beta, step = self.beta_and_step(x)
            beta = self.largest_beta * beta.sigmoid()
            log_decay = -at_least_float32(self.A_log)[:, None, None].exp() * F.softplus(step)
            state = memory.get("state", torch.zeros_like(k[:, :, :1].mT @ v[:, :, :1]))
            out, memory["state"] = gated_delta_rule(q, k, v, beta, log_decay, state)
        out = self.norm(out.to(x.dtype).transpose(1, 2)).flatten(2)
        return self.dense(out * self.activation(self.gate(x)))

    def beta_and_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Before the sigmoid and the softplus, float32.

        x [batch, length, hidden] -> [batch, heads, length, 1],
        [batch, heads, length, 1 or features of k]
        """
        beta_decay = at_least_float32(self.beta_decay(x))
        beta, step = beta_decay.mT[..., None].chunk(2, dim=1)
        return beta, step + self.dt_bias[:, None, None]


class KimiDelta(GatedDelta):
    """Gated DeltaNet whose features of k have decays of their own: S_(t-1) Diag(decay_t).

    Kimi Delta Attention (arXiv 2510.26692). Decays and gate are products of two matrices with the
    width of a head between them, and the gate is a sigmoid, as in transformers' Kimi Linear.
    """

    activation = staticmethod(torch.sigmoid)

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        hidden = model.hidden_size
        _, heads, key_dim, value_dim = model.delta_sizes

        def through_a_head(width: int) -> nn.Sequential:
            narrow = nn.Linear(hidden, value_dim, bias=False)
            return nn.Sequential(narrow, nn.Linear(value_dim, width, bias=False))

        del self.beta_decay
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.decay = through_a_head(heads * key_dim)
        self.gate = through_a_head(heads * value_dim)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = first_steps(heads * key_dim)

    def beta_and_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As above, with a step for each feature of k."""
        beta = at_least_float32(self.beta(x)).mT[..., None]
        step = at_least_float32(self.decay(x)) + self.dt_bias
        return beta, step.unflatten(2, (self.heads[2], -1)).transpose(1, 2)


def first_steps(count: int) -> nn.Parameter:
    """dt_bias [count] whose softplus is between 0.001 and 0.1, uniform in its logarithm."""
    log_step = torch.empty(count).uniform_(math.log(0.001), math.log(0.1))
    return nn.Parameter(log_step.exp().expm1().log())


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token reads, S_t q_t / sqrt(features), and the state Sᵀ after the last one.

    q, k, v [batch, heads, length, features], beta [batch, heads, length, 1], log_decay as beta or
    as k, state [batch, heads, features of k, features of v] -> as v, as state

    A chunk is solved at once: token i adds k_i u_iᵀ to Sᵀ, and (I + A) u = b is triangular.
    """
    features = k.shape[3]
    # The root mean square becomes 1 / features: the norm 1, and for q the 1 / sqrt(features).
    q = F.rms_norm(q, [features], eps=1e-6 / features) / features
    k = F.rms_norm(k, [features], eps=1e-6 / features) / math.sqrt(features)
    outputs = []
    length = CHUNK if log_decay.shape[3] == 1 else CHUNK_BY_FEATURE
    chunks = [part.split(length, dim=2) for part in (q, k, v, beta, log_decay)]
    for q, k, v, beta, log_decay in zip(*chunks, strict=True):
        # Sums since the chunk began; cumsum is not deterministic on CUDA.
        total = k.new_ones(k.shape[2], k.shape[2]).tril() @ log_decay
        decay = total.exp()
        # Of key j until query i, and 1 where j is later: [batch, heads, i, j, 1 or features].
        decay_between = (total[:, :, :, None] - total[:, :, None]).clamp(max=0).exp()
        a = beta * products(k, decay_between, k)
        b = beta * (v - (decay * k) @ state)
        u = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
        outputs.append((decay * q) @ state + products(q, decay_between, k).tril() @ u)
        state = decay[:, :, -1:].mT * state + (decay_between[:, :, -1] * k).mT @ u
    return torch.cat(outputs, dim=2), state


def products(q: Tensor, decay_between: Tensor, k: Tensor) -> Tensor:
    """Of each query i with each key j, of which `kept` is left.

    q, k [batch, heads, length, features], kept [batch, heads, i, j, 1 or features]
    -> [batch, heads, i, j]
    """
    if decay_between.shape[4] == 1:
        return decay_between[..., 0] * (q @ k.mT)
    return torch.einsum("bhif,bhijf,bhjf->bhij", q, decay_between, k)


def for_each_query_head(x: Tensor, group: int) -> Tensor:
    """Repeat each head for its group: [batch, key heads, keys, head_dim] -> [batch, heads, …]."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)
