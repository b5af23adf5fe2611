"""Decoding with a cache agrees with a whole pass, for every encoding and option of attention."""

import torch

from megatron.config import load
from megatron.model import GPT, Cache, from_config
from tests.encodings import every_signature
from tests.support import of_encoding

OPTIONS = [
    ["blockwise=true"],
    ["window=train_length", "logn_scale=true"],
    ["window=40", "blockwise=true", "logn_scale=true"],
]
"""Beside none and a window alone, which tests/positions/test_every_encoding.py asks for."""


def model(name: str, *settings: str) -> GPT:
    """Weights large enough for attention to be far from uniform."""
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
    shape += ["max_position_embeddings=256", "init_method_std=0.15"]
    return from_config(load([], [*shape, *of_encoding(name), *settings]), vocab=50).eval()


def in_pieces(gpt: GPT, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    cache = Cache()
    parts = [gpt(part, cache=cache) for part in ids.split(pieces, dim=1)]
    assert cache.length == ids.shape[1]
    return torch.cat(parts, dim=1)


@every_signature
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_pass(name):
    ids = torch.randint(50, (2, 141))
    for options in OPTIONS:
        gpt = model(name, *options)
        expected = gpt(ids)
        assert expected.std() > 0.1
        result = in_pieces(gpt, ids, [1, 5, 64, 1, 1, 5, 64])
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_logn_scale_multiplies_the_scores_by_log_n_over_log_of_the_training_length():
    """In a single layer, queries beyond the training length are those of ssmax without learning."""
    ids = torch.randint(50, (1, 141))
    plain = model("none", "num_layers=1")(ids)
    scaled = model("none", "num_layers=1", "logn_scale=true")(ids)
    args = "pos_emb_args={scale: null, learned: false}"
    expected = model("ssmax", "num_layers=1", args)(ids)
    torch.testing.assert_close(scaled[:, :48], plain[:, :48], rtol=0, atol=1e-5)
    torch.testing.assert_close(scaled[:, 47:], expected[:, 47:], rtol=0, atol=1e-5)
    assert (scaled - plain)[:, 60:].abs().max() > 1e-3


def test_gradients_flow_through_a_cache():
    gpt, ids = model("kerple_log"), torch.randint(50, (1, 30))
    parameters = list(gpt.parameters())
    expected = torch.autograd.grad(gpt(ids).square().sum(), parameters)
    result = torch.autograd.grad(in_pieces(gpt, ids, [10, 1, 19]).square().sum(), parameters)
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
