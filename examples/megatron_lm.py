"""An encoding in Megatron-LM (megatron/core/transformer/attention.py of commit d98e8a6).

In gpt_builders.py before `GPTModel(…)`: `use(transformer_layer_spec, "kerple_log", length=2048)`,
with the length of training. Run with `--position-embedding-type none --attention-dropout 0`. Each
layer has numbers of its own; content cannot decide. Longer texts need only
`--seq-length` and `--max-position-embeddings`.
"""

from functools import partial

from torch import nn

from megatron.attention import encoded
from megatron.positions import Shape, build

NEEDS = {"context_parallel_size": 1, "attention_dropout": 0, "softmax_type": "vanilla"}
NEEDS |= {"tensor_model_parallel_size": 1, "window_size": None}


def use(spec, name, length, **options):
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = partial(CoreAttention, name=name, length=length, options=options)


class CoreAttention(nn.Module):
    def __init__(self, config, name, length, options, softmax_scale=None, **places):
        super().__init__()
        wrong = {key: value for key, value in NEEDS.items() if getattr(config, key) != value}
        if wrong:
            raise ValueError(f"this recipe needs {wrong}")
        shape = Shape(config.num_attention_heads, config.kv_channels, config.hidden_size, length)
        self.encoding = build(name, shape, **options)
        self.stretch = (softmax_scale or config.kv_channels**-0.5) * config.kv_channels**0.5

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **others):
        if packed_seq_params is not None:
            raise ValueError("this recipe reads no packed sequences")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # theirs: length first
        y = encoded(self.encoding, q * self.stretch, k, v)
        return y.permute(2, 0, 1, 3).flatten(2)
