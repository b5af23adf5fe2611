"""A compiled backend is compared with the definition at its first use of a kind, and only there."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import (
    BACKENDS,
    COMPUTED,
    FAULTS,
    KERNELS,
    attention,
    choose,
)
from megatron.attention.eager import eager
from megatron.attention.terms import Terms
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


def cannot_compile(q, k, v, terms):
    def no_compiler(graph, example_inputs):
        raise RuntimeError("ptxas is missing")

    return torch.compile(eager, backend=no_compiler)(q, k, v, terms)


@pytest.fixture
def kernels(plant, monkeypatch):
    """`auto` on this machine's device takes a planted kernel first, as our own on CUDA."""

    def put(function, *further):
        monkeypatch.setitem(KERNELS, "cpu", ("planted", *further))
        FAULTS.clear()
        return plant(function)

    yield put
    FAULTS.clear()


def warnings_in(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "megatron.attention"]


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (cannot_compile, "BackendCompilerFailed"),
        (crash, "ptxas: unsupported"),
        (half_a_gradient, "is wrong"),
    ],
)
@pytest.mark.parametrize("further", [(), ("flex",)])
def test_auto_goes_on_without_a_kernel_that_has_a_fault(kernels, caplog, broken, word, further):
    """It does not compile, launch or agree: one warning, and the right result."""
    lengths = kernels(broken, *further)
    arguments = inputs(backend="auto", window=7)
    arguments["bias"].requires_grad_()
    leaves = [arguments[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    out = attention(**arguments)
    direction = torch.randn_like(out)
    expected = attention(**{**arguments, "backend": "eager"})
    # On a CPU, torch's flex_attention has no gradients, so sdpa is next.
    for ours, exact in zip(
        (out, *torch.autograd.grad(out, leaves, direction)),
        (expected, *torch.autograd.grad(expected, leaves, direction)),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    attention(**arguments)
    [warning] = warnings_in(caplog)
    assert warning.startswith(
        "attention_backend: sdpa (auto: bias and window on CPU; not planted: "
    )
    assert word in warning
    assert lengths == [200]
    choice = choose("auto", arguments["q"], Terms(arguments["bias"]))
    assert choice.backend == "sdpa"
    assert f"not planted: {FAULTS['planted', 'cpu']}" in choice.reason


def test_flex_follows_a_kernel_with_a_fault_where_gradients_are_not_asked_for(kernels, caplog):
    kernels(crash, "flex")
    arguments = inputs(150, backend="auto", window=70)
    with torch.no_grad():
        out = attention(**arguments)
        expected = attention(**{**arguments, "backend": "eager"})
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    [warning] = warnings_in(caplog)
    assert warning.startswith("attention_backend: flex (auto: ")
    assert "; not planted: fails on cpu" in warning


def test_where_all_kernels_have_faults_one_warning_names_each(kernels, monkeypatch, caplog):
    kernels(crash, "flex")
    monkeypatch.setitem(BACKENDS, "flex", no_window)
    attention(**inputs(backend="auto", window=7))
    [warning] = warnings_in(caplog)
    assert warning.startswith("attention_backend: sdpa (auto: ")
    assert "; not planted: fails on cpu" in warning
    assert "; not flex: is wrong on cpu" in warning
