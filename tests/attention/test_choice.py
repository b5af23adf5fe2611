"""Which backend computes, and why: by device, the encoding's needs and the configuration."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.attention import BACKENDS, REFUSALS, Needs, attention, choose
from megatron.conformance.subject import Subject
from megatron.errors import UserError


def queries(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> torch.Tensor:
    """A tensor without memory, for questions about CUDA on a machine without it."""
    with FakeTensorMode():
        return torch.empty(1, 2, 8, head_dim, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("needs", "chosen"),
    [
        (Needs(queries("cpu"), tables=True, gradient=True), "sdpa (auto: on the CPU)"),
        (Needs(queries("cpu"), content=True), "eager (auto: the encoding looks at content)"),
        (
            Needs(queries(), content=True, tables=True),
            "eager (auto: the encoding looks at content)",
        ),
        (Needs(queries(), gradient=True), "sdpa (auto: plain causal on CUDA)"),
        (Needs(queries(), tables=True, gradient=True), "triton (auto: distance table on CUDA)"),
        (Needs(queries(), content_bias=True), "triton (auto: bias by content on CUDA)"),
        (
            Needs(queries(), content_bias=True, content_rank=3),
            "sdpa (auto: bias by content on CUDA; not triton: it knows biases by content of rank",
        ),
        (
            Needs(queries(), masked=True),
            "triton (auto: window, chunks or documents on CUDA)",
        ),
        (
            Needs(queries(head_dim=256), tables=True),
            "flex (auto: distance table on CUDA; not triton: head_dim 256",
        ),
        (
            Needs(queries(), index_bias=True),
            "sdpa (auto: index bias on CUDA; not triton: it reads biases from a table",
        ),
    ],
)
def test_auto_takes_the_best_and_says_why(needs, chosen):
    pytest.importorskip("triton")
    assert str(choose("auto", needs)).startswith(chosen)


def test_without_triton_flex_stands_in(monkeypatch):
    monkeypatch.setitem(REFUSALS, "triton", lambda needs: "the package triton is not installed")
    choice = choose("auto", Needs(queries(), tables=True, gradient=True))
    assert (
        str(choice)
        == "flex (auto: distance table on CUDA; not triton: the package triton is not installed)"
    )


@pytest.mark.parametrize(
    ("backend", "needs", "message"),
    [
        ("flash", {}, "'flash' is not known; choose from auto, eager, sdpa, flex, triton"),
        (
            "sdpa",
            {"content": True},
            "sdpa cannot compute this: the encoding looks at content; choose eager",
        ),
        (
            "flex",
            {"gradient": True},
            "flex cannot compute this: it has no gradients on cpu; choose auto or sdpa",
        ),
        (
            "flex",
            {"index_bias": True},
            "flex cannot compute this: it reads biases from a table .*; choose auto or sdpa",
        ),
        (
            "flex",
            {"q": queries(head_dim=8)},
            "flex cannot compute this: head_dim 8 is less than 16; choose auto or",
        ),
        (
            "flex",
            {"q": queries(dtype=torch.float64)},
            "flex cannot compute this: it does not know float64 on CUDA",
        ),
        (
            "triton",
            {"q": queries(head_dim=256)},
            "triton cannot compute this: .*; choose auto or sdpa",
        ),
    ],
)
def test_a_backend_that_cannot_compute_something_says_why_and_what_can(backend, needs, message):
    with pytest.raises(UserError, match=f"attention_backend: {message}"):
        choose(backend, Needs(**{"q": queries("cpu"), **needs}))


def test_what_cannot_be_computed_is_refused_before_the_first_token():
    gpt = Subject("alibi").gpt("flex")
    assert gpt.resolved_backend == "flex"
    with pytest.raises(UserError, match="flex cannot compute this: it has no gradients on cpu"):
        _ = gpt.train().attention_choice
    tensors = torch.randn(3, 1, 2, 8, 16, requires_grad=True)
    with pytest.raises(UserError, match="flex cannot compute this: it has no gradients on cpu"):
        attention(*tensors, backend="flex")


@pytest.mark.parametrize("name", ["rotary", "alibi", "fire", "cable", "cope", "pope"])
def test_a_model_names_the_backend_that_really_acts(name, monkeypatch):
    gpt, acted = Subject(name).gpt(), []
    for backend, function in list(BACKENDS.items()):

        def noted(*tensors, backend=backend, function=function, **more):
            acted.append(backend)
            return function(*tensors, **more)

        monkeypatch.setitem(BACKENDS, backend, noted)
    gpt(torch.zeros(1, 5, dtype=torch.long))
    assert set(acted) == {gpt.resolved_backend}
