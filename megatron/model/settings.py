"""What a GPT is built from, in plain values: it needs no package that reads a configuration."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron.config import schema


@dataclass(frozen=True)
class Architecture:
    """Sizes and first values of a GPT, named as in the configuration's section `model`."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    seq_length: int
    layernorm_epsilon: float = 1e-5
    no_weight_tying: bool = True
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    output_layer_init_method: Literal["scaled_normal", "normal"] = "scaled_normal"

    @classmethod
    def of(cls, section: "schema.Model") -> "Architecture":
        """The same values from the configuration's section."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(section, name) for name in names})


@dataclass(frozen=True)
class AttentionSettings:
    """How attention is computed, named as in the configuration's section `attention`."""

    attention_backend: str = "auto"
    attention_self_check: bool = True
    window: int | Literal["train_length"] | None = None
    blockwise: bool = False
    logn_scale: bool = False

    @classmethod
    def of(cls, section: "schema.Attention") -> "AttentionSettings":
        """The same values from the configuration's section."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(section, name) for name in names})
