"""Functions that only docs/python.md uses, beside transformers' own model of the same weights."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.config import load
from megatron.data.tokenizers import build_tokenizer
from megatron.errors import UserError
from megatron.evaluation import losses
from megatron.generation import continuation
from megatron.interop import open_model
from megatron.model import from_config

BYTES = build_tokenizer("CharLevelTokenizer")
SMALL = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "seq_length=32"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model of transformers with weights far from first values, and ours of its folder."""
    folder = tmp_path_factory.mktemp("neox")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GPTNeoXConfig(
        vocab_size=512, intermediate_size=64, max_position_embeddings=64, **sizes
    )
    theirs = GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    theirs.save_pretrained(folder)
    ours, _ = open_model(folder)
    return theirs, ours


def test_losses_are_those_of_transformers_at_every_length(pair):
    theirs, ours = pair
    ids = torch.randint(512, (300,))
    result = losses(ours, ids.tolist(), [16, 64])
    assert list(result) == [16, 64]
    for length, values in result.items():
        expected = []
        for start in range(0, 256, length):  # 256: the whole windows of 64 in 299 targets
            window = ids[start : start + length + 1]
            with torch.no_grad():
                logits = theirs(window[None, :-1]).logits[0]
            expected.append(cross_entropy(logits, window[1:], reduction="none").numpy())
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, np.concatenate(expected), rtol=2e-5, atol=2e-5)
    assert abs(result[16] - result[64]).max() > 0.01
    array = losses(ours, ids.numpy(), [64])[64]
    assert (array == result[64]).all()


def test_a_continuation_is_what_transformers_generates(pair):
    theirs, ours = pair
    prompt = "Every token"
    ids = torch.tensor([BYTES.encode(prompt)])
    settings = {"do_sample": False, "max_new_tokens": 32, "eos_token_id": 0, "pad_token_id": 0}
    new = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    greedy = continuation(ours, BYTES, prompt, max_new_tokens=32, temperature=0)
    assert greedy == BYTES.decode(new.tolist()).removesuffix("\0")
    assert len(greedy) > 5
    assert continuation(ours, BYTES, prompt, max_new_tokens=32, top_k=1, seed=3) == greedy
    first, again, other = (
        continuation(ours, BYTES, prompt, temperature=2.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_model_in_training_mode_is_used_without_dropout_and_stays_in_it():
    config = load([], [*SMALL, "hidden_dropout=0.5"])
    model = from_config(config, vocab=512)
    model.train()
    results = []
    for _ in range(2):
        text = continuation(model, BYTES, "Every token", max_new_tokens=8, temperature=0)
        values = losses(model, BYTES.encode("Every token"), [8])[8]
        results.append((text, values.tolist()))
        assert model.training
    assert results[0] == results[1]


def test_what_cannot_be_measured_or_continued_has_one_message(pair):
    _, ours = pair
    ids = [1] * 100
    for lengths in ([48, 64], [0, 64], [-8, 64], [], [0]):
        with pytest.raises(UserError, match=r"^lengths: \[.*\]: each must divide the longest"):
            losses(ours, ids, lengths)
    for bad in (ids[:64], [512] * 100, [-1] * 100, [], [ids], [0.5] * 100):
        with pytest.raises(UserError, match=r"more tokens than that, from 0 to 511, as the"):
            losses(ours, bad, [64])
    learned = from_config(load([], [*SMALL, "pos_emb=learned"]), vocab=64)
    with pytest.raises(UserError, match=r"64"):
        losses(learned, ids, [32, 64])
    with pytest.raises(
        UserError, match=r"^tokenizer: has 512 tokens, but the model has 64 - use the"
    ):
        continuation(learned, BYTES, "a")
    with pytest.raises(UserError, match=r"^generation: .*temperature"):
        continuation(ours, BYTES, "a", temperature=-1)
