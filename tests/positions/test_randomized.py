"""Randomized positions: what training sees, what evaluation sees, and who may be inside."""

import json

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import from_config
from megatron.positions import REGISTRY, Position, Shape, build
from tests.encodings import SAMPLE
from tests.support import NEEDED, of_encoding

SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=64)
EXCLUDING = (
    *("on_scores", "block_scores", "score_bias", "on_queries_keys_by_content"),
    *("distance_weight", "on_embeddings_by_ids"),
)
WITHIN = [
    name
    for name in (*SAMPLE, "ssmax")
    if name not in ("randomized", "mep")
    and all(getattr(REGISTRY[name], hook) is getattr(Position, hook) for hook in EXCLUDING)
]


def drawn(of: str) -> Position:
    """In training, after a draw for 64 tokens."""
    position = build("randomized", SHAPE, of=of).train()
    position.prepare(64)
    return position


def model(*settings: str):
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    return from_config(load([], [*shape, "pos_emb=randomized", *settings]), vocab=50)


def test_positions_are_sorted_distinct_and_uniform_over_the_range():
    position = build("randomized", SHAPE, range=200).train()
    torch.manual_seed(1)
    counts = torch.zeros(200)
    for _ in range(2000):
        position.prepare(64)
        assert (position.drawn.diff() > 0).all()
        counts[position.drawn] += 1
    expected = 2000 * 64 / 200
    assert ((counts - expected).abs() < 6 * (expected * (1 - 64 / 200)) ** 0.5).all()
    torch.manual_seed(1)  # which the trainer sets at each step
    first = drawn("rotary").drawn
    torch.manual_seed(1)
    assert torch.equal(drawn("rotary").drawn, first)
    with pytest.raises(UserError, match="randomized: range: 200 holds no 300 positions; raise it"):
        position.prepare(300)


def test_rotary_turns_by_the_drawn_positions():
    position, x = drawn("rotary"), torch.randn(1, 4, 64, 8)
    sparse = torch.zeros(1, 4, 256, 8).index_copy(2, position.drawn, x)
    whole = build("rotary", SHAPE).on_queries_keys(sparse, sparse)
    for ours, theirs in zip(position.on_queries_keys(x, x), whole, strict=True):
        torch.testing.assert_close(ours, theirs[:, :, position.drawn], rtol=0, atol=1e-6)


def test_biases_are_those_of_the_drawn_distances():
    position = drawn("mep_param")
    assert position.distance_bias(64) is None
    queries, keys = torch.arange(20, 64), torch.arange(63, -1, -1)
    bias = position.index_bias(queries, keys)
    table, p = position.inner.distance_bias(256), position.drawn
    for i in (20, 40, 63):
        for j in (0, 7, i):
            expected = table[:, p[i] - p[j]]
            torch.testing.assert_close(bias[:, i - 20, 63 - j], expected, rtol=0, atol=0)


def test_evaluation_is_the_encoding_inside():
    for of in WITHIN:
        settings = of_encoding(of)
        options = {"of": of, "args": NEEDED.get(of, {})}
        gpt = model(settings[-1], f"pos_emb_args={json.dumps(options)}")
        plain = model(*settings, "max_position_embeddings=256")
        weights = gpt.state_dict().items()
        plain.load_state_dict({name.replace(".inner.", "."): value for name, value in weights})
        ids = torch.randint(50, (2, 150))
        with torch.no_grad():
            trained = gpt.train()(ids[:, :64])
            # these count tokens, whose number is not drawn
            counting = ("none", "ssmax", "attn_temperature")
            assert of in counting or not torch.equal(trained, plain(ids[:, :64])), of
            assert torch.equal(gpt.eval()(ids), plain(ids)), of


@pytest.mark.parametrize(("of", "shared"), [("kerple_log", "true"), ("fire", "false")])
def test_backends_and_recomputation_see_one_draw(of, shared):
    ids, results = torch.randint(50, (2, 65)), []
    words = [f"pos_emb_args.of={of}", f"pos_emb_shared={shared}"]
    for backend, again in (("eager", False), ("sdpa", False), ("sdpa", True)):
        gpt = model(*words, f"attention_backend={backend}").train()
        gpt.checkpoint_activations = again
        torch.manual_seed(0)
        loss = gpt(ids[:, :-1], labels=ids[:, 1:]).mean()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in gpt.parameters())])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)
