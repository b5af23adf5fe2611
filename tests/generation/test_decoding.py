"""The same tokens with a cache and without, alone and in a batch, for every encoding."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.errors import UserError
from megatron.generation.decoding import Decoding, Ending, Text, decode
from megatron.generation.run import batches
from megatron.generation.sampling import Sampling
from megatron.model import GPT
from tests.encodings import every_signature
from tests.model.test_cache import model as small_model

VOCAB = 50
GREEDY = Sampling(temperature=0)
OPTIONS = {
    "plain": [],
    "window": ["window=20"],
    "sinks": ["window=20"],
    "blockwise": ["blockwise=true"],
    "everything": ["window=40", "blockwise=true", "logn_scale=true"],
}
NEW = {"plain": 50, "everything": 140}  # tokens until a cache has forgotten some; 70 with others


def model(name: str, *settings: str, longest: int = 3072) -> GPT:
    """In float64, where no rounding decides between two tokens."""
    return small_model(name, f"max_position_embeddings={longest}", *settings).double()


def accepted(name: str) -> Iterator[tuple[str, GPT]]:
    """A model for each of the options, but those that the encoding refuses with a message."""
    for options, settings in OPTIONS.items():
        gpt = model(name, *settings)
        if options == "sinks":
            with_sinks = replace(gpt.attention, sinks=3)
            if gpt.faults_of_methods(with_sinks):
                continue
            gpt.use_attention(with_sinks)
        yield options, gpt


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def how(most: int, **changes) -> Decoding:
    return replace(Decoding(GREEDY, most=most, vocab=VOCAB), **changes)


def continued(gpt: GPT, prompts: Sequence[list[int]], settings: Decoding) -> list[list[int]]:
    texts = [Text(tokens, seed=(number,)) for number, tokens in enumerate(prompts)]
    for _ in decode(gpt, texts, settings):
        pass
    assert all(text.ended for text in texts)
    return [text.tokens for text in texts]


@torch.no_grad()
def likeliest(gpt: GPT, tokens: list[int], first: int) -> list[int]:
    """By one whole pass: the likeliest token behind each one from index first - 1 on."""
    logits = gpt(torch.tensor([tokens[:-1]]))[0, first - 1 :]
    return logits.argmax(dim=-1).tolist()


@every_signature
def test_tokens_are_those_of_a_whole_pass(name):
    for options, gpt in accepted(name):
        new = NEW.get(options, 70)
        (tokens,) = continued(gpt, [prompt(1)], how(new))
        assert len(tokens) == new + 1
        assert tokens[1:] == likeliest(gpt, tokens, 1)


@every_signature
def test_tokens_are_the_same_without_a_cache(name):
    gpt = model(name)
    for length, new in ((1, 24), (64, 8)):
        cached = continued(gpt, [prompt(length)], how(new))
        assert cached == continued(gpt, [prompt(length)], how(new, cached=False))


@every_signature
def test_texts_of_a_batch_are_those_of_each_prompt_alone(name):
    gpt = model(name)
    prompts = [prompt(length, seed=length) for length in (23, 1, 60, 23)]
    together = continued(gpt, prompts, how(12))
    assert together == [continued(gpt, [one], how(12))[0] for one in prompts]
    assert [len(tokens) for tokens in together] == [35, 13, 72, 35]


@every_signature
def test_drawn_tokens_are_those_of_each_prompt_alone_and_without_a_cache(name):
    gpt = model(name)
    drawing = replace(how(16), sampling=Sampling(temperature=0.8, top_p=0.9))
    prompts = [prompt(12), prompt(12), prompt(30)]
    together = continued(gpt, prompts, drawing)
    assert together == continued(gpt, prompts, replace(drawing, cached=False))
    assert together[0] != together[1], "texts of one prompt have seeds of their own"


def test_endless_text_keeps_a_bounded_cache(monkeypatch):
    """The keys of each layer: no more after 2,000 tokens than after 200."""
    from megatron.generation import decoding

    caches = []
    new_cache = decoding.Cache
    monkeypatch.setattr(
        decoding, "Cache", lambda **words: caches.append(new_cache(**words)) or caches[-1]
    )
    gpt = model("mep_free", "window=20")
    gpt.use_attention(replace(gpt.attention, sinks=3))
    most = 0
    for step, _ in enumerate(decode(gpt, [Text(prompt(5))], how(2000))):
        kept = max(layer.length for layer in caches[0].layers)
        most = max(most, kept)
        if step == 200:
            early = most
    assert most == early <= 2 * 20 + 3


# --- how texts end ---


def test_a_text_ends_with_its_document():
    gpt = model("rotary")
    (tokens,) = continued(gpt, [prompt(5)], how(100))
    end = tokens[20]
    first = tokens.index(end, 5)
    (shorter,) = continued(gpt, [prompt(5)], how(100, end=end))
    assert shorter == tokens[: first + 1]
    text = Text(prompt(5))
    list(decode(gpt, [text], how(100, end=end)))
    assert text.ended is Ending.DOCUMENT


def test_texts_that_end_early_do_not_change_the_others():
    gpt = model("kerple_log")
    prompts = [prompt(length, seed=length) for length in (5, 9, 14)]
    alone = [continued(gpt, [one], how(60, end=3))[0] for one in prompts]
    assert continued(gpt, prompts, how(60, end=3)) == alone


def test_each_step_says_which_texts_got_a_token():
    gpt = model("alibi")
    short, long = Text(prompt(2)), Text(prompt(5))
    steps = [[len(text.prompt) for text in got] for got in decode(gpt, [short, long], how(4))]
    assert steps == [[2], [2], [2], [2, 5], [5], [5], [5]]


def test_tokens_that_only_the_embedding_has_are_never_chosen():
    gpt = model("alibi")
    (tokens,) = continued(gpt, [[1, 2]], how(200, vocab=10))
    assert max(tokens) < 10


def test_numbers_that_are_not_finite_are_a_fault():
    gpt = model("alibi")
    gpt.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match="logits: the model computed numbers that are not finite"):
        continued(gpt, [[1, 2]], how(2))


def test_no_prompt_is_no_work():
    assert list(decode(model("alibi"), [], how(3))) == []


@pytest.mark.parametrize("most", [1, 2, 16])
def test_a_batch_has_prompts_of_similar_lengths(most):
    texts = [Text(prompt(length)) for length in (3, 200, 1, 90, 2, 4, 201)]
    found = [[len(text.prompt) for text in batch] for batch in batches(texts, most, 64)]
    assert sorted(length for batch in found for length in batch) == [1, 2, 3, 4, 90, 200, 201]
    assert all(len(batch) <= most and batch[-1] - batch[0] <= 64 for batch in found)
    if most == 16:
        assert found == [[1, 2, 3, 4], [90], [200, 201]]
