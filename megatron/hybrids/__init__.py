"""Layers beside plain attention: Gated DeltaNet, KDA, attention through a latent and with a gate.

`layers` in a configuration asks for this package; megatron/model knows no name of it.
"""

from megatron.hybrids.gate import GatedAttention
from megatron.hybrids.gated_delta import GatedDelta, KimiDelta
from megatron.hybrids.mla import LatentAttention

__all__ = ["GatedAttention", "GatedDelta", "KimiDelta", "LatentAttention"]
