"""The numbers of a model are counted exactly, and without building it."""

import time

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


def test_options_count():
    words = ["pos_emb=fire", "pos_emb_args.mlp_layers=[8, 8]", "max_position_embeddings=99"]
    config = load([], [*TINY, *words])
    expected = sum(one.numel() for one in from_config(config, vocab=96).parameters())
    assert parameters(config, 96).whole == expected


def test_a_model_that_no_machine_holds_is_counted_at_once():
    words = ["num_layers=1e9", "hidden_size=1048576", "num_attention_heads=1", "pos_emb=learned"]
    config = load([], [*words, "seq_length=16", "max_position_embeddings=16777216"])
    start = time.process_time()
    counted = parameters(config, 50304)
    assert time.process_time() - start < 0.05
    assert counted.positions == 2**44
    assert counted.whole > 10**22
