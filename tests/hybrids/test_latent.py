"""mla layers beside the rest of a model; tests/interop compares them with transformers'."""

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.methods import MeasuredAttention
from megatron.model import GPT, AttentionSettings, from_config, position_from_config
from tests.encodings import every_signature
from tests.model.test_cache import in_pieces
from tests.support import of_encoding

HEADS, HIDDEN = 4, 32
MODEL = ["num_layers=3", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
MODEL += ["init_method_std=0.15", "layers=[mla, mla, gated_delta]", "v_head_dim=20"]


def model(*words: str) -> GPT:
    return from_config(load([], [*MODEL, *words]), vocab=50).eval()


@every_signature
@torch.no_grad()
def test_every_encoding_decodes_in_pieces_as_in_one_pass_or_is_refused(name):
    ids = torch.randint(50, (2, 81))
    words = [*of_encoding(name), "max_position_embeddings=96"]
    position = position_from_config(load([], [*MODEL[:4], *words]))
    keys_of_heads = not position.grouped_queries or position.score_width != 1
    if keys_of_heads or position.heads_per_query != 1:
        with pytest.raises(UserError, match="layers: mla cannot have"):
            model(*words)
        return
    gpt = model(*words)
    expected = gpt(ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(in_pieces(gpt, ids, [1, 64, 5, 1, 10]), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_documents_windows_and_sinks_act_as_on_each_document_alone():
    ids = torch.randint(1, 50, (1, 60))
    ids[0, [20, 41]] = 0
    words = ["layers=[mla]", "window=15", "softmax_type=learnable"]
    for encoding in ("rotary", "kerple_log", "fox"):
        config = load([], [*MODEL, *words, f"pos_emb={encoding}", "reset_attention_mask=true"])
        gpt = from_config(config, vocab=50, end_of_document=0).eval()
        for layer in gpt.layers:
            layer.attention.softmax_offset.uniform_(1, 2)
        together = gpt(ids)
        gpt.use_attention(AttentionSettings.of(config.attention).of_one_document())
        alone = torch.cat([gpt(part) for part in ids.split([21, 21, 18], dim=1)], dim=1)
        torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)
        assert (gpt(ids) - together).abs().max() > 1e-2


@torch.no_grad()
def test_methods_move_the_part_of_the_heads_that_the_encoding_acts_on():
    """rerope by its definition: rotations of at most 11 tokens, in float64."""
    gpt = model("layers=[mla]", "num_layers=1", "pos_emb=rotary").double()
    x, captured = torch.randn(1, 30, HIDDEN).double(), []
    layer = gpt.layers[0].attention
    gpt.layers[0].register_forward_pre_hook(lambda _, arguments: captured.append(arguments[1]))
    gpt.use_attention(MeasuredAttention(method="rerope,window=11"))
    gpt(torch.zeros(1, 30, dtype=torch.long))
    result = layer(x, captured[0])

    rank, turned, plain, values = 32, 4, 8, 20
    q = layer.query(x).view(30, HEADS, plain + turned).transpose(0, 1)
    latent, key = layer.latent_key(x)[0].split([rank, turned], dim=1)
    latent = latent * (latent.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    k, v = layer.key_value(latent).view(30, HEADS, -1).transpose(0, 1).split([plain, values], 2)
    distance = (torch.arange(30)[:, None] - torch.arange(30)).clamp(max=11).double()
    scores = q[..., :plain] @ k.mT
    for pair, frequency in ((0, 1.0), (1, 0.01)):
        cos, sin = (distance * frequency).cos(), (distance * frequency).sin()
        first, second = q[..., plain + pair, None], q[..., plain + pair + 2, None]
        scores += (first * cos - second * sin) * key[:, pair]
        scores += (second * cos + first * sin) * key[:, pair + 2]
    scores = (scores / 12**0.5).masked_fill(distance < 0, -torch.inf)
    expected = layer.dense((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(result[0], expected, rtol=0, atol=1e-9)
