"""An encoding in nanochat, in place of its rotation (nanochat/gpt.py of commit 92d63d4).

In scripts/base_train.py after `model.init_weights()`: `use(model, "kerple_log")`. All layers share
the encoding. It gets q and k after their norm and no layer's input, so content cannot decide.
"""

from functools import partial
from typing import NamedTuple

from nanochat import gpt
from torch import nn

from megatron.attention import LayerCache, encoded
from megatron.positions import Shape, build


def use(model, name, **options):
    sizes = model.config
    shape = Shape(sizes.n_head, sizes.n_embd // sizes.n_head, sizes.n_embd, sizes.sequence_len)
    # Their model counts the parameters of the parts that it knows, so it belongs to one of them.
    encoding = model.transformer.wte.encoding = build(name, shape, **options).to(model.get_device())
    model.setup_optimizer = partial(setup_optimizer, model.setup_optimizer, encoding)
    model.cos.fill_(1), model.sin.zero_()  # they turn nothing
    gpt.flash_attn = Flash(encoding)


class Flash(NamedTuple):
    encoding: nn.Module

    def flash_attn_func(self, q, k, v, causal, window_size, cache=None):
        window = window_size[0] + 1 or None  # ours counts a token's own key; -1: all before it
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return encoded(self.encoding, q, k, v, window=window, cache=cache).transpose(1, 2)

    def flash_attn_with_kvcache(self, q, keys, values, k, v, cache_seqlens, **terms):
        earlier = (x[:, : int(cache_seqlens[0])].transpose(1, 2) for x in (keys, values))
        cache = LayerCache({}, *earlier)
        y = self.flash_attn_func(q, k, v, cache=cache, **terms)
        for theirs, ours in ((keys, cache.keys), (values, cache.values)):
            theirs[:, : cache.length] = ours.transpose(1, 2)
        return y


def setup_optimizer(theirs, encoding, **rates):
    """What the encoding learns has a group of its own, without decay."""
    optimizer, learned = theirs(**rates), list(encoding.parameters())
    for group in optimizer.param_groups:
        group["params"] = [number for number in group["params"] if number not in {*learned}]
    rates = {"lr": 0.01, "initial_lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10}
    optimizer.add_param_group({"kind": "adamw", "params": learned, "weight_decay": 0.0} | rates)
    return optimizer


def read(model, length):
    """Texts of this length: an L layer attends to all of them, and not to sequence_len tokens."""
    trained = model.config.sequence_len
    model.window_sizes = [(-1 if size == trained else size, 0) for size, _ in model.window_sizes]
    model.cos, model.sin = (x[:, :1].expand(-1, length, -1, -1) for x in (model.cos, model.sin))
