"""Layers other than plain attention: Gated DeltaNet, KDA, latent attention (MLA), gated attention.

The key `layers` of a configuration selects them; megatron/model never refers to this package.
"""

from megatron.hybrids.gate import GatedAttention
from megatron.hybrids.gated_delta import GatedDelta, KimiDelta
from megatron.hybrids.mla import LatentAttention

__all__ = ["GatedAttention", "GatedDelta", "KimiDelta", "LatentAttention"]
