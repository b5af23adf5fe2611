"""Small models with the names and signatures that examples/ read of five trainers.

Written for the tests. Each has two layers and its own attention, to which `BIAS` [heads, length,
length] is added: so a formula of an encoding has the same model around it.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

LENGTH, HEADS, HIDDEN, VOCAB, LAYERS = 24, 4, 64, 50, 2
HEAD_DIM = HIDDEN // HEADS
BIAS: list[Tensor] = []


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention with BIAS: [batch, heads, length, head_dim], fewer key heads -> as q."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    index = torch.arange(q.shape[2])
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= (window or len(index)))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    scores = scores + sum(BIAS)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), attn

    def forward(self, x, *inputs):
        return x + self.attn(self.norm(x), *inputs)


class Trunk(nn.Module):
    """Embedding, layers and output; `model(ids)` gives logits [batch, length, vocab]."""

    def __init__(self, attention, config: SimpleNamespace, **parts: nn.Module) -> None:
        super().__init__()
        self.config = config
        layers = nn.ModuleList(Block(attention(config, index)) for index in range(LAYERS))
        parts |= {"wte": nn.Embedding(VOCAB, HIDDEN), "h": layers}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        return self.logits(self.transformer.wte(ids))

    def logits(self, x, *inputs):
        for block in self.transformer.h:
            x = block(x, *inputs)
        return self.lm_head(x)


class OfNanoGPT(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x):
        parts = self.c_attn(x).split(HIDDEN, dim=2)
        q, k, v = (part.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for part in parts)
        return self.c_proj(plain(q, k, v).transpose(1, 2).flatten(2))


class NanoGPT(Trunk):
    def __init__(self):
        sizes = SimpleNamespace(n_head=HEADS, n_embd=HIDDEN, n_layer=LAYERS, block_size=LENGTH)
        super().__init__(OfNanoGPT, sizes, wpe=nn.Embedding(LENGTH, HIDDEN))

    def forward(self, ids):
        assert ids.shape[1] <= self.config.block_size, "block size is only"
        places = self.transformer.wpe(torch.arange(ids.shape[1]))
        return self.logits(self.transformer.wte(ids) + places)


class OfNanochat(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.c_q, self.c_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.c_kv = nn.Linear(HIDDEN, HIDDEN)  # of two key heads

    def forward(self, x, cos, sin, windows, cache):
        q = self.c_q(x).unflatten(2, (HEADS, HEAD_DIM))
        k, v = self.c_kv(x).unflatten(2, (2, 2, HEAD_DIM)).unbind(2)
        q, k = (
            torch.cat([a * cos + b * sin, b * cos - a * sin], 3)
            for a, b in (q.chunk(2, 3), k.chunk(2, 3))
        )
        if cache is None:
            y = gpt.flash_attn.flash_attn_func(
                q, k, v, causal=True, window_size=windows[self.index]
            )
        else:
            y = gpt.flash_attn.flash_attn_with_kvcache(
                q,
                *cache.stores[self.index],
                k=k,
                v=v,
                cache_seqlens=cache.seqlens,
                causal=True,
                window_size=windows[self.index],
            )
        return self.c_proj(y.flatten(2))


def flash_attn_func(q, k, v, causal, window_size):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plain(q, k, v, window_size[0] + 1).transpose(1, 2)


gpt = SimpleNamespace(flash_attn=None)
"""nanochat.gpt, whose flash_attn a recipe replaces."""


class Nanochat(Trunk):
    def __init__(self):
        gpt.flash_attn = SimpleNamespace(flash_attn_func=flash_attn_func)
        sizes = SimpleNamespace(n_head=HEADS, n_embd=HIDDEN, n_layer=LAYERS, sequence_len=LENGTH)
        super().__init__(OfNanochat, sizes)
        self.window_sizes = [(8, 0), (LENGTH, 0)]
        angle = torch.arange(2 * LENGTH)[None, :, None, None] * torch.ones(HEAD_DIM // 2)
        self.register_buffer("cos", angle.cos().double())
        self.register_buffer("sin", angle.sin().double())

    def get_device(self):
        return self.lm_head.weight.device

    def forward(self, ids, cache=None):
        start = 0 if cache is None else int(cache.seqlens[0])
        places = slice(start, start + ids.shape[1])
        assert places.stop <= self.cos.shape[1], "beyond the rotary embeddings cache"
        x = self.transformer.wte(ids)
        logits = self.logits(x, self.cos[:, places], self.sin[:, places], self.window_sizes, cache)
        if cache is not None:
            cache.seqlens += ids.shape[1]
        return logits

    def setup_optimizer(self, matrix_lr=0.02):
        parts = [self.transformer.wte, self.transformer.h, self.lm_head]
        groups = [{"kind": "adamw", "params": list(part.parameters())} for part in parts]
        assert sum(len(group["params"]) for group in groups) == len(list(self.parameters()))
        return torch.optim.AdamW(groups, lr=matrix_lr, weight_decay=0.1)


class OfLitgpt(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.config, self.kv_cache, self.mscale = config, None, 1.0
        self.apply_sliding_window_attention = index == 0
        self.qkv, self.proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        heads_first = self.qkv(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads_first.split([HEADS, 2, 2], dim=1)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        return self.proj(self.scaled_dot_product_attention(q, k, v, None).reshape(x.shape))

    def scaled_dot_product_attention(self, q, k, v, mask=None):
        stretch = math.sqrt(HEAD_DIM / self.config.attention_scores_scalar)
        window = self.config.sliding_window_size if self.apply_sliding_window_attention else None
        return plain(q * stretch, k, v, window).transpose(1, 2)


class Litgpt(Trunk):
    def __init__(self, rope_n_elem=0):
        sizes = {"n_head": HEADS, "head_size": HEAD_DIM, "n_embd": HIDDEN, "n_layer": LAYERS}
        sizes |= {"rope_n_elem": rope_n_elem, "attention_logit_softcapping": None}
        sizes |= {"attention_scores_scalar": 4, "sliding_window_size": 9, "block_size": LENGTH}
        super().__init__(OfLitgpt, SimpleNamespace(**sizes))
        self.max_seq_length = LENGTH

    def forward(self, ids):
        limit = min(self.max_seq_length, self.config.block_size)
        assert ids.shape[1] <= limit, "max seq length is only"
        return super().forward(ids)


class OfTorchtitan(nn.Module):
    """One text of packed documents: x [tokens, hidden] -> same."""

    n_heads, head_dim, q_norm = HEADS, HEAD_DIM, None

    def __init__(self):
        super().__init__()
        self.qkv, self.wo = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def qkv_linear(self, x):
        return self.qkv(x).unflatten(1, (-1, HEAD_DIM)).split([HEADS, 2, 2], dim=1)

    def forward(self, x, attention_masks, positions=None):
        q, k, v = (part.transpose(0, 1)[None] for part in self.qkv_linear(x))
        return self.wo(plain(q, k, v)[0].transpose(0, 1).flatten(1))


class Torchtitan(nn.Module):
    config = SimpleNamespace(dim=HIDDEN)

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleDict()
        for index in range(LAYERS):
            self.layers[str(index)] = nn.ModuleDict({"attention": OfTorchtitan()})
            self.layers[str(index)].attention = self.layers[str(index)]["attention"]

    def init_states(self, buffer_device=None):
        for part in self.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def forward(self, ids, positions=None):
        rows = []
        for row in ids:
            x = self.embed(row)
            for layer in self.layers.values():
                x = x + layer.attention(x, None, positions)
            rows.append(self.lm_head(x))
        return torch.stack(rows)


class OfMegatronLM(nn.Module):
    """core_attention as the specification builds it, between projections."""

    def __init__(self, spec, config):
        super().__init__()
        build = spec.submodules.self_attention.submodules.core_attention
        self.core_attention = build(config=config, layer_number=1, softmax_scale=None)
        self.qkv, self.proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        length_first = self.qkv(x).unflatten(2, (-1, HEAD_DIM)).transpose(0, 1)
        q, k, v = length_first.split([HEADS, 2, 2], dim=2)
        return self.proj(self.core_attention(q, k, v, attention_mask=None).transpose(0, 1))


class PlainCore(nn.Module):
    def __init__(self, config, layer_number, softmax_scale=None):
        super().__init__()

    def forward(self, query, key, value, attention_mask):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return plain(q, k, v).permute(2, 0, 1, 3).flatten(2)


def specification():
    """A layer of Megatron-LM, whose attention a recipe replaces."""
    attention = SimpleNamespace(submodules=SimpleNamespace(core_attention=PlainCore))
    return SimpleNamespace(submodules=SimpleNamespace(self_attention=attention))


class MegatronLM(Trunk):
    def __init__(self, spec=None, **changes):
        sizes = {"num_attention_heads": HEADS, "kv_channels": HEAD_DIM, "hidden_size": HIDDEN}
        sizes |= {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
        sizes |= {"attention_dropout": 0, "window_size": None, "softmax_type": "vanilla"}
        config = SimpleNamespace(**sizes | changes)
        spec = specification() if spec is None else spec
        super().__init__(lambda config, index: OfMegatronLM(spec, config), config)
