"""The numbers of a model are counted exactly, and without building it."""

from megatron.config import load
from megatron.model import from_config
from megatron.model.size import parameters
from tests.encodings import every_signature
from tests.support import of_encoding

TINY = ["num_layers=3", "hidden_size=32", "num_attention_heads=4", "seq_length=16"]


@every_signature
def test_the_count_is_that_of_the_model(name):
    for settings in ([], ["pos_emb_shared=false"], ["no_weight_tying=false"]):
        config = load([], [*TINY, *settings, *of_encoding(name)])
        model = from_config(config, vocab=96)
        counted = parameters(config, 96)
        assert counted.whole == sum(parameter.numel() for parameter in model.parameters())
        assert counted.positions == sum(
            parameter.numel() for parameter in model.positions.parameters()
        )
