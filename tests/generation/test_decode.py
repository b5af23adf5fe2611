"""The same tokens with a cache and without, alone and in a batch; sampling as in transformers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.data.tokenizers.build import build_tokenizer
from megatron.errors import UserError
from megatron.generation.decode import (
    Continuation,
    GenerationSettings,
    Written,
    chosen,
    decode,
)
from megatron.model import GPT
from tests.encodings import every_signature
from tests.model.test_cache import model as small_model

VOCAB = 50
GREEDY = GenerationSettings(temperature=0, past_documents=True)
TEXT = "Zwölf Bäume — 漢字 and 🎉🎉 end. the end\nof it"


class Numbers:
    """A tokenizer of numbers, for models whose tokens mean nothing."""

    eod = 3

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)


def model(name: str, *settings: str, longest: int = 3072) -> GPT:
    """In float64, where no rounding decides between two tokens."""
    return small_model(name, f"max_position_embeddings={longest}", *settings).double()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def decoded(gpt, prompts, vocab=VOCAB, **changes) -> list[Continuation]:
    """The continuations of all prompts, computed together."""
    settings = replace(GREEDY, **changes)
    texts = []
    for number, tokens in enumerate(prompts):
        texts.append(Continuation(Numbers(), tokens, settings, number))
    for _ in decode(gpt, vocab, texts):
        pass
    assert all(text.ended for text in texts)
    return texts


def continued(
    gpt: GPT, prompts: Sequence[list[int]], new: int, vocab: int = VOCAB, **changes
) -> list[list[int]]:
    return [text.tokens for text in decoded(gpt, prompts, vocab, max_new_tokens=new, **changes)]


@every_signature
@torch.no_grad()
def test_tokens_are_those_of_a_whole_pass_and_without_a_cache(name):
    for settings in ([], ["window=20", "logn_scale=true"]):
        gpt = model(name, *settings)
        (tokens,) = continued(gpt, [prompt(40)], 16)  # trained on 48
        logits = gpt(torch.tensor([tokens[:-1]]))[0, 39:]
        assert tokens[40:] == logits.argmax(dim=-1).tolist()
        assert continued(gpt, [prompt(40)], 4, cached=False) == [tokens[:44]]


@every_signature
def test_texts_of_a_batch_are_those_of_each_prompt_alone(name):
    gpt = model(name)
    prompts = [prompt(length, seed=length) for length in (13, 1, 60)]  # 60: a later batch
    together = continued(gpt, prompts, 5)
    assert together == [continued(gpt, [ids], 5)[0] for ids in prompts]
    assert [len(tokens) for tokens in together] == [18, 6, 65]
    drawing = {"temperature": 0.8, "top_p": 0.9}
    prompts = [prompt(12), prompt(12), prompt(30)]
    together = continued(gpt, prompts, 5, **drawing)
    assert together == continued(gpt, prompts, 5, cached=False, **drawing)
    assert together[0] != together[1], "texts of one prompt have seeds of their own"


def test_a_text_ends_with_its_document_and_does_not_change_the_others():
    gpt = model("kerple_log")
    prompts = [prompt(length, seed=length) for length in (5, 9, 14)]
    changes = {"max_new_tokens": 200, "past_documents": False, "temperature": 1.0}
    together = decoded(gpt, prompts, **changes)
    assert {text.ended for text in together} <= {"end_of_document", "max_new_tokens"}
    ended = [text for text in together if text.ended == "end_of_document"]
    assert ended
    assert all(
        text.tokens.index(Numbers.eod, len(text.prompt)) + 1 == len(text.tokens) for text in ended
    )
    assert decoded(gpt, prompts[:1], **changes)[0].tokens == together[0].tokens


def test_only_tokens_of_the_tokenizer_are_chosen_and_numbers_must_be_finite():
    gpt = model("alibi")
    (tokens,) = continued(gpt, [[1, 2]], 200, vocab=10)
    assert max(tokens) < 10
    gpt.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match="logits: the model computed numbers that are not finite"):
        continued(gpt, [[1, 2]], 2)


# --- sampling ---


class Drawing:
    """Tokens of a text, and the number that decides which one is drawn."""

    def __init__(self, tokens: list[int], draw: float) -> None:
        self.tokens, self._draw = tokens, draw

    def draw(self) -> float:
        return self._draw


def drawn(logits, tokens, draw, **settings):
    texts = [Drawing(ids, draw) for ids in tokens]
    return chosen(logits, texts, GenerationSettings(**settings))


def test_probabilities_are_those_of_transformers_in_its_order():
    """The share of each token over a grid of draws, for the first setting, the first two, …"""
    tokens = [[1, 5, 5, 7], [2, 2, 2, 2], [0, 30, 4, 9]]
    logits = 3 * torch.randn(3, 40)
    grid = 250
    expected, settings = logits, {}
    for name, value, processor in (
        ("repetition_penalty", 1.2, RepetitionPenaltyLogitsProcessor),
        ("temperature", 0.7, TemperatureLogitsWarper),
        ("top_k", 10, TopKLogitsWarper),
        ("top_p", 0.8, TopPLogitsWarper),
    ):
        settings[name] = value
        expected = processor(value)(torch.tensor(tokens), expected)
        counts = torch.zeros(3, 40)
        for step in range(grid):
            for row, token in enumerate(drawn(logits, tokens, (step + 0.5) / grid, **settings)):
                counts[row, token] += 1
        torch.testing.assert_close(counts / grid, expected.softmax(-1), rtol=0, atol=1.01 / grid)


def test_extremes_of_the_settings():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    assert drawn(logits, [[0]], 0.5, temperature=0) == [0]
    assert drawn(logits, [[0]], 0.5, temperature=0, repetition_penalty=1.5) == [1]
    for temperature in (1e-300, 1e-6):
        assert drawn(logits, [[0]], 1 - 1e-12, temperature=temperature) == [0]
    huge = torch.tensor([[-3e38, 0.0, 3e38]])
    for penalty in (1e-6, 1e6):
        assert drawn(huge, [[0, 1, 2]], 1 - 1e-12, repetition_penalty=penalty) == [2]
    for draw in (0.0, 0.3, 1 - 2**-53):
        assert drawn(logits, [[0]], draw, top_k=2)[0] in (0, 1)


# --- text ---


@pytest.fixture(scope="module", params=["CharLevelTokenizer", "HFTokenizer"])
def tokenizer(request, tmp_path_factory):
    """Bytes, and pairs of bytes that were joined."""
    if request.param == "CharLevelTokenizer":
        return build_tokenizer(request.param, None, None)
    theirs = HFTokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"]
    )
    theirs.train_from_iterator([TEXT] * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    theirs.save(str(path))
    return build_tokenizer("HFTokenizer", str(path), None)


def pieces(tokenizer, ids, prompt=(), stops=()):
    """What is taken after each token and at the end, and the writer."""
    written, taken = Written(tokenizer, prompt, stops), []
    for token in ids:
        if written.stopped:
            break
        written.add(token)
        taken.append(written.take())
    written.finish()
    return [*taken, written.take()], written


def test_pieces_make_the_text_behind_the_prompt_and_none_ends_inside_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    for cut in range(0, 30, 3):
        begin = tokenizer.decode(ids[:cut])
        if not begin.endswith("\ufffd"):
            taken, written = pieces(tokenizer, ids[cut:], prompt=ids[:cut])
            assert begin + "".join(taken) == begin + written.text == TEXT
            assert "\ufffd" not in "".join(taken)


def test_a_text_ends_before_its_first_stop_string(tokenizer):
    ids = tokenizer.encode(TEXT)
    for stop in ("🎉", "end", " the", "\n", "漢字 and", "Zwölf"):
        taken, written = pieces(tokenizer, ids, stops=["never", stop, "of it"])
        assert written.stopped
        assert "".join(taken) == TEXT[: TEXT.index(stop)]
    taken, written = pieces(tokenizer, tokenizer.encode("a b STO"), stops=["STOP", "OP"])
    assert not written.stopped
    assert "".join(taken) == "a b STO"


def test_bytes_that_are_no_character_do_not_wait_for_ever():
    tokenizer = build_tokenizer("CharLevelTokenizer", None, None)
    taken, written = pieces(tokenizer, [0xF0] * 40 + list(b"text"))
    assert "".join(taken[:20]), "after some bytes it is certain that they are none"
    assert written.text.endswith("text")
