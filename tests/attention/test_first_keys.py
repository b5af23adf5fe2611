"""What is skipped gets exactly nothing, and all that could matter is computed."""

import math
import random

import torch

from megatron.attention import attention
from megatron.attention import first_keys as module
from megatron.attention.eager import ScoreBias, mask
from megatron.attention.first_keys import GRAIN, Pairs, first_keys
from megatron.attention.scope import Inputs, Scope

KEYS = 1300
LEAST = math.log(2.0**-150)  # e to this is half of float32's least number


def slopes(heads):
    """ALiBi's, for a power of two of heads."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)


def tables(draw, heads, keys):
    """Tables that fall, stay, rise far out, or have a bump: [heads, keys]."""
    distance = torch.arange(keys).float()
    slope = 10 ** torch.tensor([[draw.uniform(-2.5, 1)] for _ in range(heads)])
    falling = -slope * distance
    rise = (distance > keys // 2) * slope * keys * draw.uniform(0.3, 1.2)
    bump = 300 * torch.exp(-(((distance - 700) / 50) ** 2))
    flat = -slope * distance.clamp(max=draw.randrange(10, keys))
    return draw.choice([falling, flat, falling + rise, falling + bump, None])


def case(number):
    """Inputs that search for a counterexample: huge or opposite q and k, tables that rise."""
    draw = random.Random(number)
    torch.manual_seed(number)
    batch, heads, head_dim = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([8, 16])
    queries = draw.choice([KEYS, KEYS - 77, 300, GRAIN])
    scale = 10 ** draw.uniform(-2, 2)
    k = torch.randn(batch, heads, KEYS, head_dim) * scale
    q = torch.randn(batch, heads, queries, head_dim) * scale
    if draw.random() < 0.4:  # as far from the own key, and as near to others, as can be
        q = -k[:, :, KEYS - queries :].clone()
        k[:, :, ::7] = -k[:, :, KEYS - 1 :]
    given = {
        "q": q,
        "k": k,
        "v": torch.randn(batch, heads, KEYS, head_dim),
        "bias": tables(draw, heads, KEYS),
        "u": None,
        "w": None,
    }
    if given["bias"] is None or draw.random() < 0.4:
        steps = torch.rand(batch, heads, KEYS, 1, dtype=torch.float64) * 10 ** draw.uniform(-2, 1)
        if draw.random() < 0.3:
            steps = steps - steps.mean()
        given["w"] = steps.cumsum(2)
        if draw.random() < 0.6:
            given["u"] = torch.rand(batch, heads, queries, 1) * draw.choice([1, -1]) + 0.2
    options = {}
    if draw.random() < 0.3:
        documents = torch.randint(0, 2, (batch, KEYS)).cumsum(1) // draw.choice([50, 300])
        options["segments"] = documents
    if draw.random() < 0.4:
        options |= draw.choice([{"window": 100}, {"window": 700}, {"chunk": 200}])
    return given, options


def firsts_of(given, options):
    scope = Scope(
        given["q"].shape[2], given["k"].shape[2], options.get("window"), options.get("chunk")
    )
    score_bias = None if given["w"] is None else ScoreBias(given["u"], given["w"])
    tensors = (given["q"], given["k"], given["v"], given["bias"], None, options.get("segments"))
    return first_keys(Inputs(*tensors, scope, score_bias=score_bias))


def scores(given, options):
    """By the definition, in float64: [batch, heads, queries, keys], -inf where masked."""
    q, k = given["q"].double(), given["k"].double()
    key = torch.arange(k.shape[2])
    query = key[k.shape[2] - q.shape[2] :]
    total = q @ k.mT / math.sqrt(q.shape[-1])
    if given["bias"] is not None:
        total += given["bias"].double()[:, (query[:, None] - key).clamp(min=0)]
    if given["w"] is not None:
        total += ScoreBias(given["u"], given["w"]).bias(query)
    window, chunk = options.get("window"), options.get("chunk")
    masked = mask(query, key, window, chunk, options.get("segments"))
    return total.masked_fill(masked, -math.inf)


def test_no_key_is_skipped_that_would_get_anything():
    found = 0
    for number in range(40):
        given, options = case(number)
        firsts = firsts_of(given, options)
        if firsts is None:
            continue
        found += 1
        exact = scores(given, options)
        below_most = exact - exact.amax(-1, keepdim=True)
        for grain, of_heads in enumerate(firsts):
            rows = slice(grain * GRAIN, (grain + 1) * GRAIN)
            for head, first_key in enumerate(of_heads):
                skipped = below_most[:, head, rows, :first_key]
                assert (skipped < LEAST).all(), (number, grain, head)
    assert found >= 5


def computed(given, options, *, double):
    leaves = {}
    for name, tensor in given.items():
        if tensor is not None:
            leaves[name] = (tensor.double() if double else tensor.clone()).requires_grad_()
    score_bias = None if given["w"] is None else (leaves.get("u"), leaves["w"])
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    backend = "eager" if double else "sdpa"
    out = attention(q, k, v, leaves.get("bias"), score_bias=score_bias, backend=backend, **options)
    torch.manual_seed(0)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def test_values_and_gradients_are_those_of_the_definition():
    for number in (1, 2, 10, 18, 29, 38):
        given, options = case(number)
        given["q"], given["k"] = (x / x.abs().max() for x in (given["q"], given["k"]))
        assert firsts_of(given, options) is not None, number
        out, gradients = computed(given, options, double=False)
        exact, exact_gradients = computed(given, options, double=True)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-5)
        for name, expected in exact_gradients.items():
            tolerance = 1e-4 * max(1.0, float(expected.abs().max()))
            difference = gradients[name].double() - expected.double()
            assert difference.abs().max() <= tolerance, (number, name)


def whole(q, k, table) -> Inputs:
    keys = k.shape[2]
    return Inputs(q, k, k, table, None, None, Scope(keys, keys, None, None))


def test_alibi_computes_a_third_of_the_products_at_16384():
    """By counting the pairs nearer than 104 / slope: 0.34 for 12 heads."""
    torch.manual_seed(0)
    heads, keys = 12, 16384
    q, k = torch.randn(2, 1, heads, keys, 4) * 0.1
    all_slopes = torch.cat([slopes(8), slopes(16)[::2][:4]])
    table = -all_slopes[:, None] * torch.arange(keys)
    visible = computed_pairs = 0
    for grain, of_heads in enumerate(first_keys(whole(q, k, table))):
        last = (grain + 1) * GRAIN
        visible += heads * last
        computed_pairs += sum(last - first for first in of_heads)
    assert 0.30 < computed_pairs / visible < 0.36


def test_where_no_table_falls_far_enough_nothing_is_asked(monkeypatch):
    q, k = torch.randn(2, 1, 2, 2048, 8)
    table = -0.05 * torch.arange(2048).float().expand(2, -1)  # 102 at the end
    assert first_keys(whole(q * 0, k * 0, table * 2)) is not None
    monkeypatch.setattr(module, "first_of_grains", None)  # would fail if it were called
    assert first_keys(whole(q, k, table)) is None


def test_what_was_skipped_is_counted():
    q, k, v = torch.zeros(3, 1, 2, KEYS, 8)
    bias = -0.5 * torch.arange(KEYS).float().expand(2, -1)  # nothing beyond 210
    pairs = Pairs()
    attention(q, k, v, bias, pairs=pairs)
    share = pairs.skipped / pairs.all
    assert 0.4 < share < 0.7
    assert f"{share:.0%} of the pairs of a query and a key were skipped" in str(pairs)
