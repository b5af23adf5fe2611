"""Properties that every registered encoding has."""

import copy

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.positions import REGISTRY, Position, Shape, build
from tests.support import NEEDED

LENGTHS = (512, 16384, 64)
every_encoding = pytest.mark.parametrize("name", sorted(REGISTRY))


def encoding(name: str, heads: int = 4, head_dim: int = 8, train_length: int = 512) -> Position:
    return build(
        name, Shape(heads, head_dim, heads * head_dim, train_length), **NEEDED.get(name, {})
    )


def sees_content(name: str) -> bool:
    """Whether attention is eager, which holds the square of the length in memory."""
    return REGISTRY[name].on_scores is not Position.on_scores


def model(name: str, backend: str = "auto", layers: int = 2) -> GPT:
    settings = [
        f"num_layers={layers}",
        "hidden_size=32",
        "num_attention_heads=4",
        "seq_length=64",
        f"pos_emb={name}",
    ]
    longest = ["max_position_embeddings=4096", f"attention_backend={backend}"]
    args = [f"pos_emb_args={NEEDED[name]}".replace("'", "")] if name in NEEDED else []
    return from_config(load([], settings + longest + args), vocab=50).eval()


def tables(position: Position, length: int) -> list[torch.Tensor]:
    return [
        table
        for table in (position.distance_bias(length), position.distance_weight(length))
        if table is not None
    ]


def biases(position: Position, length: int) -> list[torch.Tensor]:
    """Its tables, and where there is none the biases of the last query: [heads, length] each."""
    if not position.has("index_bias"):
        return tables(position, length)
    return [position.index_bias(torch.tensor([length - 1]), torch.arange(length))[:, 0]]


@every_encoding
def test_a_table_is_float32_finite_and_the_same_at_every_length_in_one_process(name):
    position = encoding(name)
    longest = tables(position, max(LENGTHS))
    for length in LENGTHS:
        for table, long in zip(tables(position, length), longest, strict=True):
            assert table.shape == (4, length)
            assert table.dtype == torch.float32
            assert table.isfinite().all()
            torch.testing.assert_close(table, long[:, :length], rtol=0, atol=0)


@every_encoding
@pytest.mark.parametrize("heads", [1, 3, 12, 16, 32])
def test_any_number_of_heads(name, heads):
    for bias in biases(encoding(name, heads=heads), 40):
        assert bias.shape == (heads, 40)
        assert bias.dtype == torch.float32


@every_encoding
def test_casting_the_module_to_bfloat16_rounds_nothing(name):
    position = encoding(name)
    cast = copy.deepcopy(position).bfloat16()
    for before, after in zip(biases(position, 16384), biases(cast, 16384), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    q, k = torch.randn(2, 1, 4, 300, 8)
    for before, after in zip(
        position.on_queries_keys(q, k), cast.on_queries_keys(q, k), strict=True
    ):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    x = torch.randn(1, 300, 32)
    torch.testing.assert_close(cast.on_embeddings(x), position.on_embeddings(x), rtol=0, atol=0)


@every_encoding
def test_tables_stay_float32_under_autocast(name):
    position = encoding(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = biases(position, 4096)
    for before, after in zip(biases(position, 4096), inside, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@every_encoding
def test_scores_depend_on_the_distance_alone_for_relative_encodings(name):
    position = encoding(name, head_dim=16)
    if type(position).on_embeddings is not Position.on_embeddings:
        pytest.skip("an absolute encoding")
    q, k = torch.randn(2, 1, 4, 1, 16, dtype=torch.float64).expand(2, 1, 4, 50, 16)
    near = torch.einsum("bhqd,bhkd->bhqk", *position.double().on_queries_keys(q, k))
    far = torch.einsum("bhqd,bhkd->bhqk", *position.on_queries_keys(q, k, start=16000))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-9)
    torch.testing.assert_close(near[..., 1:, 1:], near[..., :-1, :-1], rtol=0, atol=1e-9)


@every_encoding
def test_the_first_tokens_do_not_notice_what_follows(name):
    gpt, ids = model(name), torch.randint(50, (1, 1024 if sees_content(name) else 4096))
    with torch.no_grad():
        torch.testing.assert_close(gpt(ids)[:, :512], gpt(ids[:, :512]), rtol=0, atol=2e-5)


@every_encoding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_are_finite_at_16384_or_the_encoding_says_why_not(name, dtype):
    gpt, ids = (
        model(name, layers=1).to(dtype),
        torch.randint(50, (1, 2049 if sees_content(name) else 16385)),
    )
    with torch.no_grad():
        if name == "learned":
            with pytest.raises(
                UserError, match="learned positions end at 4096, so length 16384 cannot be computed"
            ):
                gpt(ids[:, :-1])
        else:
            assert gpt(ids[:, :-1], labels=ids[:, 1:]).isfinite().all()


@every_encoding
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_gradients_reach_every_parameter(name, backend):
    if sees_content(name) and backend != "eager":
        pytest.skip("an encoding that looks at content has one backend")
    gpt, ids = model(name, backend).train(), torch.randint(50, (2, 65))
    gpt(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
    for path, parameter in gpt.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.abs().sum() > 0, path


@every_encoding
def test_weights_survive_a_round_trip_and_hold_nothing_of_a_length(name):
    first, second = encoding(name), encoding(name)
    second.load_state_dict(first.state_dict())
    for before, after in zip(biases(first, 4097), biases(second, 4097), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert first.state_dict().keys() == dict(first.named_parameters()).keys()


@every_encoding
def test_learned_gives_every_parameter_within_its_bounds(name):
    position = encoding(name)
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.fill_(-5.0)
    learned = position.learned()
    assert learned.keys() == dict(position.named_parameters()).keys()
    for key, value in learned.items():
        owner = position.get_submodule(key.rpartition(".")[0])
        low, high = owner.bounds.get(key.rpartition(".")[2], (-5.0, -5.0))
        assert low <= value.min()
        assert value.max() <= high


@every_encoding
def test_every_encoding_starts_from_the_same_weights(name):
    for path, tensor in model("none").state_dict().items():
        torch.testing.assert_close(model(name).state_dict()[path], tensor, rtol=0, atol=0)


@every_encoding
def test_the_docstring_says_what_it_is(name):
    assert REGISTRY[name].__doc__
