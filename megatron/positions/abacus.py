"""Abacus: every digit gets the index of its place in its number (arXiv 2405.17399)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import EXACT, Memory, Position, Shape
from megatron.positions.registry import register, whole


@register("abacus")
class Abacus(Position):
    """A learned vector for the place of each digit in its number: x_t + weight[k + place].

    Places count from 1; other tokens get weight[0]. Numbers must be written with the ones first. In
    training each pass draws k from 0 … max_k, so that the model also learns places beyond those of
    its longest numbers. In evaluation k is 0. The paper (arXiv 2405.17399) combines it with another
    encoding, as `sum` of abacus and none, rotary or fire does. With `separators` it is position
    coupling (arXiv 2405.20671): each text draws its own k from 1 on, and k is also the row of the
    separators. In evaluation k is 1.

    digits: ids of the tokens that are digits in your tokenizer
    separators: ids of + and =, which count as the place before the first digit
    max_k: the largest random offset; the table has rows for numbers of seq_length + max_k digits
    """

    digits: Tensor
    separators: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        digits: Sequence[int],
        separators: Sequence[int] = (),
        max_k: int = 99,
    ) -> None:
        super().__init__(shape)
        for name, ids, least in (("digits", digits, 1), ("separators", separators, 0)):
            is_list = isinstance(ids, list | tuple) and len(ids) >= least
            if not is_list or not all(type(token) is int and 0 <= token < EXACT for token in ids):
                raise UserError(f"{name}: {ids!r} are not ids of tokens; write {name}: [3, 4, 5]")
            self.register_buffer(name, torch.tensor(ids, dtype=torch.int64), persistent=False)
        self.first_k = 1 if separators else 0
        self.max_k = whole("max_k", max_k, most=1_000_000)
        rows = 1 + shape.train_length + self.max_k
        # As the released training: like its embedding of words.
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden).normal_(0.0, shape.hidden**-0.5))

    def check_tokens(self, vocab: int, end_of_document: int | None) -> None:
        for token in torch.cat([self.digits, self.separators]).tolist():
            if token >= vocab or token == end_of_document:
                raise UserError(
                    f"pos_emb_args: abacus: {token} ends documents or is none of {vocab} tokens;"
                    " give the ids that the tokenizer has for digits and separators"
                )

    def on_embeddings_by_ids(self, x: Tensor, ids: Tensor, memory: Memory) -> Tensor:
        """[batch, length, hidden] -> same; memory["place"] [batch]: that of the last token.

        UserError in evaluation for a number of more digits than the table has rows for.
        """
        batch, length = ids.shape
        is_digit = torch.isin(ids, self.digits)  # [batch, length]
        index = torch.arange(1, length + 1, device=ids.device)
        before = torch.where(is_digit, 0, index).cummax(dim=1).values
        place = index - before  # of the digit in its number
        if "place" in memory:  # a number that goes on
            place = place + memory["place"][:, None] * (before == 0)
        memory["place"] = place[:, -1]

        counted = is_digit | torch.isin(ids, self.separators)
        row = (place + self.first_k) * counted  # the place of a separator is 0
        if self.training:
            draws = (batch if self.first_k else 1, 1)
            drawn = torch.randint(self.max_k + 1 - self.first_k, draws, device=ids.device)
            row = row + drawn * counted
        elif int(row.max()) >= len(self.weight):  # training's windows fit, and it waits for nothing
            raise UserError(
                f"pos_emb: abacus: a number is longer than {len(self.weight) - 1} digits, which the"
                " table has rows for; give shorter ones, or train with a larger max_k"
            )
        return x + self.weight[row].to(x.dtype)
