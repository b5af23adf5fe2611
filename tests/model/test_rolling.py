"""A rolling cache forgets what no later token can see: the same logits, in bounded memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from megatron.model import GPT, Cache
from megatron.model.cache import first_visible
from megatron.positions import REGISTRY
from tests.encodings import every_signature
from tests.model.test_cache import in_pieces, model

OPTIONS = {
    "window": ["window=20"],
    "blockwise": ["blockwise=true"],
    "window and blockwise": ["window=40", "blockwise=true", "logn_scale=true"],
    "sinks": ["window=20"],
    "one token": ["window=1"],
    "layers": ["window_layers=[12,30]"],
}
READS_ALL_KEYS = {"stick_breaking"}  # each score depends on all earlier ones


def accepted(name: str) -> Iterator[GPT]:
    """A model for each of the options, but those that the encoding refuses with a message."""
    for options, settings in OPTIONS.items():
        gpt = model(name, *settings)
        if options == "sinks":
            with_sinks = replace(gpt.attention, sinks=3)
            if gpt.faults_of_methods(with_sinks):
                continue
            gpt.use_attention(with_sinks)
        yield gpt


@every_signature
@torch.no_grad()
def test_a_rolling_cache_gives_the_logits_of_the_whole_pass(name):
    ids = torch.randint(50, (2, 170))
    pieces = ids.split([1, 5, 64, 7] + [1] * 30 + [63], dim=1)
    for gpt in accepted(name):
        cache = Cache(rolling=True)
        found = torch.cat([gpt(piece, cache=cache) for piece in pieces], dim=1)
        torch.testing.assert_close(found, gpt(ids), rtol=0, atol=1e-4)


@every_signature
@torch.no_grad()
def test_texts_can_leave_a_batch(name):
    gpt, ids = model(name), torch.randint(50, (4, 60))
    expected = gpt(ids)
    cache = Cache()
    gpt(ids[:, :40], cache=cache)
    staying = torch.tensor([2, 0])
    cache.select(staying)
    found = gpt(ids[staying, 40:], cache=cache)
    torch.testing.assert_close(found, expected[staying, 40:], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_rolling_cache_keeps_documents_apart():
    settings = ["reset_attention_mask=true", "window=20"]
    gpt, ids = model("alibi", *settings), torch.randint(50, (2, 200))
    gpt.end_of_document = 7
    cache = Cache(rolling=True)
    found = torch.cat([gpt(piece, cache=cache) for piece in ids.split(1, dim=1)], dim=1)
    torch.testing.assert_close(found, gpt(ids), rtol=0, atol=1e-4)
    assert cache.layers[0].length < 60


def test_gradients_flow_through_a_cache():
    gpt, ids = model("kerple_log"), torch.randint(50, (1, 30))
    whole = gpt(ids).square().sum()
    expected = torch.autograd.grad(whole, list(gpt.parameters()))
    found = torch.autograd.grad(
        in_pieces(gpt, ids, [10, 1, 19]).square().sum(), list(gpt.parameters())
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_the_first_visible_key_is_the_earliest_that_any_later_query_sees():
    """By the definition of both masks, query by query."""
    for window, chunk in ((1, None), (20, None), (None, 8), (20, 8), (5, 8)):
        for start in range(0, 60, 7):
            needed = 100
            for query in range(start, 100):
                for key in range(query + 1):
                    near = window is None or query - key < window
                    same_or_next = chunk is None or query // chunk - key // chunk <= 1
                    if near and same_or_next:
                        needed = min(needed, key)
            first = first_visible(start, window, chunk)
            assert first is not None
            assert first <= needed < first + (chunk or 1)
            assert first % (chunk or 1) == 0
    assert first_visible(100, None, None) is None


def test_every_encoding_that_looks_at_content_says_what_it_keeps():
    silent = {
        name
        for name in REGISTRY
        if (position := model(name).position).looks_at_content and not position.memory_rolls
    }
    assert silent == READS_ALL_KEYS
