"""The state of decoding in pieces: keys, values, and what encodings keep."""

from dataclasses import dataclass, field

from torch import Tensor

from megatron.attention import LayerCache


@dataclass
class Cache:
    """Keys, values and more of the text so far, for decoding in pieces.

    GPT.forward(ids, cache=cache) continues that text.

    length: tokens so far; embeddings: what an encoding keeps of their ids
    """

    length: int = 0
    embeddings: LayerCache = field(default_factory=LayerCache)
    layers: list[LayerCache] = field(default_factory=list)
    document_ends: Tensor | None = None

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64, in this order."""
        for layer in (self.embeddings, *self.layers):
            layer.select(texts)
        if self.document_ends is not None:
            self.document_ends = self.document_ends.index_select(0, texts)
