"""Our Triton programs skip keys that get exactly nothing, and give what they give without."""

import math

import pytest
import torch

from megatron.attention import triton_passes
from megatron.attention.content import ScoreBias
from megatron.attention.triton_kernel import triton_attention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inputs lie on the CPU")
KEYS = 300
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


@pytest.mark.parametrize(
    ("names", "masks", "queries"),
    [
        (("bias",), "causal", KEYS),
        (("w",), "causal", 140),
        (("bias", "w"), "masks", 140),
    ],
)
def test_what_is_skipped_changes_nothing(names, masks, queries, monkeypatch):
    given = inputs(queries)
    skipping = results(monkeypatch, given, names, MASKS[masks], fewest=2)
    whole = results(monkeypatch, given, names, MASKS[masks], fewest=10**9)
    assert skipping.keys() == whole.keys() >= {"out", "q", "k", "v", *names}
    for name, expected in whole.items():
        largest = expected.abs().max()
        assert (skipping[name] - expected).abs().max() <= 1e-6 * largest, name


def test_keys_without_weight_are_not_read(monkeypatch):
    """A value that is no number spoils all that reads it, also with a probability of 0."""
    given = inputs(140)
    given["v"][:, 0, :128] = math.nan
    for fewest, is_read in ((2, False), (10**9, True)):
        out = results(monkeypatch, given, ("bias",), {}, fewest=fewest)["out"]
        assert out[:, 0].isnan().any() == is_read
        assert out[:, 1].isfinite().all()


def test_gradients_of_keys_do_not_read_queries_that_give_them_nothing(monkeypatch):
    given = inputs(KEYS)
    monkeypatch.setattr(triton_passes, "FEWEST_KEYS", 2)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    options = {"weight": None, "window": None, "chunk": None, "segments": None}
    tensors = [leaves[name] for name in ("q", "k", "v", "bias")]
    out = triton_attention(*tensors, index_bias=None, **options)
    dout = torch.ones_like(out)
    dout[:, 0, 256:] = math.nan
    out.backward(dout)
    assert leaves["v"].grad[:, 0, :128].isfinite().all()
    assert leaves["v"].grad[:, 0, 256:].isnan().any()
