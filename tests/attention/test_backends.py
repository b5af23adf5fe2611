"""Every backend agrees with the definition, in values and gradients; so does a loop in float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from megatron.attention import BACKENDS, REFUSALS, Needs, attention, refusal
from megatron.conformance.subject import VOCAB, Subject
from megatron.errors import UserError
from tests.encodings import every_signature
from tests.support import NEEDED

EXAMPLES = {"sdpa": 25}  # of random cases; the others are slow without their compilers
LONGEST = {"sdpa": 600, "flex": 300, "triton": 100}


@pytest.fixture(autouse=True)
def _flex_learns_on_the_cpu(monkeypatch):
    """Torch refuses, for want of a kernel. Uncompiled it has gradients, which prove our inputs."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setitem(REFUSALS, "flex", _if_compiled(REFUSALS["flex"]))


def _if_compiled(refuses: Callable[[Needs], str | None]) -> Callable[[Needs], str | None]:
    return lambda needs: refuses(replace(needs, gradient=False))


def here(backend: str):
    """The backend as a parameter of a test, skipped where this machine cannot run it."""
    reason = refusal(backend, Needs(torch.empty(1, 1, 1, 16)))
    return pytest.param(
        backend, marks=pytest.mark.skip(reason=f"{backend}: {reason}") if reason else ()
    )


every_backend = pytest.mark.parametrize("backend", [here(name) for name in sorted(BACKENDS)])
every_other_backend = pytest.mark.parametrize(
    "backend", [here(name) for name in sorted(BACKENDS) if name != "eager"]
)


def inputs(
    batch, heads, queries, keys, head_dim, *, bias=True, weight=False, dtype=torch.float32, seed=0
):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, head_dim, generator=draw, dtype=dtype)
    k, v = torch.randn(2, batch, heads, keys, head_dim, generator=draw, dtype=dtype)
    tables = {
        "bias": torch.randn(heads, keys + 3, generator=draw) if bias else None,
        "weight": torch.rand(heads, keys + 3, generator=draw) if weight else None,
    }
    return [q, k, v], tables


def by_loop(q, k, v, bias, weight, window, chunk, segments):
    """The contract, one query at a time in float64."""
    q, k, v = q.double(), k.double(), v.double()
    queries, keys = q.shape[2], k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for row in range(queries):
                i = keys - queries + row
                visible = [
                    j
                    for j in range(i + 1)
                    if (window is None or i - j < window)
                    and (chunk is None or i // chunk - j // chunk <= 1)
                    and (segments is None or segments[b, i] == segments[b, j])
                ]
                scores = []
                for j in visible:
                    score = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(q.shape[-1])
                    score *= 1 if weight is None else weight[h, i - j].item()
                    scores.append(score + (0 if bias is None else bias[h, i - j].item()))
                probabilities = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
                out[b, h, row] = probabilities @ v[b, h, visible]
    return out


CASES = {
    "plain": {"bias": False},
    "bias": {},
    "weight": {"weight": True},
    "weight_alone": {"weight": True, "bias": False},
    "window": {"window": 7},
    "window_without_bias": {"window": 7, "bias": False},
    "chunk": {"chunk": 4},
    "segments": {"documents": True},
    "everything": {"weight": True, "window": 5, "chunk": 3, "documents": True},
}


@every_backend
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_backend_keeps_the_contract(backend, case):
    options = dict(CASES[case])
    masks = {name: options.pop(name, None) for name in ("window", "chunk")}
    documents = options.pop("documents", False)
    segments = torch.tensor([[0] * 4 + [1] * 15, [0] * 17 + [1] * 2]) if documents else None
    for queries in (1, 5, 19):
        (q, k, v), tables = inputs(2, 3, queries, 19, 4, **options)
        more = {"weight": tables["weight"], **masks, "segments": segments}
        out = attention(q, k, v, tables["bias"], **more, backend=backend, self_check=False)
        expected = by_loop(q, k, v, tables["bias"], **more)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@st.composite
def cases(draw, longest: int):
    """Inputs of attention and its masks; lengths around the blocks of every backend, and others."""
    keys = draw(
        st.one_of(
            st.integers(1, longest),
            st.sampled_from([1, 2, 64, 65, 127, 128, 129, 255, 256, 257, 513]),
        )
    )
    keys = min(keys, longest)
    queries = draw(st.one_of(st.just(keys), st.just(1), st.integers(1, keys)))
    batch, bias, weight = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans())
    tensors, tables = inputs(batch, 2, queries, keys, 8, bias=bias, weight=weight)
    segments = None
    if draw(st.booleans()):
        segments = torch.randint(0, 3, (batch, keys)).sort(dim=1).values
    window = st.one_of(st.none(), st.integers(1, longest))
    return tensors, tables, {"window": draw(window), "chunk": draw(window), "segments": segments}


def results(backend, tensors, tables, more):
    """Output and the gradients of everything that is given."""
    leaves = {name: x.clone().requires_grad_() for name, x in tables.items() if x is not None}
    given_tensors = [x.clone().requires_grad_() for x in tensors]
    tables = {name: leaves.get(name) for name in tables}
    out = attention(*given_tensors, **tables, **more, backend=backend, self_check=False)
    onto = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * onto).sum(), [*given_tensors, *leaves.values()])]


@every_other_backend
def test_every_backend_agrees_with_the_definition_in_values_and_gradients(backend):
    @settings(max_examples=EXAMPLES.get(backend, 10), deadline=None)
    @given(case=cases(LONGEST[backend]))
    def agrees(case):
        for ours, defined in zip(results(backend, *case), results("eager", *case), strict=True):
            torch.testing.assert_close(ours, defined, rtol=1e-4, atol=3e-5)

    agrees()


@every_backend
def test_two_runs_give_the_same_bits(backend):
    length = 100 if backend == "triton" else 150
    tensors, tables = inputs(2, 1, length, length, 8, weight=True)
    more = {"window": length - 10, "segments": (torch.arange(length) // 60).expand(2, -1)}
    for first, second in zip(
        *(results(backend, tensors, tables, more) for _ in range(2)), strict=True
    ):
        assert torch.equal(first, second)


@every_backend
def test_a_learned_table_gets_an_exact_gradient(backend):
    length = 80 if backend == "triton" else 300
    tensors, tables = inputs(2, 3, length, length, 8)
    wide = [x.double().requires_grad_() for x in tensors]
    table = tables["bias"].double().requires_grad_()
    attention(*wide, table, backend="eager").square().sum().backward()
    ours = tables["bias"].clone().requires_grad_()
    attention(*tensors, ours, backend=backend, self_check=False).square().sum().backward()
    error = (ours.grad.double() - table.grad).norm() / table.grad.norm()
    assert error < 1e-5


@every_backend
def test_bfloat16_inputs_keep_a_float32_table(backend):
    if backend == "triton":
        pytest.skip(
            "triton's interpreter cannot compute in bfloat16; tests/attention/test_cuda.py has it"
        )
    tensors, tables = inputs(1, 2, 400, 400, 16)
    expected = attention(*[x.double() for x in tensors], tables["bias"].double(), backend="eager")
    out = attention(
        *[x.bfloat16() for x in tensors], tables["bias"], backend=backend, self_check=False
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-2)


@every_backend
def test_what_comes_later_is_not_seen_far_out_under_the_steepest_slope(backend):
    length = {"sdpa": 16384, "triton": 200}.get(
        backend, 2048
    )  # without their compilers the others hold the square
    (q, k, v), _ = inputs(1, 1, length, length, 8)
    bias = -0.7071 * torch.arange(length)[None]
    before = attention(q, k, v, bias, backend=backend, self_check=False)
    v[:, :, -1] += 1e4
    after = attention(q, k, v, bias, backend=backend, self_check=False)
    torch.testing.assert_close(after[:, :, :-1], before[:, :, :-1], rtol=0, atol=0)
    assert (after[:, :, -1] != before[:, :, -1]).all()


@every_other_backend
@every_signature
def test_every_encoding_learns_alike_whatever_the_backend(name, backend):
    length = 70 if backend == "triton" else 140
    subject = Subject(name, NEEDED.get(name, {}), heads=2, train_length=length)
    ids, found = torch.randint(VOCAB, (1, length + 1)), {}
    position = subject.position()
    by_blocks = position.has("index_bias") or position.score_width > 1
    if backend == "flex":
        by_blocks = by_blocks or position.has("score_bias")
    if position.has("on_scores") or (by_blocks and backend != "sdpa"):
        with pytest.raises(
            UserError, match=f"attention_backend: {backend} cannot compute this: .*; choose"
        ):
            subject.gpt(backend, layers=1)(ids)
        return
    for one in ("eager", backend):
        gpt = subject.gpt(one, layers=1).train()
        gpt.self_check = False
        torch.manual_seed(0)  # for encodings that draw positions
        losses = gpt(ids[:, :-1], labels=ids[:, 1:])
        losses.mean().backward()
        found[one] = {
            "losses": losses,
            **{path: value.grad for path, value in gpt.named_parameters()},
        }
    for path, defined in found["eager"].items():
        torch.testing.assert_close(
            found[backend][path], defined, rtol=1e-3, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(3, 18)}, r"bias \[3, 18\] must be \[3, at least 19\]"),
        ({"weight": torch.zeros(2, 19)}, r"weight \[2, 19\] must be \[3, at least 19\]"),
        ({"window": 0}, "window: 0 must be at least 1"),
        ({"segments": torch.zeros(2, 18)}, r"segments \[2, 18\] must be \[2, 19\]"),
        ({"q": torch.zeros(2, 3, 20, 4)}, r"q \[2, 3, 20, 4\], k .* do not fit together"),
    ],
)
def test_shapes_that_disagree_are_refused(change, message):
    (q, k, v), tables = inputs(2, 3, 19, 19, 4)
    arguments = {"q": q, "k": k, "v": v, "bias": tables["bias"], **change}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)
