"""An encoding's score_mod and mask under torch's flex_attention, against the definition.

torch refuses gradients of q, k and v on the CPU, although its code there computes them; tests that
ask for these go around its check. Those of learned tables and gates need no such thing.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.kernel.flex.flex_attention import validate_joint_graph
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from megatron.attention import BACKENDS, attend, attention, flex, with_sink
from megatron.attention.flex import CALLS, blocks_of_mask, modifiers
from megatron.attention.terms import Content, Terms, mask, visible_keys
from megatron.conformance.subject import Subject, random_ids
from megatron.errors import UserError
from megatron.positions import REGISTRY, Shape, build
from tests.encodings import HOOKS
from tests.support import NEEDED, blocks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

BATCH, LENGTH = 2, 150
SHAPE = Shape(heads=4, head_dim=16, hidden=32, train_length=64)
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 61
TWO_DOCUMENTS = torch.tensor([[0] * 70 + [1] * 80, [5] * 150])
REFUSED = {
    "cope": "on_scores",
    "dape": "on_scores",
    "dape_v2": "on_scores",
    "grape_ap": "on_scores",
    "stick_breaking": "on_scores",
    "path": "block_scores",
    "path_fox": "block_scores",
    "wall": "block_scores",
    "grape_a": "a score_bias of rank 3",
}
OPTIONS = {**NEEDED, "learned": {"max_positions": 150}}
COMPUTED = sorted(REGISTRY.keys() - REFUSED.keys() - {"sum"})
ALL_TERMS = {"parts": ["kerple_bias_wht", "fire", "fox"]}


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()


def encoding_of(name, **options):
    """One whose parameters are off their first values, which are often zeros."""
    torch.manual_seed(1)
    encoding = build(name, SHAPE, **(options or OPTIONS.get(name, {})))
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return encoding.eval()


def inputs(length=LENGTH):
    """q, k, v and the layer's input x, leaves."""
    torch.manual_seed(2)
    heads = [torch.randn(BATCH, SHAPE.heads, length, SHAPE.head_dim) for _ in range(3)]
    return [x.requires_grad_() for x in (*heads, torch.randn(BATCH, length, SHAPE.hidden))]


def before_attention(encoding, q, k, x, **masks):
    """q and k as a model changes them by the calls that CALLS names."""
    length = x.shape[1]
    encoding.prepare(length)
    x = encoding.on_embeddings(x)
    x = encoding.on_embeddings_by_ids(x, IDS[:, :length], {})
    q, k = encoding.on_queries_keys(q, k)
    q, k = encoding.on_queries_keys_by_content(q, k, x, {})
    if encoding.has("score_scale"):
        index = torch.arange(length)
        count = visible_keys(index, masks.get("window"), masks.get("chunk"))
        if masks.get("segments") is not None:
            count = (~mask(index, index, **masks)).sum(-1)[:, 0]
        q = q * encoding.score_scale(count)[..., None]
    return q, k, x


def defined(encoding, q, k, v, x, sink=None, **masks):
    """The output by megatron/attention/eager.py."""
    q, k, x = before_attention(encoding, q, k, x, **masks)
    length, content = x.shape[1], None
    if encoding.has("score_bias"):
        content = Content.of(encoding.score_bias(x, {}), length)
    terms = Terms(
        encoding.distance_bias(length),
        encoding.distance_weight(length),
        **masks,
        index_bias=encoding.index_bias if encoding.has("index_bias") else None,
        content=content,
        sink=sink,
    )
    return attend(q, k, v, terms, "eager")


def assert_equal(ours, expected, leaves):
    """Outputs, and gradients of all leaves that have some, to float32's precision."""
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)
    direction = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad(out, leaves, direction, allow_unused=True) for out in (ours, expected)
    ]
    assert any(gradient is not None for gradient in gradients[1])
    for gradient, exact in zip(*gradients, strict=True):
        assert (gradient is None) == (exact is None)
        if exact is not None:
            scale = max(1.0, exact.abs().max().item())
            torch.testing.assert_close(gradient / scale, exact / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COMPUTED)
def test_every_encoding_changes_scores_as_the_definition_does(name):
    """score_mod and mask_mod at all indices at once: no loop of torch's is between."""
    encoding = encoding_of(name)
    segments = None if encoding.crosses_documents else TWO_DOCUMENTS
    for masks in ({}, {"window": 40}, {"chunk": 32}, {"window": 90, "segments": segments}):
        masks = {"window": None, "chunk": None, "segments": None, **masks}
        leaves = inputs()
        q, k, x = before_attention(encoding, leaves[0], leaves[1], leaves[3], **masks)
        score_mod, block_mask = flex(encoding, LENGTH, x=x, **masks, applied=CALLS)
        every = [BATCH, SHAPE.heads, LENGTH, LENGTH]
        index = [torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate(every)]
        scores = score_mod(q @ k.mT / math.sqrt(q.shape[-1]), *index)
        scores = scores.masked_fill(~block_mask.mask_mod(*index), -math.inf)
        expected = defined(encoding, *leaves, **masks)
        assert_equal(scores.softmax(-1) @ leaves[2], expected, [*leaves, *encoding.parameters()])


@pytest.mark.parametrize("length", [1, 129, LENGTH])
def test_flex_attention_has_values_and_gradients_of_the_definition(length, monkeypatch):
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    encoding = encoding_of("sum", **ALL_TERMS)
    masks = {"window": 90, "chunk": None, "segments": TWO_DOCUMENTS[:, :length]}
    leaves, sink = inputs(length), torch.randn(SHAPE.heads, requires_grad=True)
    q, k, v, x = leaves
    score_mod, block_mask = flex(encoding, length, x=x, **masks)
    options = {"score_mod": score_mod, "block_mask": block_mask}
    out, extra = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    every_leaf = [*leaves, sink, *encoding.parameters()]
    expected = defined(encoding, *leaves, sink, **masks)
    assert_equal(with_sink(out, extra.lse, sink), expected, every_leaf)


def softmax_of(scores, v):
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def test_fox_is_the_papers_formula_in_float64_where_sums_are_large():
    """Σ log f is near -10⁵ from the first token on, where float32 has steps of 0.008."""
    q, k, v, x = (leaf.detach() for leaf in inputs())
    encoding = encoding_of("fox")
    x[:, 0] = (
        -1e5 * encoding.weight.detach().sum(0) / encoding.weight.detach().sum(0).square().sum()
    )
    score_mod, block_mask = flex(encoding, LENGTH, x=x)
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
    gate = x.double() @ encoding.weight.double().T + encoding.bias.double()
    total = torch.nn.functional.logsigmoid(gate).cumsum(1).transpose(1, 2)
    assert total[:, :, 0].max() < -1e4
    decay = total[..., :, None] - total[..., None, :]
    expected = softmax_of(q.double() @ k.double().mT / 4 + decay, v.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_score_mod_computes_is_refused_by_name(name):
    message = f"flex: {REGISTRY[name].__name__}: .*{REFUSED[name]}.*megatron.attention.attention"
    with pytest.raises(UserError, match=message):
        flex(encoding_of(name), LENGTH, x=torch.zeros(1, LENGTH, SHAPE.hidden), applied=CALLS)


def test_every_hook_is_computed_called_or_refused():
    """A hook that is new would be left out without a word."""
    computed = {"distance_bias", "distance_weight", "index_bias", "score_bias"}
    elsewhere = {"on_queries_keys_at"}  # for methods of evaluation
    assert computed | CALLS.keys() | {"on_scores", "block_scores"} | elsewhere == set(HOOKS)


def test_a_hook_before_attention_that_the_model_may_have_forgotten_is_refused():
    encoding = encoding_of("sum", parts=["rotary", "ssmax", "mep_free"])
    expected = (
        r"flex: Sum: it acts before attention too; call encoding.prepare\(length\).*;"
        r" q, k = encoding.on_queries_keys\(q, k\) .*; q = q \* encoding.score_scale\(n\).*;"
        r" then add applied=\['prepare', 'on_queries_keys', 'score_scale'\]"
    )
    with pytest.raises(UserError, match=expected):
        flex(encoding, LENGTH)
    with pytest.raises(UserError, match=r"add applied=\['on_queries_keys'\]"):
        flex(encoding, LENGTH, applied=["prepare", "score_scale"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fox", {}, r"Fox: it reads content; .* x \[batch, 150, hidden\]"),
        ("cable", {"x": torch.zeros(1, 149, 32)}, r"Cable: it reads content; .* x \[batch, 150,"),
        ("alibi", {"window": 0}, "window: 0 must be at least 1"),
        ("alibi", {"chunk": -1}, "chunk: -1 must be at least 1"),
        (
            "selective_rope",
            {"segments": TWO_DOCUMENTS, "applied": CALLS},
            "SelectiveRope cannot keep documents apart",
        ),
    ],
)
def test_wrong_arguments_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        flex(encoding_of(name), LENGTH, **options)


@pytest.mark.parametrize("queries", [1, 129, 200, 390])
def test_blocks_are_those_that_torch_finds_by_asking_about_each_pair(queries):
    documents = torch.tensor([[0] * 200 + [1] * 100 + [0] * 90, [3] * 390])
    for masks in ({}, {"window": 40}, {"window": 300}, {"chunk": 64}, {"segments": documents}):
        terms = Terms(**masks)
        _, visible = modifiers(terms, 390 - queries)
        ours = blocks_of_mask(visible, terms, torch.arange(390 - queries, 390), 390)
        batch = None if terms.segments is None else 2
        expected = create_block_mask(visible, batch, None, queries, 390, "cpu")
        assert ours.shape == expected.shape
        assert torch.equal(ours.to_dense(), expected.to_dense())


def test_as_a_backend_it_is_the_definition_and_new_tables_need_no_new_program():
    torch._dynamo.utils.counters.clear()
    for length in (129, 150, 150, 150, 129):
        content = Content.of((torch.randn(2, 4, 100), torch.randn(2, 4, length).double()), 100)
        numbers = torch.arange(length).expand(2, -1) // 70
        tables = torch.randn(4, length), torch.rand(4, length)
        terms = Terms(*tables, 60, segments=numbers, content=content, needs_lse=True)
        k, v = torch.randn(2, 2, 4, length, 16)
        q = torch.randn(2, 4, 100, 16)
        with torch.no_grad():
            results = BACKENDS["flex"](q, k, v, terms)
            expected = BACKENDS["eager"](q, k, v, terms)
        for ours, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_the_backend_computes_a_model_and_refuses_to_train_it_on_a_cpu():
    gpt = Subject("sum", {"parts": ["rotary", "mep_free"]}).gpt("flex")
    ids = random_ids(100)
    with torch.no_grad():
        logits = gpt(ids)
        gpt.use_attention(replace(gpt.attention, attention_backend="eager"))
        plain = gpt(ids)
        gpt.use_attention(replace(gpt.attention, attention_backend="flex"))
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="computes no gradients on the CPU"):
        gpt(ids)


def test_a_mask_serves_further_layers():
    x = inputs()[3]
    _, block_mask = flex(encoding_of("fox"), LENGTH, x=x, window=40)
    assert flex(encoding_of("cable"), LENGTH, x=x, block_mask=block_mask)[1] is block_mask


def test_compiled_gradients_read_each_tensor_once():
    """What torch asks of a score_mod before it compiles its gradients for CUDA."""
    encoding = encoding_of("sum", **ALL_TERMS)
    q, k, v, x = (leaf.detach() for leaf in inputs())
    joint_graphs = []

    def keep(module, example_inputs):
        for node in module.graph.nodes:
            if "flex_attention_backward" in str(node.target):
                joint_graphs.append(module.get_submodule(node.args[8].target).graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=keep
    )
    score_mod, block_mask = flex(encoding, LENGTH, x=x, segments=TWO_DOCUMENTS)
    attend_by_flex = torch.compile(flex_attention, backend=backend)
    out = attend_by_flex(q, k, v, score_mod=score_mod, block_mask=block_mask)
    out.sum().backward()
    (graph,) = joint_graphs
    scatters = [node for node in graph.nodes if "zeros_and_scatter" in str(node.target)]
    assert len(scatters) == 5  # bias, weight, FIRE's table, and w of FoX as a key's and as its own
    validate_joint_graph(graph)


@pytest.mark.gpu
def test_compiled_on_cuda_it_has_values_and_gradients_of_the_definition():
    encoding = encoding_of("sum", **ALL_TERMS).cuda()
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in inputs(256)]
    segments = (torch.arange(256) >= torch.tensor([[70], [200]])).long().cuda()
    masks = {"window": 90, "chunk": None, "segments": segments}
    score_mod, block_mask = flex(encoding, 256, x=leaves[3], **masks)
    out = torch.compile(flex_attention)(*leaves[:3], score_mod, block_mask)
    expected = defined(encoding, *leaves, **masks)
    assert_equal(out, expected, [*leaves, *encoding.parameters()])


def test_the_pages_examples_run_and_give_what_attention_gives():
    page = {}
    for block in blocks("docs/flex.md", "python"):
        exec(block, page)
    encoding, sink = page["encoding"], page["sink"]
    rank_one = encoding.score_bias(page["x"], {})
    options = {"score_bias": rank_one, "sink": sink, "window": page["window"]}
    expected = attention(page["q"], page["k"], page["v"], **options, backend="eager")
    torch.testing.assert_close(page["out"], expected, rtol=1e-5, atol=2e-6)
