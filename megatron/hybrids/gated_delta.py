"""Gated DeltaNet and KDA, which read earlier tokens through a state, and causal convolutions."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention.encoded import LayerInputs, prepare
from megatron.attention.terms import for_each_query_head
from megatron.errors import UserError
from megatron.hybrids.options import chosen_options
from megatron.layer_kinds import Layer, register_layer
from megatron.model.settings import Architecture, ResidualOutput
from megatron.positions import Position, Shape, build
from megatron.positions.base import Pair, after_earlier
from megatron.positions.layers import entry_of, features_of_head
from megatron.positions.precision import at_least_float32, in_float32_on_cpu, without_autocast

CONVOLVED = 4  # tokens that a convolution sees, including the current one
PER_STATE = 6  # operations per number of the state: a key's value, the update, the query's value
CHUNK = 64  # tokens per chunk
CHUNK_BY_FEATURE = 8  # the same if features have their own decays, to save memory


class CausalConvolution(nn.Conv1d):
    """A causal convolution: each feature of the last CONVOLVED tokens has its own weights, no
    bias."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, CONVOLVED, groups=channels, bias=False)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """[batch, channels, length] -> same."""
        memory = inputs.memory
        if inputs.context is not None:
            memory["convolved"] = tokens_before(x, inputs.context)
        x = after_earlier(x, CONVOLVED - 1, memory, "convolved")
        out = super().forward(x)
        if inputs.documents is not None:
            # Compute the first tokens of a document again, without the tokens before it.
            places = inputs.documents.places
            row, token = (places < CONVOLVED - 1).nonzero(as_tuple=True)  # this waits for the GPU
            place = places[row, token]
            tap = torch.arange(CONVOLVED, device=x.device)
            read = x[row[:, None], :, token[:, None] + tap]  # [tokens, taps, channels]
            read = read * (tap >= CONVOLVED - 1 - place[:, None])[..., None]
            out[row, :, token] = torch.einsum("ntc,ct->nc", read, self.weight[:, 0])
        return out


@register_layer("gated_delta")
class GatedDelta(Layer):
    """S_t = decay_t S_(t-1) (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ, read as S_t q_t.

    Gated DeltaNet (arXiv 2412.06464). For each head decay = exp(-A softplus(w·x + dt_bias)) and
    beta = sigmoid(u·x), or twice that with allow_neg_eigval (arXiv 2411.12537). q, k and v pass
    through a causal convolution and silu, q and k are normalised to length 1, and the output passes
    through a norm and a gate, as in transformers' Qwen3.5. Initial values of A, dt_bias and the
    convolution are those of flash-linear-attention.

    linear_num_key_heads, linear_key_head_dim: of queries and keys; unset: as in attention;
    linear_num_value_heads, linear_value_head_dim: of values; unset: as for keys. If there are more
        value heads, neighbouring heads share a query and a key.
    linear_pos_emb: an encoding that rotates queries and keys, as in HyPE (arXiv 2601.22156)

    The projection and the channels of the convolution are ordered [(q, k, v), heads, features],
    where groups of neighbouring heads share q and k, and beta_decay is [(beta, decay), heads].
    """

    options: ClassVar = {
        "allow_neg_eigval": bool,
        "linear_num_key_heads": int,
        "linear_num_value_heads": int,
        "linear_key_head_dim": int,
        "linear_value_head_dim": int,
        "linear_pos_emb": object,
    }
    activation = staticmethod(F.silu)  # of the gate

    @classmethod
    def sizes(cls, model: Any) -> dict[str, Any]:
        options = chosen_options(model, cls.options)
        key_heads = options["linear_num_key_heads"] or model.num_attention_heads
        heads = options["linear_num_value_heads"] or key_heads
        if heads % key_heads:
            raise UserError(
                f"linear_num_value_heads: {heads} is not a multiple of the {key_heads} key heads;"
                " change it or linear_num_key_heads"
            )
        key_dim = options["linear_key_head_dim"] or features_of_head(model)
        build_position(model, key_dim)
        return options | {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": options["linear_value_head_dim"] or key_dim,
        }

    def operations(self, keys: float) -> float:
        return PER_STATE * self.state_size

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        hidden, sizes = model.hidden_size, self.sizes(model)
        key_heads, heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        key_dim, value_dim = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
        self.state_size = heads * key_dim * value_dim
        self.widths = key_heads * key_dim, key_heads * key_dim, heads * value_dim
        self.heads = key_heads, key_heads, heads
        self.largest_beta = 2.0 if sizes["allow_neg_eigval"] else 1.0
        self.position = build_position(model, key_dim)
        channels, width = sum(self.widths), self.widths[2]
        self.query_key_value = nn.Linear(hidden, channels, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.beta_decay = nn.Linear(hidden, 2 * heads, bias=False)
        self.convolution = CausalConvolution(channels)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.dt_bias = first_steps(heads)
        self.norm = nn.RMSNorm(value_dim, eps=model.layernorm_epsilon)
        self.dense = ResidualOutput(width, hidden, bias=False)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [batch, length, hidden] -> same."""
        documents, context, memory = inputs.documents, inputs.context, inputs.memory
        qkv = self.query_key_value(x).mT  # [batch, channels, length]
        qkv = F.silu(self.convolution(qkv, inputs))

        with without_autocast(x):
            parts = at_least_float32(qkv).split(self.widths, dim=1)
            # [batch, heads, length, features]
            q, k, v = (
                for_each_query_head(part.unflatten(1, (heads, -1)).mT, self.heads[2] // heads)
                for part, heads in zip(parts, self.heads, strict=True)
            )
            if self.position is not None:
                q, k = turned(self.position, q, k, inputs)
            beta, step = self.beta_and_step(x)
            beta = self.largest_beta * beta.sigmoid()
            log_decay = -at_least_float32(self.A_log)[:, None, None].exp() * F.softplus(step)
            state = memory.get("state", torch.zeros_like(k[:, :, :1].mT @ v[:, :, :1]))
            values, keys = v.shape[3], k.shape[3]
            if context is not None:
                # Extra columns that track the effect on any state before this part.
                v = F.pad(v, (0, keys))
                state = F.pad(torch.eye(keys, dtype=k.dtype, device=k.device), (values, 0))
            numbers = None
            if documents is not None:  # of the last token before the new ones, and of the new ones
                new = documents.new
                numbers = F.pad(documents.numbers, (1, 0))[:, new.start : new.stop + 1]
            out, state = gated_delta_rule(q, k, v, beta, log_decay, state, numbers)
            memory["state"] = state
            if context is not None:
                out, factor = out.split([values, keys], dim=3)
                out = out + factor @ state_before(state, context)
        out = self.norm(out.to(x.dtype).transpose(1, 2)).flatten(2)
        return self.dense(out * self.activation(self.gate(x)))

    def beta_and_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The values before sigmoid and softplus, in float32.

        x [batch, length, hidden] -> [batch, heads, length, 1],
        [batch, heads, length, 1 or features of k]
        """
        beta_decay = at_least_float32(self.beta_decay(x))
        beta, step = beta_decay.mT[..., None].chunk(2, dim=1)
        return beta, step + self.dt_bias[:, None, None]


@register_layer("kda")
class KimiDelta(GatedDelta):
    """Gated DeltaNet with a separate decay for each feature of k: S_(t-1) Diag(decay_t).

    Kimi Delta Attention (arXiv 2510.26692). Decays and gate use products of two matrices with an
    inner width of head_dim, and the gate is a sigmoid, as in transformers' Kimi Linear.
    """

    activation = staticmethod(torch.sigmoid)

    def __init__(self, model: Architecture) -> None:
        super().__init__(model)
        hidden, sizes = model.hidden_size, self.sizes(model)
        heads = sizes["linear_num_value_heads"]
        key_dim, value_dim = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
    numbers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each token reads, S_t q_t / sqrt(features), and the state Sᵀ after the last one.

    q, k, v [batch, heads, length, features], beta [batch, heads, length, 1], log_decay as beta or
    as k, state [batch, heads, features of k, features of v] -> as v, as state numbers [batch, 1 +
    length]: document numbers of the previous token and of these tokens. The state is 0 at the start
    of a document.

    A chunk is solved at once: token i adds k_i u_iᵀ to Sᵀ, and (I + A) u = b is triangular. If a
    chunk has parts of several documents, they are blocks of A.
    """
    features = k.shape[3]
    # A root mean square of 1 / features gives length 1 / sqrt(features), which q needs.
    q = F.rms_norm(q, [features], eps=1e-6 / features) / features
    k = F.rms_norm(k, [features], eps=1e-6 / features) / math.sqrt(features)
    outputs = []
    length = CHUNK if log_decay.shape[3] == 1 else CHUNK_BY_FEATURE
    chunks = [part.split(length, dim=2) for part in (q, k, v, beta, log_decay)]
    for chunk, (q, k, v, beta, log_decay) in enumerate(zip(*chunks, strict=True)):
        # Whether token i reads the state (first column) and each token j: [i, 1 + j] or with a
        # batch.
        count = k.shape[2]
        visible = k.new_ones(count, 1 + count).tril(1)
        if numbers is not None:
            number = numbers[:, None, chunk * length :][..., : 1 + count]
            visible = visible * (number[..., 1:, None] == number[..., None, :])
        state_visible, visible = visible[..., :1], visible[..., 1:]

        # Sums since the start of the chunk or document; cumsum is not deterministic on CUDA.
        total = visible @ log_decay
        decay = total.exp() * state_visible
        # The decay from key j to query i, 0 if hidden: [batch, heads, i, j, 1 or features].
        log_decay_between = total[:, :, :, None] - total[:, :, None]
        decay_between = (log_decay_between + visible.log()[..., None]).exp()
        a = beta * products(k, decay_between, k)
        b = beta * (v - (decay * k) @ state)
        u = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
        outputs.append((decay * q) @ state + products(q, decay_between, k) @ u)
        state = decay[:, :, -1:].mT * state + (decay_between[:, :, -1] * k).mT @ u
    return torch.cat(outputs, dim=2), state


def products(q: Tensor, decay_between: Tensor, k: Tensor) -> Tensor:
    """The product of each query i with each key j, which has decayed by `decay_between`.

    q, k [batch, heads, length, features], decay_between [batch, heads, i, j, 1 or features]
    -> [batch, heads, i, j]
    """
    if decay_between.shape[4] == 1:
        return decay_between[..., 0] * (q @ k.mT)
    return torch.einsum("bhif,bhijf,bhjf->bhij", q, decay_between, k)


def tokens_before(x: Tensor, context: Any) -> Tensor:
    """The last tokens of the ranks before, 0 before the text.

    [batch, channels, own tokens] -> [batch, channels, CONVOLVED - 1]
    """
    count = CONVOLVED - 1
    last = x[:, :, -count:]  # fewer if parts are shorter
    # Rank 0 takes an empty slice, because every rank must take part in the backward pass.
    before = context.gather(last)[:, :, : context.rank * last.shape[2]]
    return F.pad(before, (count, 0))[:, :, -count:]


def state_before(last: Tensor, context: Any) -> Tensor:
    """The state Sᵀ before this rank's tokens: each part of the text turns it into a Sᵀ + b.

    last [batch, heads, features of k, features of v and of k]: b and a of this rank's part
    -> [batch, heads, features of k, features of v]
    """
    keys = last.shape[2]
    parts = context.gather(last).split(keys, dim=2)
    state = torch.zeros_like(parts[0][..., :-keys])
    for part in parts[: context.rank]:
        b, a = part[..., :-keys], part[..., -keys:]
        state = a @ state + b
    # Every rank must take part in the backward pass.
    return state + 0 * parts[-1][..., :-keys]


def build_position(model: Any, head_dim: int) -> Position | None:
    """The encoding of linear_pos_emb; UserError if it doesn't work with a state."""
    if model.layer_args.get("linear_pos_emb") is None:
        return None
    entry = entry_of("linear_pos_emb", model.layer_args["linear_pos_emb"])
    shape = Shape(model.num_attention_heads, head_dim, model.hidden_size, model.seq_length)
    try:
        with in_float32_on_cpu():
            position = build(entry.name, shape, **entry.options)
    except UserError as fault:
        raise UserError(f"linear_pos_emb: {fault}") from None
    if not position.only_rotates:
        raise UserError(
            f"linear_pos_emb: {entry.name} does more than rotate queries and keys by position,"
            " which a state cannot represent; use rotary, or a variant with other frequencies such"
            " as p_rope or yarn"
        )
    return position


def turned(position: Position, q: Tensor, k: Tensor, inputs: LayerInputs) -> Pair:
    """Rotate q, k [batch, heads, length, features] by their positions -> same."""
    earlier = 0 if inputs.cache is None else inputs.start
    length = max(inputs.length, inputs.start + q.shape[2])
    prepare([position], length, earlier)
    where: Any = slice(inputs.start, inputs.start + q.shape[2])
    if inputs.documents is not None and inputs.documents.restart:
        where = inputs.documents.places[:, None]
    places = position.indices(0, length)[where]  # [length] or [batch, 1, length]
    return position.on_queries_keys_at(q, k, places, places)
