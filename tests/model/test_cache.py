"""Decoding with a cache agrees with a whole pass, for every encoding and option of attention."""

import math

import pytest
import torch

from megatron.config import load
from megatron.model import GPT, Cache, from_config
from megatron.positions import REGISTRY
from tests.encodings import every_signature
from tests.support import NEEDED

OPTIONS = {
    "plain": [],
    "window": ["window=20"],
    "window_train_length": ["window=train_length"],
    "blockwise": ["blockwise=true"],
    "logn_scale": ["logn_scale=true"],
    "everything": ["window=40", "blockwise=true", "logn_scale=true"],
}


def model(name: str, *settings: str) -> GPT:
    """Weights large enough for attention to be far from uniform."""
    shape = [
        "num_layers=2",
        "hidden_size=32",
        "num_attention_heads=4",
        "seq_length=48",
        f"pos_emb={name}",
    ]
    args = [f"pos_emb_args={NEEDED[name]}".replace("'", "")] if name in NEEDED else []
    longest = ["max_position_embeddings=256", "init_method_std=0.15"]
    return from_config(load([], [*shape, *longest, *args, *settings]), vocab=50).eval()


def in_pieces(gpt: GPT, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    cache = Cache()
    parts = [gpt(part, cache=cache) for part in ids.split(pieces, dim=1)]
    assert cache.length == ids.shape[1]
    return torch.cat(parts, dim=1)


@every_signature
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_pass(name):
    ids = torch.randint(50, (2, 141))
    for options in OPTIONS.values():
        gpt = model(name, *options)
        expected = gpt(ids)
        assert expected.std() > 0.1
        found = in_pieces(gpt, ids, [1, 5, 64, 1, 1, 5, 64])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@every_signature
@torch.no_grad()
def test_backends_agree(name):
    if REGISTRY[name].on_scores is not REGISTRY["none"].on_scores:
        pytest.skip("an encoding that looks at content has one backend")
    ids = torch.randint(50, (2, 256))
    for options in OPTIONS.values():
        eager, sdpa = (
            model(name, f"attention_backend={one}", *options)(ids) for one in ("eager", "sdpa")
        )
        torch.testing.assert_close(sdpa, eager, rtol=0, atol=1e-4)


@torch.no_grad()
def test_logn_scale_multiplies_the_scores_by_log_n_over_log_of_the_training_length():
    plain, scaled = model("none"), model("none", "logn_scale=true")
    scale = scaled.position.log_n_scale(0, 200).double()
    expected = [max(1.0, math.log(n) / math.log(48)) for n in range(1, 201)]
    torch.testing.assert_close(
        scale, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )
    ids = torch.randint(50, (1, 141))
    torch.testing.assert_close(scaled(ids[:, :48]), plain(ids[:, :48]), rtol=0, atol=1e-5)
    # The last row by hand, in float64: one layer's attention with its queries multiplied.
    recorded = {}
    layer = scaled.layers[0].attention
    layer.register_forward_hook(lambda _, inputs, output: recorded.update(x=inputs[0], out=output))
    scaled(ids)
    fused = torch.nn.functional.linear(
        recorded["x"].double(),
        layer.query_key_value.weight.double(),
        layer.query_key_value.bias.double(),
    )
    q, k, v = fused.view(1, 141, 4, 3, 8).permute(3, 0, 2, 1, 4)
    weights = (
        q[:, :, -1:] @ k.transpose(2, 3) / math.sqrt(8) * math.log(141) / math.log(48)
    ).softmax(dim=-1)
    mixed = (weights @ v).transpose(1, 2).reshape(1, 1, 32)
    out = torch.nn.functional.linear(mixed, layer.dense.weight.double(), layer.dense.bias.double())
    torch.testing.assert_close(recorded["out"][:, -1:].double(), out, rtol=0, atol=1e-5)
