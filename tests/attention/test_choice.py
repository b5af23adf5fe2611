"""Which backend computes, and why: by device, the encoding's needs and the configuration."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.attention import BACKENDS, Needs, attention, choose
from megatron.conformance.subject import Subject
from megatron.errors import UserError


def queries(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> torch.Tensor:
    """A tensor without memory, for questions about CUDA on a machine without it."""
    with FakeTensorMode():
        return torch.empty(1, 2, 8, head_dim, device=device, dtype=dtype)


def test_auto_takes_the_best_and_says_why():
    pytest.importorskip("triton")
    cpu, cuda, wide = queries("cpu"), queries(), queries(head_dim=256)
    for needs, chosen in (
        (Needs(cpu, tables=True), "sdpa (auto: on the CPU)"),
        (Needs(cuda, on_scores=True), "eager (auto: the encoding looks at content)"),
        (Needs(cuda), "sdpa (auto: plain causal on CUDA)"),
        (Needs(cuda, tables=True), "triton (auto: distance table on CUDA)"),
        (Needs(cuda, content_rank=1), "triton (auto: bias by content on CUDA)"),
        (Needs(cuda, content_rank=3), "sdpa (auto: bias by content on CUDA; not triton: it knows"),
        (Needs(cuda, masked=True), "triton (auto: window, chunks or documents on CUDA)"),
        (Needs(wide, tables=True), "sdpa (auto: distance table on CUDA; not triton: head_dim 256"),
        (Needs(cuda, index_bias=True), "sdpa (auto: index bias on CUDA; not triton: it reads"),
    ):
        assert str(choose("auto", needs)).startswith(chosen)


def test_a_backend_that_cannot_compute_something_says_why_and_what_can():
    for backend, needs, message in (
        ("flash", {}, "'flash' is not known; choose from auto, eager, sdpa, triton"),
        ("sdpa", {"on_scores": True}, "sdpa cannot compute this: the encoding looks at content; c"),
        ("triton", {"narrow_values": True}, "triton cannot compute this: queries and keys are wid"),
        ("triton", {"index_bias": True}, "triton cannot compute this: .*; choose auto or sdpa"),
    ):
        with pytest.raises(UserError, match=f"attention_backend: {message}"):
            choose(backend, Needs(queries(), **needs))


def test_what_cannot_be_computed_is_refused_before_the_first_token():
    gpt = Subject("cope").gpt("sdpa")
    with pytest.raises(UserError, match="sdpa cannot compute this: the encoding looks at content"):
        _ = gpt.attention_choice
    tensors = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(UserError, match="sdpa cannot compute this: the encoding looks at content"):
        attention(*tensors, on_scores=torch.sin, backend="sdpa")


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
