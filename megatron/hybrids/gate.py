"""Attention with gated heads."""

from typing import Any, ClassVar

from torch import Tensor

from megatron.hybrids.options import chosen_options
from megatron.layer_kinds import register_layer
from megatron.model.block import SelfAttention
from megatron.model.settings import Architecture
from megatron.positions.registry import chosen


@register_layer("gated_attention")
class GatedAttention(SelfAttention):
    """A head's output is multiplied by sigmoid(x W) (arXiv 2505.06708).

    attention_gate: one number for each `head`, or one for each `element` of it (Qwen3-Next). The
        rows of W are between those of q and k, as in the authors' code.
    """

    options: ClassVar = {"attention_gate": str}

    @classmethod
    def sizes(cls, model: Any) -> dict[str, Any]:
        gate = chosen_options(model, cls.options)["attention_gate"] or "element"
        return {"attention_gate": chosen("attention_gate", gate, ("head", "element"))}

    def widths_of_key_head(self, model: Architecture) -> list[int]:
        queries, *key_widths = super().widths_of_key_head(model)
        gates = model.num_attention_heads // model.key_heads
        if self.sizes(model)["attention_gate"] == "element":
            gates *= self.features
        return [queries, gates, *key_widths]

    def output(self, out: Tensor, *gates: Tensor) -> Tensor:
        gate = gates[0][:, -out.shape[1] :].reshape(*out.shape[:3], -1)
        return super().output(out * gate.sigmoid())
