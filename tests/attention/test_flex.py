"""FlexAttention's mask of blocks, made without the whole mask, against torch's from the whole."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from megatron.attention.eager import mask
from megatron.attention.flex import _block_mask, flex


@pytest.mark.parametrize(
    ("before", "window", "chunk", "documents"),
    [(0, None, None, False), (256, 100, 200, False), (37, 300, 64, True)],
)
def test_blocks_are_those_that_torch_finds_in_the_whole_mask(before, window, chunk, documents):
    queries, keys = 512, 768
    segments = (
        (torch.arange(before + queries) // 150).expand(2, -1)[:, :keys] if documents else None
    )
    ours = _block_mask(queries, keys, before, window, chunk, torch.device("cpu"), segments)
    index = torch.arange(max(before + queries, keys))
    padded = (
        None
        if segments is None
        else torch.cat([segments, segments[:, -1:].expand(-1, len(index))], dim=1)
    )
    masked = mask(index[before : before + queries], index[:keys], window, chunk, padded)
    masked = masked.expand(2 if documents else 1, 1, -1, -1)
    theirs = create_block_mask(
        lambda b, h, i, j: ~masked[b, 0, i, j], len(masked), 1, queries, keys, device="cpu"
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_what_an_evaluation_leaves_behind_serves_a_training_step(monkeypatch):
    monkeypatch.setattr(
        torch_flex, "_validate_device", lambda *_: None
    )  # torch refuses gradients on the CPU
    q, k, v = torch.randn(3, 1, 1, 33, 8)
    absent = {"weight": None, "window": None, "chunk": None, "segments": None}
    with torch.inference_mode():
        expected = flex(q, k, v, None, **absent)
    out = flex(q.requires_grad_(), k, v, None, **absent)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert q.grad.isfinite().all()
