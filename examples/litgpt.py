"""An encoding in litgpt, in place of its rotation (litgpt/model.py of commit 2685705).

In litgpt/pretrain.py after `initialize_weights(…)`: `use(model, "kerple_log")`. Give the optimizer
`groups(model)` in place of `model.parameters()`. Its configuration needs `rotary_percentage: 0`.
Content cannot decide, because this method does not see a layer's input. Not for FSDP.
"""

import math
from types import MethodType

from megatron.attention import encoded
from megatron.positions import Shape, encodings


def use(model, name, **options):
    sizes = model.config
    if sizes.rope_n_elem or sizes.attention_logit_softcapping:
        raise ValueError("set rotary_percentage: 0, and no attention_logit_softcapping")
    shape = Shape(sizes.n_head, sizes.head_size, sizes.n_embd, sizes.block_size)
    layers = encodings(name, shape, sizes.n_layer, **options)
    for block, encoding in zip(model.transformer.h, layers, strict=True):
        block.attn.encoding = encoding.to(model.lm_head.weight.device)
        block.attn.scaled_dot_product_attention = MethodType(product, block.attn)


def product(self, q, k, v, mask=None):
    if self.kv_cache is not None:
        raise ValueError("this recipe has no cache of keys")
    sizes = self.config
    scale = math.sqrt(sizes.head_size / (sizes.attention_scores_scalar or sizes.head_size))
    window = sizes.sliding_window_size if self.apply_sliding_window_attention else None
    y = encoded(self.encoding, q * (scale * self.mscale**2), k, v, window=window)
    return y.transpose(1, 2)


def groups(model):
    """Their parameters, and what the encoding learns, without decay."""
    ours = [number for path, number in model.named_parameters() if ".encoding." in path]
    theirs = [number for path, number in model.named_parameters() if ".encoding." not in path]
    return [{"params": theirs}, {"params": ours, "weight_decay": 0.0}]


def read(model, length):
    """Texts of this length."""
    model.config.block_size = length
    model.max_seq_length = length
