"""Abacus and position coupling: places of digits by the released code, offsets, refusals."""

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.positions import Shape, build
from megatron.positions.abacus import Abacus

SHAPE = Shape(heads=2, head_dim=4, hidden=8, train_length=16)
DIGITS = list(range(3, 13))  # 0 … 9 of task:addition; 0 is <pad>, 1 is +, 2 is =
# `Abacus.helper` of mcleish7/arithmetic at 86022a5.
PLACES = {
    (3, 4, 1, 12, 11, 3, 2, 5, 5, 6, 7, 0, 0, 9): [1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0, 1],
    (0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3): [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    (5, 1, 6, 2, 7, 1, 8, 2, 9, 9, 0, 10, 1, 1): [1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 0],
}
# AdditionDatasetWithCoupledPositions of HanseulJo/position-coupling at b9cad94, with reverse_input,
# reverse_output and without randomize.
COUPLED = {
    "072+504=576": [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4],
    "9518+4591=31101": [2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6],
}


def abacus(**options) -> Abacus:
    """Row n of the table holds n."""
    position = build("abacus", SHAPE, digits=DIGITS, **options).eval()
    rows = torch.arange(len(position.weight)).float()
    position.weight.data = rows[:, None].repeat(1, SHAPE.hidden)
    return position


def rows_of(position: Abacus, ids: torch.Tensor, memory: dict | None = None) -> torch.Tensor:
    """The row that each token gets: [batch, length]."""
    x = torch.zeros(*ids.shape, SHAPE.hidden)
    with torch.no_grad():
        added = position.on_embeddings_by_ids(x, ids, {} if memory is None else memory)
    assert torch.equal(added, added[..., :1].expand_as(added))
    return added[..., 0].long()


def test_places_are_those_of_the_released_code_and_one_offset_moves_all_digits_in_training():
    ids, places = torch.tensor(list(PLACES)), torch.tensor(list(PLACES.values()))
    position = abacus(max_k=5)
    assert torch.equal(rows_of(position, ids), places)
    position.train()
    offsets = []
    for seed in range(200):
        torch.manual_seed(seed)  # which the trainer sets at each step
        rows = rows_of(position, ids)
        offsets.append(int(rows[0, 0] - 1))
        assert torch.equal(rows, torch.where(places > 0, places + offsets[-1], 0))
    assert set(offsets) == set(range(6))
    torch.manual_seed(7)
    assert rows_of(position, ids)[0, 0] - 1 == offsets[7]


def test_coupled_positions_are_those_of_the_released_code_with_an_offset_for_each_text():
    ids = {word: number for number, word in enumerate("#+=0123456789")}
    position = abacus(separators=[1, 2], max_k=5)
    for problem, positions in COUPLED.items():
        tokens = torch.tensor([[ids[word] for word in problem]])
        assert rows_of(position, tokens).tolist() == [positions]
        rows = rows_of(position.train(), tokens.expand(50, -1))
        offsets = rows - torch.tensor(positions)  # from 0, as in evaluation k is 1
        assert torch.equal(offsets, offsets[:, :1].expand_as(offsets))
        assert set(offsets[:, 0].tolist()) == set(range(5))
        position.eval()
    assert rows_of(position, torch.tensor([[0, 3, 0]])).tolist() == [[0, 2, 0]]


def test_a_number_goes_on_in_the_next_piece_of_a_text():
    ids = torch.randint(13, (4, 60), generator=torch.Generator().manual_seed(0))
    counts = []
    for text in ids.tolist():
        place = 0
        for token in text:
            place = place + 1 if token in DIGITS else 0
            counts.append(place)
    expected = torch.tensor(counts).view(4, 60)
    assert expected.max() > 8
    position = abacus()
    assert torch.equal(rows_of(position, ids), expected)
    for piece in (1, 7):
        memory: dict = {}
        parts = [rows_of(position, part, memory) for part in ids.split(piece, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), expected)


def model(*words: str) -> GPT:
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=16"]
    return from_config(load([], [*shape, *words]), vocab=13, end_of_document=0).eval()


def with_parts(*parts: str) -> list[str]:
    return ["pos_emb=sum", f"pos_emb_args={{parts: [{', '.join(parts)}]}}"]


OURS = f"{{abacus: {{digits: {DIGITS}, max_k: 5}}}}"


@torch.no_grad()
def test_it_acts_beside_an_encoding_of_attention_and_in_a_cache():
    ids = torch.tensor([[5, 6, 1, 7, 8, 2, 3, 4, 1, 0, 9, 9]])
    plain = model("pos_emb=rotary")
    both = model(*with_parts(OURS, "rotary"))
    embedded = plain.word_embeddings.weight[ids]
    embedded = both.position.parts[0].on_embeddings_by_ids(embedded, ids, {})
    assert not torch.equal(both(ids), plain(ids))
    plain.word_embeddings.register_forward_hook(lambda *_: embedded)
    assert torch.equal(both(ids), plain(ids))
    separate = model(*with_parts(OURS, "rotary"), "pos_emb_shared=false")
    assert torch.equal(separate(ids), both(ids))


@torch.no_grad()
def test_longer_numbers_than_the_table_are_refused():
    gpt = model("pos_emb=abacus", f"pos_emb_args={{digits: {DIGITS}, max_k: 5}}")
    gpt(torch.full((1, 21), 5))
    with pytest.raises(UserError, match=r"abacus: a number is longer than 21 digits, .*; give sho"):
        gpt(torch.full((1, 22), 5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pos_emb_args={digits: [3, 13]}"],
            "abacus: 13 ends documents or is none of 13 tokens; give",
        ),
        (
            ["pos_emb_args={digits: [0, 3]}"],
            "abacus: 0 ends documents or is none of 13 tokens; give",
        ),
        (
            [f"pos_emb_args={{digits: {DIGITS}, separators: [1, 99]}}"],
            "abacus: 99 ends documents or is none of 13 tokens",
        ),
        (
            with_parts("rotary", "{abacus: {digits: [99]}}"),
            "abacus: 99 ends documents or is none of 13 tokens",
        ),
        (
            ["pos_emb_args={digits: [3]}", "context_parallel_size=2"],
            "context_parallel_size: Abacus cannot be computed in parts of a text, because"
            " on_embeddings_by_ids reads the tokens before",
        ),
        (
            ["pos_emb=randomized", "pos_emb_args={of: abacus, args: {digits: [3]}}"],
            "of: abacus looks at content",
        ),
        (
            [f"pos_emb_layers=[{OURS}, rotary]"],
            "pos_emb_layers: abacus .* adds positions to the embeddings",
        ),
    ],
)
def test_what_cannot_be_computed_is_one_message(words, message):
    with pytest.raises(UserError, match=message):
        model("pos_emb=abacus", *words)
