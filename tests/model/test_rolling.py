"""A rolling cache forgets what no later token can see: the same logits, in bounded memory."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron.model import GPT, Cache
from megatron.model.cache import Growing, LayerCache, first_visible, without_middle
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
STEPS, TOKENS = 30, 8  # tokens of each step; three steps are a chunk
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
def test_what_is_kept_is_bounded(name):
    for gpt in accepted(name):
        cache = Cache(rolling=True)
        kept, memories = [], []
        for _ in range(STEPS):
            gpt(torch.randint(50, (1, TOKENS)), cache=cache)
            kept.append(max(layer.length for layer in cache.layers))
            memories.append(sum(x.numel() for layer in cache.layers for x in layer.memory.values()))
        if name in READS_ALL_KEYS:
            assert kept[-1] == TOKENS * STEPS
            continue
        # Twice what is visible, with chunks one chunk of 24 beside that, sinks, and new tokens.
        assert max(kept) <= 2 * 40 + 24 + 3 + TOKENS
        half = STEPS // 2 + 3
        assert max(memories[half:]) <= max(memories[:half])


@torch.no_grad()
def test_without_a_window_nothing_is_forgotten():
    gpt, cache = model("rotary"), Cache(rolling=True)
    in_pieces_of_ten = torch.randint(50, (1, 100)).split(10, dim=1)
    for ids in in_pieces_of_ten:
        gpt(ids, cache=cache)
    assert [layer.length for layer in cache.layers] == [100, 100]


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
def test_texts_with_documents_can_leave_a_batch():
    settings = ["reset_attention_mask=true", "reset_position_ids=true"]
    gpt, ids = model("rotary", *settings), torch.randint(50, (3, 60))
    gpt.end_of_document = 7
    ids[0, 10] = ids[1, 30] = ids[2, 35] = 7
    expected = gpt(ids)
    cache = Cache()
    gpt(ids[:, :40], cache=cache)
    cache.select(torch.tensor([1, 2]))
    found = gpt(ids[1:, 40:], cache=cache)
    torch.testing.assert_close(found, expected[1:, 40:], rtol=0, atol=1e-4)


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


@pytest.mark.parametrize(
    ("window", "chunk"), [(1, None), (20, None), (None, 8), (20, 8), (5, 8), (16, 8)]
)
def test_the_first_visible_key_is_the_earliest_that_any_later_query_sees(window, chunk):
    """By the definition of both masks, query by query."""

    def visible(query: int, key: int) -> bool:
        near = window is None or query - key < window
        same_or_next = chunk is None or query // chunk - key // chunk <= 1
        return key <= query and near and same_or_next

    for start in range(60):
        needed = min(
            key for query in range(start, 100) for key in range(100) if visible(query, key)
        )
        first = first_visible(start, window, chunk)
        assert first is not None
        assert first <= needed
        if chunk is None:
            assert first == needed
        else:
            assert first % chunk == 0
            assert needed - first < chunk


def test_nothing_is_hidden_without_a_window():
    assert first_visible(100, None, None) is None


@torch.no_grad()
def test_a_cache_copies_its_rows_seldom():
    rows, copies, place = Growing(), 0, None
    for _ in range(1000):
        found = rows.append(torch.zeros(1, 2, 1, 4))
        copies += found.data_ptr() != place
        place = found.data_ptr()
    assert rows.length == 1000
    assert copies < 12


def test_the_middle_is_left_out():
    x = torch.arange(10)[None]
    assert without_middle(x, 2, 3, dim=1).tolist() == [[0, 1, 7, 8, 9]]


@torch.no_grad()
def test_indices_of_kept_keys_leave_the_forgotten_out():
    layer = LayerCache()
    rows = torch.arange(30.0).view(1, 1, 30, 1)
    layer.append(rows, rows)
    layer.forget(25, 2, {})
    assert layer.length == 7
    assert layer.indices(7, rows.device).tolist() == layer.keys.rows.flatten().tolist()
    assert layer.keys.rows.flatten().tolist() == [0, 1, 25, 26, 27, 28, 29]


def test_every_encoding_that_looks_at_content_says_what_it_keeps():
    silent = {
        name
        for name in REGISTRY
        if (position := model(name).position).looks_at_content and not position.memory_rolls
    }
    assert silent == READS_ALL_KEYS
