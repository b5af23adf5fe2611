"""A compiled backend is compared with the definition at its first use of a kind, and only there."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import BACKENDS, COMPUTED, attention, self_check
from megatron.attention.eager import eager
from megatron.errors import UserError


@pytest.fixture
def plant(monkeypatch):
    """Add a function to the backends as `planted`; returns the lengths that it is called with."""

    def put(function):
        lengths = []

        def planted(q, *rest, **more):
            lengths.append(q.shape[2])
            return function(q, *rest, **more)

        monkeypatch.setitem(BACKENDS, "planted", planted)
        monkeypatch.setitem(COMPUTED, "planted", COMPUTED["sdpa"])
        monkeypatch.setattr(self_check, "_passed", set())
        return lengths

    return put


def inputs(length=20, **more):
    q, k, v = torch.randn(3, 1, 2, length, 16)
    return {"q": q, "k": k, "v": v, "bias": torch.randn(2, length), "backend": "planted", **more}


def half_a_gradient(q, k, v, terms):
    bias = terms.bias.detach() / 2 + terms.bias / 2
    return eager(q, k, v, replace(terms, bias=bias))


def no_window(q, k, v, terms):
    return eager(q, k, v, replace(terms, window=None))


def crash(q, *rest, **more):
    raise RuntimeError("ptxas: unsupported\nand a long trace")


def test_a_broken_kernel_is_an_error_and_not_wrong_science(plant):
    wrong = r"is wrong on cpu \(float32, head_dim 16, bias"
    for broken, more, message in (
        (half_a_gradient, {}, wrong + r", with gradients\): its gradient of bias differs"),
        (
            no_window,
            {"window": 5},
            wrong + r" and window, with gradients\): its output .* \d+\.\d% -",
        ),
        (crash, {}, "RuntimeError: ptxas: unsupported - choose attention_backend: sdpa"),
    ):
        plant(broken)
        arguments = inputs(**more)
        arguments["bias"].requires_grad_()
        with pytest.raises(UserError, match=f"attention_backend: planted .*{message}"):
            attention(**arguments)
        if broken is not crash:
            attention(**arguments, self_check=False)


def test_a_right_kernel_is_checked_once_for_every_kind(plant):
    lengths = plant(eager)
    learned = inputs()
    learned["q"].requires_grad_()
    for arguments, called in (
        (inputs(), [200, 20]),
        (inputs(30), [30]),
        (inputs(32), [208, 32]),  # a multiple of 16 is another program
        (inputs(window=7), [200, 20]),
        (learned, [200, 20]),
        ({**inputs(), "q": torch.randn(1, 2, 1, 16)}, [1, 1]),
        (inputs(), [20]),
        ({**inputs(), "backend": "sdpa"}, []),
    ):
        lengths.clear()
        attention(**arguments)
        assert lengths == called


def test_the_check_disturbs_nothing_around_it(plant):
    lengths = plant(eager)
    with torch.inference_mode():
        attention(**inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(**inputs(weight=torch.rand(2, 20)))
    arguments = inputs()
    arguments["bias"].requires_grad_()
    before = torch.get_rng_state()
    out = checkpoint(attention, use_reentrant=False, **arguments)
    recomputed = torch.autograd.grad(out.square().sum(), arguments["bias"])
    plain = torch.autograd.grad(attention(**arguments).square().sum(), arguments["bias"])
    assert torch.equal(*recomputed, *plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert lengths.count(200) == 3
