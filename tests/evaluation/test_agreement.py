import numpy as np
import pytest
import torch

from megatron.data.parts import Part
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from megatron.evaluation.agreement import (
    check_finite,
    check_held_out,
    check_known_tokens,
    check_same_model,
    check_same_tokenizer,
)
from megatron.evaluation.protocols import Windows

OURS = {"type": "HFTokenizer", "hash": "aaaa", "vocab_size": 50}


def token_file(folder, tokenizer):
    meta = {"corpus": "c", "tokenizer": tokenizer} if tokenizer else {}
    with TokenWriter(folder / "c", np.uint16, meta=meta) as writer:
        writer.add(np.arange(60))
    return TokenFile.open(folder / "c")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    check_finite(model, "runs/a")
    with torch.no_grad():
        model[1].bias[1] = value
    with pytest.raises(UserError) as fault:
        check_finite(model, "runs/a/global_step5")
    assert str(fault.value) == (
        "runs/a/global_step5: 1.bias holds numbers that are not finite - the training diverged"
        " before it was saved; give an earlier --step, or train with a lower lr"
    )


def test_a_configuration_of_another_model_is_refused_with_every_key_and_both_values():
    trained = {"pos_emb": "mep_free", "num_layers": 12, "hidden_size": 768}
    check_same_model({"pos_emb": "mep_free", "num_layers": 12, "lr": 1}, trained, "runs/a")
    with pytest.raises(UserError) as caught:
        check_same_model(
            {"pos_emb": "rotary", "num_layers": 24, "hidden_size": 768}, trained, "runs/a"
        )
    assert str(caught.value) == (
        "runs/a: is a checkpoint of another model - give that run's configuration, its folder as"
        " load, or --checkpoint DIR and no configuration\n"
        "  pos_emb: 'rotary' is given, the checkpoint was trained with 'mep_free'\n"
        "  num_layers: 24 is given, the checkpoint was trained with 12"
    )


def test_data_of_another_tokenizer_are_refused_with_both_names(tmp_path):
    tokens = token_file(tmp_path, {**OURS, "hash": "bbbb"})
    message = (
        r"c was written by HFTokenizer bbbb \(50 tokens\),"
        r" runs/a learned with HFTokenizer aaaa \(50 tokens\)"
    )
    with pytest.raises(UserError, match=message):
        check_same_tokenizer(tokens, OURS, "runs/a")


def test_data_of_the_same_or_an_unnamed_tokenizer_are_accepted(tmp_path):
    tokens = token_file(tmp_path, OURS)
    check_same_tokenizer(tokens, OURS, "runs/a")
    check_same_tokenizer(tokens, {}, "runs/a")
    (tmp_path / "foreign").mkdir()
    check_same_tokenizer(token_file(tmp_path / "foreign", None), OURS, "runs/a")


def test_text_at_an_address_that_was_trained_on_is_not_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_CACHE", str(tmp_path / "cache"))
    address = f"file://{token_file(tmp_path, OURS).prefix}"
    texts = Part("valid", (TokenFile.open(address),), "")
    check_held_out(texts, ["s3://elsewhere/c"], "runs/a")
    with pytest.raises(UserError) as fault:
        check_held_out(texts, [address], "runs/a")
    assert str(fault.value).startswith(
        f"eval_part: {address} as valid text was trained on by runs/a"
    )


def test_a_token_beyond_the_vocabulary_is_named():
    windows = [Windows(2, [np.array([1, 2, 3]), np.array([3, 59, 5])], [0, 0])]
    check_known_tokens(windows, 60, "runs/a")
    with pytest.raises(
        UserError,
        match=r"data_path: holds token 59, runs/a knows the tokens 0 to 58 - prepare that text",
    ):
        check_known_tokens(windows, 59, "runs/a")
