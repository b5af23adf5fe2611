"""An encoding in nanoGPT, in place of its learned positions (model.py of commit 3adf61e).

In train.py after each `model = GPT(gptconf)`, and in sample.py: `use(model, "kerple_log")`.
"""

from types import MethodType

import torch

from megatron.attention import encoded, prepare
from megatron.positions import Shape, encodings


def use(model, name, **options):
    sizes = model.config
    shape = Shape(sizes.n_head, sizes.n_embd // sizes.n_head, sizes.n_embd, sizes.block_size)
    layers = encodings(name, shape, sizes.n_layer, **options)
    for block, encoding in zip(model.transformer.h, layers, strict=True):
        block.attn.encoding, block.attn.forward = encoding, MethodType(forward, block.attn)
    model.transformer.wpe.weight.requires_grad_(False).zero_()
    model.register_forward_pre_hook(lambda _, inputs: prepare(layers, inputs[0].shape[1]))


def forward(self, x):
    q, k, v = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
    y = encoded(self.encoding, q, k, v, x, applied=["prepare"])
    return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


def read(model, length):
    """Texts of this length, once the checkpoint is loaded; also in place of crop_block_size."""
    zeros = torch.zeros(length, model.config.n_embd, device=model.lm_head.weight.device)
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(zeros)  # which do not train
    model.config.block_size = length
