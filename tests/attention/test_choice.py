"""Which backend computes, and why: by device, the encoding's needs and the configuration."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.attention import COMPUTED, attention, choose
from megatron.attention.terms import Content, Terms
from megatron.conformance.subject import Subject
from megatron.errors import UserError

TABLE = torch.zeros(2, 8)


def content(rank: int) -> Content:
    w = torch.zeros(1, 2, 8, rank)
    return Content(None, w, w)


def queries(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> torch.Tensor:
    """A tensor without memory, for questions about CUDA on a machine without it."""
    with FakeTensorMode():
        return torch.empty(1, 2, 8, head_dim, device=device, dtype=dtype)


def test_auto_takes_the_best_and_says_why():
    pytest.importorskip("triton")
    cpu, cuda, wide = queries("cpu"), queries(), queries(head_dim=256)
    for q, terms, chosen in (
        (cpu, Terms(TABLE), "sdpa (auto: on the CPU)"),
        (cuda, Terms(on_scores=torch.sin), "eager (auto: the encoding looks at content)"),
        (cuda, Terms(), "sdpa (auto: plain causal on CUDA)"),
        (cuda, Terms(TABLE), "triton (auto: bias on CUDA)"),
        (cuda, Terms(content=content(1)), "triton (auto: content on CUDA)"),
        (
            cuda,
            Terms(content=content(3)),
            "sdpa (auto: content on CUDA; not triton: it knows biases by content of rank one",
        ),
        (cuda, Terms(window=4), "triton (auto: window on CUDA)"),
        (wide, Terms(TABLE), "sdpa (auto: bias on CUDA; not triton: head_dim 256"),
        (cuda, Terms(index_bias=torch.add), "sdpa (auto: index_bias on CUDA; not triton: it read"),
    ):
        assert str(choose("auto", q, terms)).startswith(chosen)


def test_a_backend_that_cannot_compute_something_says_why_and_what_can():
    cannot = "cannot compute this"
    looks, by_index = Terms(on_scores=torch.sin), Terms(index_bias=torch.add)
    for backend, terms, narrow, message in (
        (
            "flash",
            Terms(),
            False,
            "'flash' is not known; choose from auto, eager, sdpa, triton, flex",
        ),
        (
            "sdpa",
            looks,
            False,
            f"sdpa {cannot}: the encoding looks at content; choose auto",
        ),
        ("triton", Terms(), True, f"triton {cannot}: values are not as wide as"),
        ("triton", by_index, False, f"triton {cannot}: .*; choose auto"),
        ("flex", looks, False, f"flex {cannot}: the encoding looks at content; choose auto"),
        ("flex", Terms(content=content(3)), False, f"flex {cannot}: .*of rank one, not 3"),
    ):
        with pytest.raises(UserError, match=f"attention_backend: {message}"):
            choose(backend, queries(), terms, other_width=narrow)


def test_what_cannot_be_computed_is_refused_before_the_first_token():
    gpt = Subject("cope").gpt("sdpa")
    with pytest.raises(UserError, match="sdpa cannot compute this: the encoding looks at content"):
        _ = gpt.attention_choice
    tensors = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(UserError, match="sdpa cannot compute this: the encoding looks at content"):
        attention(*tensors, on_scores=torch.sin, backend="sdpa")


def test_documents_are_no_chunks():
    gpt = Subject("alibi").gpt("flex")  # which computes no chunks
    gpt.use_attention(replace(gpt.attention, reset_attention_mask=True))
    assert gpt.attention_choice.backend == "flex"


def test_a_term_that_a_backend_does_not_name_is_refused_by_it():
    """So a new field of `Terms` that a backend forgets is an error, never another result."""

    @dataclass(frozen=True)
    class More(Terms):
        softcap: float | None = None

    more = More(TABLE, softcap=50.0)
    for backend in ("sdpa", "triton", "flex"):
        with pytest.raises(UserError, match="cannot compute this: it does not compute softcap"):
            choose(backend, queries(), more)
    assert str(choose("auto", queries(), more)).startswith("eager (auto: it does not compute soft")
    assert str(choose("auto", queries("cpu"), More(TABLE))) == "sdpa (auto: on the CPU)"
    terms = {field.name for field in fields(Terms)}
    assert terms >= COMPUTED["sdpa"]
    assert terms - COMPUTED["sdpa"] == {"on_scores"}
