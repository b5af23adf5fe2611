"""The numbers of a model are counted exactly, and without building it."""

from megatron.config import load
from megatron.model import from_config
from megatron.model.size import parameters
from tests.encodings import every_signature
from tests.support import NEEDED

TINY = ["num_layers=3", "hidden_size=32", "num_attention_heads=4", "seq_length=16"]


@every_signature
def test_the_count_is_that_of_the_model(name):
    options = [f"pos_emb_args.{key}={value}" for key, value in NEEDED.get(name, {}).items()]
    for settings in ([], ["pos_emb_shared=false"], ["no_weight_tying=false"]):
        config = load([], [*TINY, *settings, f"pos_emb={name}", *options])
        model = from_config(config, vocab=96)
        counted = parameters(config, 96)
        assert counted.whole == sum(one.numel() for one in model.parameters())
        assert counted.positions == sum(one.numel() for one in model.positions.parameters())
