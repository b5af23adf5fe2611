"""Methods for longer texts: every encoding computes or refuses them, cached as uncached."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron.attention.encoded import Text
from megatron.attention.scope import BLOCK
from megatron.attention.terms import Terms
from megatron.errors import UserError
from megatron.evaluation import methods
from megatron.evaluation.methods import (
    METHODS,
    MeasuredAttention,
    Method,
    clipped,
    faults_of,
    method_of,
)
from megatron.model import GPT
from megatron.positions import Shape, build
from tests.encodings import every_signature
from tests.model.test_cache import in_pieces, model

VARIANTS = {
    "sinks": {"window": 20, "sinks": 3},
    "clip_distance": {"clip_distance": 20},
    "rerope": {"method": "rerope"},
    "leaky_rerope": {"method": "leaky_rerope,window=20,factor=4"},
    "self_extend": {"method": "self_extend,window=20,group=3"},
    "dual_chunk": {"method": "dual_chunk,chunk=20,limit=25"},
    "string": {"method": "string,window=20,local=5"},
    "lm_infinite": {"method": "lm_infinite,sinks=3,window=20"},
    "dynamic_ntk": {"method": "dynamic_ntk,step=20"},
    "yarn": {"method": "yarn,factor=4"},
    "clipped_rope": {"method": "clipped_rope,clipped=3"},
}
NEAR = {"dynamic_ntk": 48, "yarn": 1, "clipped_rope": 1}
"""Up to which token a text is read as without the method."""
MOVING = ("leaky_rerope", "rerope", "self_extend", "dual_chunk", "string")
# What encodings can be read with. Of a name that is not here both answers are right.
TABLES = {
    *("alibi", "bam", "gaussian", "kerple_bias_2para", "kerple_bias_3para", "kerple_bias_wht"),
    *("kerple_log", "kerple_log_3para", "kerple_power", "kerple_wht_1para", "kerple_wht_2para"),
    *(
        "mep",
        "mep_free",
        "mep_param",
        "mep_param_t5",
        "sandwich",
        "scale_invariant",
        "scaled_distance",
    ),
    *("t5", "tanh"),
}
NO_POSITIONS = {
    *("none", "cable", "fox", "selective_rope", "carope", "repo", "ssmax", "attn_temperature"),
}
REFUSE_ALL = {
    *("abacus", "cope", "dape", "dape_v2", "fire", "fope", "grape_a", "grape_ap", "learned"),
    *("path", "path_fox", "sinusoidal", "stick_breaking", "wall"),
}
ACCEPTED = {
    **{name: {"sinks", "lm_infinite", "clip_distance"} for name in TABLES},
    **{name: {"sinks", "lm_infinite"} for name in NO_POSITIONS},
    **{name: set() for name in REFUSE_ALL},
    "rotary": {"sinks", "lm_infinite", *NEAR, *MOVING},
    "rope_pp": {"sinks", "lm_infinite", *NEAR, *MOVING},
    "randomized": {"sinks", "lm_infinite", *NEAR, *MOVING},
    "xpos": {"sinks", "lm_infinite", *MOVING},
    "pope": {"sinks", "lm_infinite", *MOVING},
    "grape_m": {"sinks", "lm_infinite", *MOVING},
    # Its parts here are rotary and kerple_log, and a table has no value between distances.
    "sum": {"sinks", "lm_infinite", "clip_distance", *NEAR, "rerope", "dual_chunk", "string"},
}
# With first values that leave keys 20 tokens back no weight, or a score of 0.
FORGETTING = {"fox", "kerple_bias_2para", "kerple_wht_1para"}


def settings(**values) -> MeasuredAttention:
    return MeasuredAttention(**values)


def with_method(gpt: GPT, variant: str) -> GPT:
    gpt.use_attention(settings(**VARIANTS[variant]))
    return gpt


@every_signature
@torch.no_grad()
def test_an_encoding_refuses_a_method_or_decodes_with_it_in_pieces_as_in_a_whole_pass(name):
    gpt, ids = model(name), torch.randint(50, (1, 141))
    plain = gpt(ids)
    for variant, values in VARIANTS.items():
        faults = list(faults_of(settings(**values), list(gpt.positions), gpt.train_length))
        if name in ACCEPTED:
            assert bool(faults) == (variant not in ACCEPTED[name])
        if faults:
            with pytest.raises(UserError, match=rf"--.*{variant.replace('_', '.')}.* {name} "):
                with_method(gpt, variant)
            continue
        expected = with_method(gpt, variant)(ids)
        result = in_pieces(gpt, ids, [1, 1, 46, 1, 1, 40, 1, 50])
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)
        late = gpt.logits(gpt.features(ids, first=100))
        torch.testing.assert_close(late, expected[:, 100:], rtol=0, atol=1e-4)
        near = NEAR.get(variant, 20)
        torch.testing.assert_close(expected[:, :near], plain[:, :near], rtol=0, atol=1e-4)
        if name not in FORGETTING:
            assert (expected - plain)[:, 60:].abs().max() > 1e-4, "beyond, it changes something"


def test_a_layer_that_cannot_is_named():
    for names, variant, message in (
        (
            "[rotary, alibi]",
            "self_extend",
            "self_extend,window=20,group=3: alibi does not support it",
        ),
        (
            "[rotary: {scaling: linear}]",
            "yarn",
            r"it is stretched already \(scaling: linear\); take another method",
        ),
        ("[{sum: {parts: [rope: {scaling: llama3}]}}]", "dynamic_ntk", "scaling: llama3"),
        ("[rotary, rotary: {scaling: ntk}]", "yarn", "stretched already .scaling: ntk.; take"),
        ("[nope, alibi]", "yarn", "none or alibi do not rotate queries and keys"),
        ("[rotary, fire]", "sinks", "fire does not support it: its scores depend on more"),
    ):
        with pytest.raises(UserError, match=message):
            with_method(model("rotary", f"pos_emb_layers={names}"), variant)


@torch.no_grad()
def test_after_other_frequencies_a_model_reads_as_it_was_trained():
    gpt, ids = model("sum"), torch.randint(50, (1, 100))
    plain = gpt(ids)
    for method in ("ntk,factor=4", "yarn,factor=4", "rerope", None):
        gpt.use_attention(settings(method=method))
        assert torch.allclose(gpt(ids), plain) == (method is None)


def test_a_table_is_asked_for_the_distances_at_which_tokens_stand():
    """Attention with slopes 2^-2, 2^-4, 2^-6, 2^-8, by its definition in float64."""
    q, k, v = torch.randn(3, 2, 4, 60, 8, dtype=torch.float64)
    query, key = torch.arange(60)[:, None], torch.arange(60)
    back, chunks = query - key, query // 11 - key // 11
    is_sink = (back >= 20) & (key < 3)
    seen = is_sink | ((back >= 0) & (back < 20))
    place = torch.where(chunks == 0, query % 11, (query % 11 + 11).clamp(max=17))
    place = torch.where(chunks > 1, 17, place)
    position = build("alibi", Shape(4, 8, 32, 48)).double()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    for method, distance, visible in (
        (Method("sinks", {"window": 20, "sinks": 3}), query.clamp(max=22) - key, seen),
        (method_of("lm_infinite,sinks=3,window=20,limit=100", 48), torch.tensor(100), seen),
        (method_of("string,window=20,local=4", 48), back - 16, back >= 0),
        (method_of("dual_chunk,chunk=11,limit=17", 48), place - key % 11, back >= 0),
    ):
        if "chunk" not in method.options:
            distance = torch.where(back < 20, back, distance)
        scores = q @ k.mT / math.sqrt(8) - slopes[:, None, None] * distance
        expected = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v
        bias = position.distance_bias(method.table_length(60))
        result = method.attend(Text(position, q, k, v, Terms(bias)))
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def test_a_clipped_table_keeps_its_value_beyond_the_distance():
    table = torch.tensor([[0.0, -1.0, -2.0, -3.0]])
    assert clipped(table, 2).tolist() == [[0, -1, -2, -2]]


@pytest.mark.parametrize(("factor", "step"), [(1.0, 1), (2.5, 16)])
def test_the_last_query_of_a_step_has_the_scores_of_transformers_dynamic_ntk(factor, step):
    theirs_config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor},
    )
    q, k, v = torch.randn(3, 1, 4, 192, 8)
    method = method_of(f"dynamic_ntk,factor={factor},step={step}", 64)
    position = build("rotary", Shape(4, 8, 32, 64))
    result = method.attend(Text(position, q, k, v, Terms()))
    for length in (1, 40, 64, 80, 128, 192):
        rope = LlamaRotaryEmbedding(theirs_config)  # it remembers the longest text
        cos, sin = rope(q, torch.arange(length)[None])
        theirs_q, theirs_k = apply_rotary_pos_emb(q[:, :, :length], k[:, :, :length], cos, sin)
        scores = theirs_q[:, :, -1:] @ theirs_k.mT / math.sqrt(8)
        expected = scores.softmax(-1) @ v[:, :, :length]
        torch.testing.assert_close(result[:, :, length - 1 : length], expected, rtol=0, atol=2e-5)


REFUSED = (
    ({"sinks": 4}, ["--sinks 4: without a window all keys are visible; give --window too"]),
    ({"clip_distance": 9}, ["--clip-distance 9: rotary has no table by distance; for"]),
    ({"method": "rerop"}, ["--method rerop: no such method; did you mean rerope?"]),
    ({"method": "rerope,window=49"}, ["window=49 must be between 1 and 48"]),
    ({"method": "rerope,window=4.5"}, ["window=4.5 is not valid; write window=int"]),
    ({"method": "self_extend"}, ["--method self_extend: group= is missing and has no default"]),
    ({"method": "leaky_rerope,factor=nan"}, ["factor=nan must be between 1 and 16777216"]),
    ({"method": "dual_chunk,chunk=20,limit=19"}, ["limit=19 must be between 20 and 16777216"]),
    ({"method": "string,window=9,local=10"}, ["local=10 must be between 1 and 9"]),
    ({"method": "string,attention_factor=0"}, ["attention_factor=0.0 must be between 0.01 and"]),
    (
        {"method": "dual_chunk", "window": 47},
        ["chunk=30,limit=36,attention_factor=1: has no meaning with"],
    ),
    ({"method": "clipped_rope"}, ["--method clipped_rope: clipped= is missing"]),
    (
        {"method": "clipped_rope,clipped=5"},
        ["rotary does not support it: clipped: 5 is not between 1 and 4"],
    ),
    ({"method": "lm_infinite,sinks=0,limit=3"}, ["sinks=0 must be between 1"]),
    (
        {"method": "rerope", "window": 24, "sinks": 2, "clip_distance": 3, "blockwise": True},
        [
            "--clip-distance 3: rotary has no table",
            "--sinks 2: excludes --method rerope",
            "--method rerope,window=24: has no meaning with blockwise, --clip-distance or this",
        ],
    ),
    (
        {"method": "rerope", "reset_attention_mask": True},
        ["--method rerope,window=24: treats a text as one document; set reset_attention_mask"],
    ),
)


def test_nonsense_is_refused_with_all_faults_in_one_message():
    gpt = model("rotary")
    before = gpt.attention
    for values, faults in REFUSED:
        with pytest.raises(UserError) as refusal:
            gpt.use_attention(settings(**values))
        for line, fault in zip(str(refusal.value).split("\n"), faults, strict=True):
            assert fault in line
    assert gpt.attention == before, "the settings before are kept"


def test_a_method_names_all_of_its_options():
    for words, text in (
        ("rerope", "rerope,window=256"),
        ("leaky_rerope,factor=1.5,window=7", "leaky_rerope,window=7,factor=1.5"),
        ("self_extend,group=2", "self_extend,window=256,group=2"),
        ("dual_chunk", "dual_chunk,chunk=320,limit=384,attention_factor=1"),
        ("string", "string,window=170,local=128,attention_factor=1"),
        ("string,window=64", "string,window=64,local=64,attention_factor=1"),
        ("clipped_rope,clipped=5", "clipped_rope,clipped=5"),
        ("lm_infinite,sinks=4", "lm_infinite,window=512,sinks=4,limit=512"),
        ("dynamic_ntk", "dynamic_ntk,factor=1,step=512"),
        ("yarn,factor=4.0", "yarn,factor=4"),
    ):
        assert method_of(words, 512).text == text
        assert method_of(text, 512) == method_of(words, 512)
    assert set(METHODS) == set(VARIANTS) - {"sinks", "clip_distance"} | {"pi", "ntk"}


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("bias", [None, torch.zeros(2, 2048)], ids=["plain", "a table"])
@pytest.mark.parametrize("method", ["dual_chunk", "string", "rerope"])
def test_no_tensor_holds_the_scores_of_more_than_a_block_of_queries(method, bias):
    q, k, v = torch.randn(3, 1, 2, 2048, 4)
    position = build("rotary", Shape(2, 4, 8, 1024))
    with torch.no_grad(), LargestTensor() as largest:
        method_of(method, 1024).attend(Text(position, q, k, v, Terms(bias)))
    assert largest.elements <= 2 * BLOCK * (2048 + BLOCK)


def places_of_dual_chunks(length: int, chunk: int, limit: int) -> torch.Tensor:
    """Distances [length, length] of dual chunk attention, by the paper's sets of positions."""
    distance = torch.zeros(length, length, dtype=torch.int64)
    for i in range(length):
        for j in range(i + 1):
            chunks_between = i // chunk - j // chunk
            if chunks_between == 0:
                query = i % chunk
            elif chunks_between == 1:
                query = min(i % chunk + chunk, limit)
            else:
                query = min(2 * chunk - 1, limit)
            distance[i, j] = query - j % chunk
    return distance


def rotated_products(q, k, distance, *, features: int) -> torch.Tensor:
    """q·k after a turn of the first features by distance · 10000^(-2f/features), in float64."""
    frequencies = 10000 ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angle = distance[..., None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)  # [queries, keys, features / 2]
    pairs = [torch.complex(*x[..., :features].chunk(2, dim=-1)) for x in (q, k)]
    turned = torch.einsum("bhif,bhjf,ijf->bhij", pairs[0], pairs[1].conj(), turn).real
    return turned + q[..., features:] @ k[..., features:].mT


@pytest.mark.parametrize("method", ["dual_chunk", "string"])
@pytest.mark.parametrize("rotary_pct", [1.0, 0.5])
@pytest.mark.parametrize("slope", [1.0, 0.0])
@torch.no_grad()
def test_positions_of_keys_follow_the_formula_of_the_paper(monkeypatch, method, rotary_pct, slope):
    """With grouped queries, slopes by distance or none, a sink and a cache, in small blocks."""
    monkeypatch.setattr(methods, "BLOCK", 8)
    length, queries = 57, 33
    q = torch.randn(2, 4, length, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, length, 8, dtype=torch.float64)
    parts = [{"rotary": {"rotary_pct": rotary_pct}}, *(["alibi"] if slope else [])]
    position = build("sum", Shape(4, 8, 32, 48), parts=parts).double()
    options = {
        "dual_chunk": "chunk=11,limit=17,attention_factor=1.2",
        "string": "window=13,local=4,attention_factor=1.2",
    }
    chosen = method_of(f"{method},{options[method]}", 48)
    sink = torch.randn(4, dtype=torch.float64)
    terms = Terms(position.distance_bias(chosen.table_length(length)), sink=sink)
    log_n = torch.arange(1, length + 1, dtype=torch.float64).log()[None]

    index = torch.arange(length)
    back = index[:, None] - index
    distance = torch.where(back < 13, back, back - 13 + 4)
    if method == "dual_chunk":
        distance = places_of_dual_chunks(length, 11, 17)
    wide_k, wide_v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    products = rotated_products(q, wide_k, distance, features=int(8 * rotary_pct))
    slopes = slope * torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    scores = 1.2**2 * log_n[..., None] * products / math.sqrt(8)
    scores = scores - slopes[:, None, None] * distance
    scores = scores.masked_fill(back < 0, -math.inf)
    column = sink[:, None, None].expand(2, 4, length, 1)
    expected = torch.cat([scores, column], dim=-1).softmax(-1)[..., :length] @ wide_v

    for rows in (length, queries, 1):
        text = Text(position, q[:, :, -rows:], k, v, terms, log_n[:, -rows:])
        result = chosen.attend(text)
        torch.testing.assert_close(result, expected[:, :, -rows:], rtol=0, atol=2e-6)
