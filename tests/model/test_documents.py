"""Documents of one window: attention keeps them apart, and positions may begin again at each."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config import load
from megatron.errors import UserError
from megatron.model import GPT, Cache, from_config
from megatron.model.documents import Documents
from tests.encodings import every_signature
from tests.support import NEEDED

END, VOCAB = 0, 50
MASK = "reset_attention_mask=true"
RESTART = "reset_position_ids=true"
CROSSING = ("dape_v2", "selective_rope", "stick_breaking")
"""Convolutions read the tokens before, and a remainder all of them."""
NO_RESTART = (*CROSSING, "fire")
FROM_THE_BEGINNING = ("fire", "learned", "sinusoidal", "ssmax")
"""Without restarting, their numbers depend on where in the window a document begins."""


def model(name: str, *settings: str, args: str | None = None) -> GPT:
    """Weights large enough for attention to be far from uniform."""
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
    shape += [f"pos_emb={name}", "max_position_embeddings=256", "init_method_std=0.15"]
    if args is None and name in NEEDED:
        args = str(NEEDED[name]).replace("'", "")
    options = [] if args is None else [f"pos_emb_args={args}"]
    config = load([], [*shape, *options, *settings])
    return from_config(config, VOCAB, END).eval()


def window(seed: int = 0) -> Tensor:
    """Two rows of several documents, one of them empty but for its end: [2, 90] int64."""
    ids = torch.randint(1, VOCAB, (2, 90), generator=torch.Generator().manual_seed(seed))
    ids[0, [10, 11, 40, 80]] = END
    ids[1, [0, 63]] = END
    return ids


def documents_of(ids: Tensor) -> list[tuple[int, int, int]]:
    """(row, start, end) of each document, by a loop over the tokens."""
    found = []
    for row, tokens in enumerate(ids.tolist()):
        start = 0
        for index, token in enumerate(tokens):
            if token == END or index == len(tokens) - 1:
                found.append((row, start, index + 1))
                start = index + 1
    return found


def one_by_one(gpt: GPT, ids: Tensor) -> Tensor:
    """Logits of every document in a pass of its own: [batch, length, vocab]."""
    logits = torch.empty(*ids.shape, VOCAB)
    for row, start, end in documents_of(ids):
        logits[row, start:end] = gpt(ids[row : row + 1, start:end])[0]
    return logits


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
        found = Documents.of(ids, END)
        same = found.numbers[:, :, None] == found.numbers[:, None]
        assert torch.equal(same & torch.ones(40, 40).tril().bool(), allowed)
        assert torch.equal(found.places, positions)
        pieces = [(piece.row, piece.start, piece.end) for piece in found.pieces]
        assert pieces == documents_of(ids)


@every_signature
def test_a_window_of_documents_is_each_of_them_alone(name):
    if name in CROSSING:
        pytest.skip("refused, as the next test shows")
    plain, masked = model(name), model(name, MASK)
    masked.load_state_dict(plain.state_dict())
    ids = window()
    expected, found = one_by_one(plain, ids), masked(ids)
    # The mean over all tokens, so that both gradients add up the same documents.
    expected.square().mean().backward()
    found.square().mean().backward()
    if name in FROM_THE_BEGINNING:
        assert (found - expected).abs().max() > 1e-3
        return
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    pairs = zip(plain.named_parameters(), masked.parameters(), strict=True)
    for (parameter, alone), together in pairs:
        if alone.grad is not None:
            size = alone.grad.abs().max().clamp(min=1e-3).item()
            torch.testing.assert_close(
                together.grad, alone.grad, rtol=0, atol=1e-4 * size, msg=parameter
            )


@every_signature
@torch.no_grad()
def test_positions_that_restart_are_those_of_each_document_alone(name):
    if name in NO_RESTART:
        pytest.skip("refused, as the next test shows")
    plain, restarted = model(name), model(name, MASK, RESTART)
    restarted.load_state_dict(plain.state_dict())
    ids = window()
    torch.testing.assert_close(restarted(ids), one_by_one(plain, ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CROSSING)
@torch.no_grad()
def test_an_encoding_that_reads_the_document_before_is_refused(name):
    with pytest.raises(UserError, match=r"cannot keep documents apart, .* reads the text before"):
        model(name, MASK)
    plain = model(name)
    ids = window()
    expected = one_by_one(plain, ids)
    plain.attention = replace(plain.attention, reset_attention_mask=True)  # what would be computed
    assert (plain(ids) - expected).abs().max() > 1e-3
    with pytest.raises(UserError, match="reset_attention_mask: Sum cannot keep documents apart"):
        model("sum", MASK, args=f"{{parts: [none, {name}]}}")


@pytest.mark.parametrize(
    ("name", "args"),
    [("fire", "{mlp_layers: [4]}"), ("dape", "{of: fire}"), ("sum", "{parts: [rotary, fire]}")],
)
def test_an_index_bias_cannot_begin_again(name, args):
    assert model(name, MASK, args=args)
    with pytest.raises(
        UserError, match=r"reset_position_ids: .* depends on the index of the query"
    ):
        model(name, MASK, RESTART, args=args)


@torch.no_grad()
def test_logn_scale_counts_from_the_window_or_from_the_document():
    plain = model("rotary", "logn_scale=true")
    from_window = model("rotary", "logn_scale=true", MASK)
    from_document = model("rotary", "logn_scale=true", MASK, RESTART)
    ids = torch.randint(1, VOCAB, (2, 90))
    ids[0, [19, 30]] = END
    ids[1, 5] = END
    expected = one_by_one(plain, ids)
    torch.testing.assert_close(from_document(ids), expected, rtol=0, atol=2e-5)
    assert (from_window(ids) - expected).abs().max() > 1e-3


@every_signature
@torch.no_grad()
def test_decoding_with_a_cache_keeps_documents_apart(name):
    if name in CROSSING:
        pytest.skip("refused, as a test above shows")
    gpt = model(name, MASK) if name in NO_RESTART else model(name, MASK, RESTART)
    ids, cache = window(), Cache()
    parts = [gpt(part, cache=cache) for part in ids.split([1, 5, 1, 1, 1, 61, 7, 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), gpt(ids), rtol=0, atol=1e-4)
