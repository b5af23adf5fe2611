"""Documents of one window: attention keeps them apart, and positions may begin again at each."""

import pytest
import torch
from torch import Tensor

from megatron.attention.documents import Documents
from megatron.errors import UserError
from megatron.model import GPT, Cache
from tests.encodings import every_signature
from tests.model import test_cache

END, VOCAB = 0, 50
MASK = "reset_attention_mask=true"
RESTART = "reset_position_ids=true"
CROSSING = ("dape_v2", "path", "path_fox", "selective_rope", "stick_breaking")
"""Convolutions read the tokens before, and a remainder all of them."""
NO_RESTART = (*CROSSING, "fire", "grape_ap")
FROM_THE_BEGINNING = ("fire", "fope", "grape_ap", "learned", "sinusoidal")
"""Without restarting, their numbers depend on where in the window a document begins."""


def model(name: str, *settings: str) -> GPT:
    """Weights large enough for attention to be far from uniform."""
    gpt = test_cache.model(name, *settings)
    gpt.end_of_document = END
    return gpt


def window(seed: int = 0) -> Tensor:
    """Two rows of several documents, one of them empty but for its end: [2, 90] int64."""
    ids = torch.randint(1, VOCAB, (2, 90), generator=torch.Generator().manual_seed(seed))
    ids[0, [10, 11, 40, 80]] = END
    ids[1, [0, 63]] = END
    return ids


def one_by_one(gpt: GPT, ids: Tensor) -> Tensor:
    """Logits of every document in a pass of its own: [batch, length, vocab]."""
    rows = []
    for tokens in ids:
        begins = (tokens == END).nonzero().flatten() + 1
        documents = [part for part in tokens.tensor_split(begins.tolist()) if len(part)]
        rows.append(torch.cat([gpt(part[None])[0] for part in documents]))
    return torch.stack(rows)


def megatron_masks(data: Tensor) -> tuple[Tensor, Tensor]:
    """Megatron-LM's rule: after each end of a document, tokens see nothing up to it.

    [batch, length] -> allowed [batch, length, length] bool, positions [batch, length]
    """
    batch, length = data.shape
    allowed = torch.ones(batch, length, length).tril()
    positions = torch.arange(length).repeat(batch, 1)
    for row in range(batch):
        earlier = 0
        for end in (data[row] == END).nonzero().flatten().tolist():
            allowed[row, end + 1 :, : end + 1] = 0
            positions[row, end + 1 :] -= end + 1 - earlier
            earlier = end + 1
    return allowed.bool(), positions


def test_documents_are_those_of_megatron():
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 6, (3, 40), generator=draw)  # ends beside each other too
        allowed, positions = megatron_masks(ids)
        result = Documents.of(ids, END)
        same = result.numbers[:, :, None] == result.numbers[:, None]
        assert torch.equal(same & torch.ones(40, 40).tril().bool(), allowed)
        assert torch.equal(result.places, positions)


@every_signature
@torch.no_grad()
def test_documents_of_a_window_are_each_of_them_alone_or_refused(name):
    ids, plain = window(), model(name)
    expected = one_by_one(plain, ids)
    for settings, refusing in (([MASK], CROSSING), ([MASK, RESTART], NO_RESTART)):
        if name in refusing:
            with pytest.raises(UserError, match=r"cannot keep documents apart|begin again at each"):
                model(name, *settings)
            continue
        gpt, cache = model(name, *settings), Cache()
        result = gpt(ids)
        if name in FROM_THE_BEGINNING and RESTART not in settings:
            assert (result - expected).abs().max() > 1e-3
        else:
            torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)
        parts = [gpt(part, cache=cache) for part in ids.split([1, 5, 1, 1, 1, 61, 7, 13], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), result, rtol=0, atol=1e-4)


@torch.no_grad()
def test_logn_scale_counts_the_keys_of_the_document():
    ids = window()
    expected = one_by_one(model("rotary", "logn_scale=true"), ids)
    for settings in ([MASK, RESTART], [MASK]):
        result = model("rotary", "logn_scale=true", *settings)(ids)
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)
