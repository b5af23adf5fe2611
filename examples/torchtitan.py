"""An encoding in torchtitan, in place of its rotation (models/common of commit b5bcd76).

At the end of `Decoder.__init__`: `use(self, "kerple_log", length=2048)`, for models whose layers
are `GQAttention` and see all of their document (Llama 3, Qwen 3). Positions say where documents
begin; a mask is not read. Each layer has numbers of its own, as FSDP needs. Not for tensor or
context parallelism. The group `.*` of its optimizer decays all: put a `ParamGroupConfig` with the
pattern `\\.encoding\\.` and `weight_decay` 0 before it. Longer texts need no change of the model.
"""

from functools import partial
from types import MethodType

from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from megatron.attention import encoded
from megatron.positions import Shape, build

FULL = StateDictOptions(full_state_dict=True)  # each process takes its share


def use(model, name, length, **options):
    for attention in (layer.attention for layer in model.layers.values()):
        shape = Shape(attention.n_heads, attention.head_dim, model.config.dim, length)
        attention.encoding = build(name, shape, **options)
        attention.forward = MethodType(forward, attention)
    model.init_states = partial(initialize, model, model.init_states, name, options)


def forward(self, x, attention_masks, positions=None):
    q, k, v = self.qkv_linear(x)  # [tokens, heads, head_dim]
    q, k = (q, k) if self.q_norm is None else (self.q_norm(q), self.k_norm(k))
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    documents = None if positions is None else (positions == 0).cumsum(0)[None]
    y = encoded(self.encoding, q, k, v, x[None], segments=documents, restart=True)
    return self.wo(y[0].transpose(0, 1).flatten(1))


def initialize(model, theirs, name, options, **keywords):  # the trainer builds on the meta device
    theirs(**keywords)
    for ours in (layer.attention.encoding for layer in model.layers.values()):
        fresh = build(name, ours.shape, **options)
        set_model_state_dict(ours, fresh.state_dict(), options=FULL)
        for path, buffer in fresh.named_buffers():
            ours.get_buffer(path).copy_(buffer)
