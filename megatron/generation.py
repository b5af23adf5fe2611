"""Text from a trained model, by transformers' `generate`."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.model import GPT


def continuation(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """A model's continuation of a prompt, up to the end of a document.

    temperature: divides the logits; 0 always takes the likeliest token
    top_k, top_p: sample from this many likeliest tokens, or from those that together have this
        probability

    Raises UserError for settings that transformers rejects, for a tokenizer with more tokens than
    the model, and for a text that is too long for the model.
    """
    ids = prompt_ids(model, tokenizer, prompt)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings |= {"top_k": top_k, "top_p": top_p, "seed": seed}
    (new,) = generated(model, tokenizer, ids, **settings)
    return tokenizer.decode(new)


def prompt_ids(model: GPT, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a prompt, after the token with which the model's texts begin."""
    ids = list(tokenizer.encode(prompt))
    if model.begin_of_text is not None:
        return [model.begin_of_text, *ids]
    # In training, a text only began after the end of another one.
    return ids or [tokenizer.eod]


def generated(
    model: GPT,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    samples: int = 1,
    ignore_eod: bool = False,
    **settings: Any,
) -> list[list[int]]:
    """The new tokens of each sample, up to the end of the document or, with ignore_eod, beyond.

    settings: other settings of transformers' GenerationConfig, such as min_p
    """
    from transformers import GenerationConfig  # importing it takes seconds

    if tokenizer.vocab_size > model.vocab:
        raise UserError(
            f"tokenizer: has {tokenizer.vocab_size} tokens, but the model has {model.vocab} - use"
            " the tokenizer that the model was trained with"
        )
    longest = len(ids) + max_new_tokens - 1  # the last new token is never an input
    try:
        model.check_length(longest)
    except UserError as fault:
        raise UserError(
            f"max_new_tokens: {max_new_tokens}: with the prompt {longest} tokens are read,"
            f" and {fault}"
        ) from None
    if temperature != 0:
        settings |= {"do_sample": True, "temperature": temperature}
        settings |= {"top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    without_text = list(range(tokenizer.vocab_size, model.vocab))  # rows that pad the embedding
    end = None if ignore_eod else tokenizer.eod
    inputs = torch.tensor([ids], device=model.word_embeddings.weight.device)
    torch.manual_seed(seed)
    training = model.training
    try:
        config = GenerationConfig(
            **settings,
            eos_token_id=end,
            pad_token_id=tokenizer.eod,
            max_new_tokens=max_new_tokens,
            num_return_sequences=samples,
            suppress_tokens=without_text or None,
        )
        texts = as_transformers(model).generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=config,
        )
    except ValueError as fault:
        raise UserError(f"generation: {fault}") from None
    finally:
        model.train(training)
    new = texts[:, len(ids) :].tolist()
    return [text[: text.index(end)] if end in text else text for text in new]


def as_transformers(model: GPT) -> Any:
    """The model with the interface of transformers' models; it shares the weights in memory."""
    from transformers import initialization

    from megatron.interop.modeling_positions_gpt import (
        PositionsGPTConfig,
        PositionsGPTForCausalLM,
    )

    with initialization.no_init_weights():
        return PositionsGPTForCausalLM(PositionsGPTConfig(vocab_size=model.vocab), model).eval()
