"""Our Triton programs skip keys that get exactly nothing, and give what they give without."""

import pytest
import torch

from megatron.attention import triton_passes
from megatron.attention.eager import ScoreBias
from megatron.attention.triton_kernel import triton_attention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inputs lie on the CPU")
KEYS = 270
MASKS = {
    "causal": {},
    "masks": {"window": 190, "segments": (torch.arange(KEYS) // 170).expand(1, -1)},
}


def inputs(queries: int) -> dict[str, torch.Tensor]:
    """One steep head, of which most keys get nothing, and a flat one."""
    draw = torch.Generator().manual_seed(0)
    slopes = torch.tensor([8.0, 0.01])[:, None]
    gates = torch.tensor([20.0, 0.01])[:, None] * torch.rand(2, KEYS, generator=draw)
    return {
        "q": torch.randn(1, 2, queries, 16, generator=draw),
        "k": torch.randn(1, 2, KEYS, 16, generator=draw),
        "v": torch.randn(1, 2, KEYS, 16, generator=draw),
        "bias": -slopes * torch.arange(KEYS),
        "w": gates.cumsum(1)[None].double(),
    }


def results(monkeypatch, given, names, masks, *, fewest):
    monkeypatch.setattr(triton_passes, "FEWEST_KEYS", fewest)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    content = (None, leaves["w"]) if "w" in names else None
    options = {"weight": None, "window": None, "chunk": None, "segments": None, **masks}
    bias = leaves["bias"] if "bias" in names else None
    out = triton_attention(
        *(leaves["q"], leaves["k"], leaves["v"], bias),
        index_bias=None,
        score_bias=ScoreBias.of(content),
        **options,
    )
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": out.detach(), **found}


@pytest.mark.parametrize(("names", "masks"), [(("bias",), "causal"), (("bias", "w"), "masks")])
def test_what_is_skipped_changes_nothing(names, masks, monkeypatch):
    given = inputs(130)
    skipping = results(monkeypatch, given, names, MASKS[masks], fewest=2)
    whole = results(monkeypatch, given, names, MASKS[masks], fewest=10**9)
    assert skipping.keys() == whole.keys() >= {"out", "q", "k", "v", *names}
    for name, expected in whole.items():
        largest = expected.abs().max()
        assert (skipping[name] - expected).abs().max() <= 1e-6 * largest, name
