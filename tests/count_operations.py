"""Print how many operations a layer's forward and backward pass have with each encoding, as CSV.

python -m tests.count_operations > operations.csv

An operation is a call of ATen that becomes a launch on a GPU: views and empty tensors are left out.
A layer is the difference between models of 3 and 2 layers in bfloat16, on the CPU. Attention itself
counts as one kernel with one backward pass, whatever the bias, unless the encoding needs all scores
or gives them itself. Options are those of configs/pos_emb.
"""

import csv
import json
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.attention import attend
from megatron.attention.terms import Terms
from megatron.config import load
from megatron.config.yaml_files import read_file
from megatron.model import from_config
from megatron.positions import REGISTRY
from tests.support import ROOT

LENGTH, VOCAB = 64, 512
VIEWS = """
    view _unsafe_view transpose t slice split split_with_sizes unsqueeze squeeze expand permute
    select detach alias unbind as_strided reshape chunk unflatten narrow _reshape_alias lift_fresh
    diagonal
"""
EMPTY = "empty empty_like new_empty empty_strided new_empty_strided is_same_size"
NO_LAUNCH = {*VIEWS.split(), *EMPTY.split()}
SIZES = [
    "hidden_size=96",
    "num_attention_heads=4",
    f"seq_length={LENGTH}",
    f"max_position_embeddings={LENGTH}",
    "data_path=none",
]


class Operations(TorchDispatchMode):
    """Counts the operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, _, _ = function.__name__.partition(".")
        self.count += name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def one_kernel(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *_: Any, **__: Any) -> Tensor:
    """Attention as one operation, without what the terms add."""
    if terms.scores is not None or terms.on_scores is not None:
        return attend(q, k, v, terms, "eager")
    q, k = q.to(v.dtype), k.to(v.dtype)
    options = {"is_causal": True, "enable_gqa": k.shape[1] < q.shape[1]}
    if q.shape[-1] == v.shape[-1]:
        return F.scaled_dot_product_attention(q, k, v, **options)
    wide_v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return F.scaled_dot_product_attention(q, k, wide_v, **options)[..., : v.shape[-1]]


def operations_of_step(name: str, layers: int) -> int:
    """Those of a forward and backward pass of a model with an encoding."""
    file = read_file(ROOT / "configs/pos_emb" / f"{name}.yml")
    overrides = [f"pos_emb={name}", f"num_layers={layers}", *SIZES]
    for key in ("pos_emb_args", "heads_per_query"):
        if file.get(key):
            overrides.append(f"{key}={json.dumps(file[key])}")
    model = from_config(load([str(ROOT / "configs/mep.yml")], overrides), VOCAB)
    model = model.to(torch.bfloat16).train()
    ids = torch.randint(VOCAB, (2, LENGTH + 1))

    def step() -> None:
        model(ids[:, :-1], labels=ids[:, 1:], mean=True).backward()

    with patch.object(sys.modules["megatron.attention.encoded"], "attend", one_kernel):
        step()  # the first one has no gradients to add to
        with Operations() as operations:
            step()
    return operations.count


def operations_of_layer(name: str) -> int:
    """Those that one more layer adds."""
    return operations_of_step(name, 3) - operations_of_step(name, 2)


if __name__ == "__main__":
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["pos_emb", "layer", "step_of_2_layers"])
    for encoding in ["none", *sorted(set(REGISTRY) - {"none"})]:
        step_of_2_layers = operations_of_step(encoding, 2)
        layer = operations_of_step(encoding, 3) - step_of_2_layers
        rows.writerow([encoding, layer, step_of_2_layers])
