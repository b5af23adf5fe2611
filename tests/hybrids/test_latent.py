"""mla layers beside the rest of a model; tests/interop compares them with transformers'."""

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.methods import MeasuredAttention
from megatron.model import GPT, AttentionSettings, from_config, positions_from_config
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
    [position, *_], _ = positions_from_config(load([], [*MODEL[:4], *words]))
    keys_of_heads = not position.grouped_queries or position.score_width != 1
    if keys_of_heads or position.heads_per_query != 1:
        with pytest.raises(UserError, match="layers: mla does not work with"):
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


def test_methods_that_move_tokens_are_refused():
    gpt = model("pos_emb=rotary")
    gpt.use_attention(MeasuredAttention(method="rerope,window=11"))
    with pytest.raises(UserError, match="method: does not work with mla layers"):
        gpt(torch.zeros(1, 30, dtype=torch.long))
