"""A compiled backend is compared with the definition at its first use of a kind, and only there."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import BACKENDS, attention, self_check
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
        monkeypatch.setattr(self_check, "_passed", set())
        return lengths

    return put


def inputs(length=20, **more):
    q, k, v = torch.randn(3, 1, 2, length, 16)
    return {"q": q, "k": k, "v": v, "bias": torch.randn(2, length), "backend": "planted", **more}


def a_key_too_far(q, k, v, bias, **more):
    return eager(q, k, v, None if bias is None else bias.roll(1, dims=1), **more)


def half_a_gradient(q, k, v, bias, **more):
    return eager(q, k, v, bias.detach() / 2 + bias / 2, **more)


def not_a_number_at_the_end(q, k, v, bias, **more):
    out = eager(q, k, v, bias, **more)
    return torch.cat([out[:, :, :-1], out[:, :, -1:] * torch.nan], dim=2)


def no_window(q, k, v, bias, **more):
    return eager(q, k, v, bias, **{**more, "window": None})


def crash(q, *rest, **more):
    raise RuntimeError("ptxas: unsupported\nand a long trace")


def test_a_broken_kernel_is_an_error_and_not_wrong_science(plant):
    wrong = r"is wrong on cpu \(float32, head_dim 16, bias\): its output differs .* by \d+\.\d%, at"
    for broken, more, message in (
        (a_key_too_far, {}, wrong),
        (
            half_a_gradient,
            {"learned": True},
            r"bias, with gradients\): its gradient of bias differs",
        ),
        (not_a_number_at_the_end, {}, "its output differs from the definition by nan%"),
        (no_window, {"window": 5}, r"bias and window\): its output differs"),
        (crash, {}, "RuntimeError: ptxas: unsupported - choose attention_backend: sdpa"),
    ):
        plant(broken)
        given = inputs(**more)
        given["bias"].requires_grad_(given.pop("learned", False))
        with pytest.raises(UserError, match=f"attention_backend: planted .*{message}"):
            attention(**given)
        if broken is not crash:
            attention(**given, self_check=False)


def test_a_right_kernel_is_checked_once_for_every_kind(plant):
    lengths = plant(eager)
    for length in (20, 30, 20):
        out = attention(**inputs(length))
    assert out.shape == (1, 2, 20, 16)
    assert lengths == [200, 20, 30, 20]
    attention(**inputs(32))
    assert lengths[4:] == [208, 32], "a multiple of 16 is another program"
    del lengths[4:]
    attention(**inputs(20, window=7))
    learned = inputs(20)
    learned["q"].requires_grad_()
    attention(**learned)
    one = inputs(20)
    attention(**{**one, "q": one["q"][:, :, -1:]})
    assert lengths[4:] == [200, 20, 200, 20, 1, 1]
    for name in ("eager", "sdpa"):
        attention(**{**one, "backend": name})
    assert len(lengths) == 10


def test_the_check_disturbs_nothing_around_it(plant):
    lengths = plant(eager)
    state = torch.get_rng_state()
    with torch.inference_mode():
        attention(**inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(**inputs(weight=torch.rand(2, 20)))
    torch.set_rng_state(state)
    given, gradients = inputs(), []
    given["bias"].requires_grad_()
    after = torch.get_rng_state()
    for recomputed in (True, False):
        out = (
            checkpoint(attention, use_reentrant=False, **given)
            if recomputed
            else attention(**given)
        )
        gradients += torch.autograd.grad(out.square().sum(), given["bias"])
    assert torch.equal(*gradients)
    assert torch.equal(torch.get_rng_state(), after)
    assert lengths.count(200) == 3
