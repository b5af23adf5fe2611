"""Plain values that a GPT is built from, and its first weights: no configuration is read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from megatron.layer_kinds import ATTENTION, layer_called
from megatron.positions import Position
from megatron.positions.layers import features_of_head

GATED = ("swiglu", "geglu", "geglu_new")
"""Activations that read twice the width, the gate first."""
GATED_MULTIPLE = 64
"""The MLP's default width is rounded up to a multiple of this where its activation has a gate."""


class Architecture(SimpleNamespace):
    """Sizes, parts and first values of a GPT: every key of the configuration's section `model`."""

    @classmethod
    def of(cls, section: Any) -> "Architecture":
        """The same values as an object that needs no package beside torch."""
        return cls(**dict(section))

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer, by the pattern `layers`."""
        pattern = self.layers or (ATTENTION,)
        return [pattern[layer % len(pattern)] for layer in range(self.num_layers)]

    @property
    def attention_layers(self) -> list[int]:
        """The layers that have an encoding. Patterns of encodings and windows repeat over them."""
        return [layer for layer, kind in enumerate(self.kinds) if layer_called(kind).has_encoding]

    @property
    def features_of_head(self) -> int:
        """head_dim, also where it is not set."""
        return features_of_head(self)

    @property
    def key_heads(self) -> int:
        """num_key_value_heads, also where it is not set; at most one for each query."""
        return min(self.num_key_value_heads or self.num_attention_heads, self.query_heads)

    @property
    def query_heads(self) -> int:
        """Heads of the queries that are projected: one for every `heads_per_query` heads."""
        return self.num_attention_heads // self.heads_per_query

    @property
    def mlp_width(self) -> int:
        """intermediate_size, also where it is not set."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.activation not in GATED:
            return 4 * self.hidden_size
        # Three matrices have as many numbers as two of 4 hidden.
        return -(-8 * self.hidden_size // (3 * GATED_MULTIPLE)) * GATED_MULTIPLE

    @property
    def widened(self) -> int:
        """Features that the MLP's first matrix gives: mlp_width, and as many of the gate's."""
        return 2 * self.mlp_width if self.activation in GATED else self.mlp_width

    @property
    def bias_in_attn_output(self) -> bool:
        """use_bias_in_attn_output, also where it is not set."""
        if self.use_bias_in_attn_output is None:
            return self.use_bias_in_attn_linear
        return self.use_bias_in_attn_output


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of attention, named as in the configuration's section `attention`.

    Evaluation adds to what a layer does by overriding the methods (megatron/evaluation/methods.py).
    """

    attention_backend: str = "auto"
    attention_self_check: bool = True
    window: int | Literal["train_length"] | None = None
    window_layers: tuple[int | Literal["train_length"] | None, ...] = ()
    blockwise: bool = False
    logn_scale: bool = False
    paper_precision: bool = False
    reset_attention_mask: bool = False
    reset_position_ids: bool = False

    @classmethod
    def of(cls, section: Any) -> Self:
        """The same values from the configuration's section."""
        names = [field.name for field in fields(AttentionSettings)]
        return cls(**{name: getattr(section, name) for name in names})

    def check(self, positions: Sequence[Position], train_length: int) -> None:
        """Raises UserError for settings that have no meaning for these encodings."""

    def scaling(self, train_length: int) -> dict[str, Any]:
        """Options of `Position.use_scaling`."""
        return {}

    def method_of_layer(self, position: Position, window: int | None, train_length: int) -> Any:
        """What moves the tokens of a layer (`Method` in evaluation/methods.py), or None."""
        return None

    def table(self, table: Tensor | None) -> Tensor | None:
        """A table by distance as layers read it."""
        return table

    def windows(self, layers: int, train_length: int) -> list[int | None]:
        """The window of each of so many layers, in tokens; None: all before it."""
        pattern = self.window_layers or (self.window,)
        lengths = [train_length if window == "train_length" else window for window in pattern]
        return [lengths[layer % len(lengths)] for layer in range(layers)]

    def of_one_document(self) -> Self:
        """The same for a text that is taken as one document, whatever it holds."""
        return replace(self, reset_attention_mask=False, reset_position_ids=False)


class ResidualOutput(nn.Linear):
    """A matrix that writes to the residual stream: output_layer_init_method is about it."""


def standard_deviation(method: str, model: Architecture) -> float:
    """That of first weights, by a name that `init_method` or `output_layer_init_method` may have.

    small_init: Transformers without Tears (arXiv 1910.05895); wang_init: as in GPT-NeoX-20B (arXiv
    2204.06745), from Wang's Mesh Transformer JAX
    """
    layers, hidden = model.num_layers, model.hidden_size
    by_method = {
        "normal": model.init_method_std,
        "scaled_normal": model.init_method_std / math.sqrt(2 * layers),
        "small_init": math.sqrt(2 / (5 * hidden)),
        "wang_init": 2 / (layers * math.sqrt(hidden)),
    }
    return by_method[method]


@torch.no_grad()
def initialize(module: nn.Module, model: Architecture) -> None:
    """Matrices of nn.Linear and nn.Embedding ~ N(0, std²), and biases of nn.Linear 0.

    init_method gives std, and output_layer_init_method that of a ResidualOutput. Other parameters
    keep the first values that their modules gave them.
    """
    std = standard_deviation(model.init_method, model)
    std_of_outputs = standard_deviation(model.output_layer_init_method, model)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.weight.normal_(0.0, std_of_outputs if isinstance(part, ResidualOutput) else std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.zero_()
