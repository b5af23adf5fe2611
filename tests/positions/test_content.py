"""Encodings that look at content: Cable against a loop in float64, and how attention takes them."""

import math

import pytest
import torch

from megatron.attention import attention
from megatron.config import load
from megatron.errors import UserError
from megatron.model import Cache, from_config
from megatron.positions import Position, Shape, build

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def cable() -> Position:
    position = build("cable", SHAPE)
    with torch.no_grad():
        for value in position.parameters():
            value.normal_(0.0, 0.3)
    return position


def by_loop(position: Position, x: torch.Tensor) -> torch.Tensor:
    """-g_i (S_i - S_j), one number at a time in float64, and 0 for j > i.

    x [length, hidden] -> [heads, length, length]
    """
    step, gain, x = position.step.detach().double(), position.gain.detach().double(), x.double()
    bias = torch.zeros(3, len(x), len(x), dtype=torch.float64)
    for h in range(3):
        for i in range(len(x)):
            softplus = math.log1p(math.exp((x[i] @ gain[:, h]).item()))
            for j in range(i + 1):
                between = sum(max(0.0, (x[m] @ step[:, h]).item()) for m in range(j + 1, i + 1))
                bias[h, i, j] = -softplus * between
    return bias


def test_the_scores_get_the_papers_bias_as_a_penalty():
    position, x, scores = cable(), torch.randn(2, 30, 24), torch.randn(2, 3, 30, 30)
    found = position.on_scores(scores, x, {})
    for b in range(2):
        expected = scores[b].double() + by_loop(position, x[b])
        torch.testing.assert_close(found[b].double().tril(), expected.tril(), rtol=0, atol=1e-4)
    bias = (found - scores).tril()
    assert bias.max() <= 1e-5
    assert bias.min() < -1
    # A query's penalty never falls as keys stand further back.
    assert (bias[:, :, -1].diff(dim=-1) >= -1e-5).all()


def test_pieces_of_a_text_are_the_whole_text():
    position, x, scores = cable(), torch.randn(2, 77, 24), torch.randn(2, 3, 77, 77)
    whole, memory, end = position.on_scores(scores, x, {}), {}, 0
    for piece in (1, 5, 64, 7):
        start, end = end, end + piece
        found = position.on_scores(scores[:, :, start:end, :end], x[:, start:end], memory)
        torch.testing.assert_close(found, whole[:, :, start:end, :end], rtol=0, atol=1e-4)


def test_half_precision_rounds_its_inputs_only():
    position, x, scores = cable(), torch.randn(1, 40, 24).bfloat16(), torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        for value in position.parameters():
            value.copy_(value.bfloat16())
    expected = position.on_scores(scores, x.float(), {})
    for value in position.parameters():
        value.data = value.data.bfloat16()  # as DeepSpeed does
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = position.on_scores(scores, x, {})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def model(*settings: str):
    shape = [
        "num_layers=2",
        "hidden_size=24",
        "num_attention_heads=3",
        "seq_length=64",
        "pos_emb=cable",
    ]
    return from_config(load([], [*shape, *settings]), vocab=50)


def test_every_layer_has_its_own_whatever_is_shared():
    first, second = model("pos_emb_shared=true").positions
    assert not torch.equal(first.step, second.step)


def test_auto_is_eager_and_sdpa_says_that_it_cannot():
    ids = torch.randint(50, (1, 40))
    with torch.no_grad():
        assert torch.equal(model()(ids), model("attention_backend=eager")(ids))
        message = "sdpa cannot compute this: the encoding looks at content; choose eager"
        with pytest.raises(UserError, match=message):
            model("attention_backend=sdpa")(ids)
    q, k, v = torch.randn(3, 1, 3, 10, 8)
    with pytest.raises(UserError, match=message):
        attention(q, k, v, on_scores=lambda scores: scores, backend="sdpa")


def test_activation_checkpointing_sees_no_memory_of_the_first_pass():
    ids, gradients = torch.randint(50, (2, 41)), []
    for again in (False, True):
        gpt = model().train()
        gpt.checkpoint_activations = again
        gpt(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
        gradients.append([parameter.grad for parameter in gpt.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-8)


class Dape(Position):
    """DAPE (arXiv 2405.14722): B + MLP over heads of scores and B, with a table of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table_of = build("kerple_log", shape)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(2 * shape.heads, 32),
            torch.nn.LeakyReLU(),
            torch.nn.Linear(32, shape.heads),
        )

    def on_scores(self, scores, x, memory):
        queries, keys = scores.shape[-2:]
        query = torch.arange(keys - queries, keys)
        distance = (query[:, None] - torch.arange(keys)).clamp(min=0)
        bias = self.table_of.distance_bias(keys)[:, distance]
        both = torch.cat([scores, bias.expand_as(scores)], dim=1).movedim(1, -1)
        return scores + bias + self.mlp(both).movedim(-1, 1)


class Cope(Position):
    """CoPE (arXiv 2405.18719): Σ sigmoid(q·k) from key to query, between two learned positions."""

    def __init__(self, shape: Shape, places: int = 16) -> None:
        super().__init__(shape)
        self.places, self.head_dim = places, shape.head_dim
        self.embedding = torch.nn.Parameter(torch.randn(shape.head_dim, places))

    def on_queries_keys(self, q, k, start=0):
        self.q = q
        return q, k

    def on_scores(self, scores, x, memory):
        queries, keys = scores.shape[-2:]
        later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        gates = torch.sigmoid(scores * math.sqrt(self.head_dim)).masked_fill(later, 0.0)
        place = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=self.places - 1)
        table = self.q @ self.embedding  # [batch, heads, queries, places]
        low, high = (table.gather(-1, whole.long()) for whole in (place.floor(), place.ceil()))
        share = place - place.floor()
        return scores + share * high + (1 - share) * low


@pytest.mark.parametrize("encoding", [Dape, Cope])
def test_the_hook_is_enough_for_other_encodings_of_the_kind(encoding):
    gpt = model().eval()
    gpt.positions = torch.nn.ModuleList([encoding(SHAPE) for _ in gpt.layers])
    ids, cache = torch.randint(50, (2, 40)), Cache()
    with torch.no_grad():
        pieces = [gpt(piece, cache=cache) for piece in ids.split([1, 30, 9], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), gpt(ids), rtol=0, atol=1e-4)
        torch.testing.assert_close(gpt(ids[:, :20]), gpt(ids)[:, :20], rtol=0, atol=1e-4)
