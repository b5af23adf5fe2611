"""Documents kept apart beside transformers, whose models take a text as one document."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatron.config import load
from megatron.interop import open_model
from megatron.interop.export import export
from megatron.model import from_config
from tests.interop.exports import SHAPE, VOCAB, a_run, random_ids

pytestmark = pytest.mark.usefixtures("own_modules")
END = 0
KEYS = ["reset_attention_mask=true", "reset_position_ids=true"]
TOKENIZER = {"type": "CharLevelTokenizer", "hash": "aaaa", "vocab_size": VOCAB, "eod": END}


@torch.no_grad()
def test_a_text_is_one_document_in_transformers_and_the_card_says_so(tmp_path):
    path, model = a_run(tmp_path, "pos_emb=sinusoidal", *KEYS, tokenizer=TOKENIZER)
    model.end_of_document = END
    probes = path / "evaluation" / "text-valid-global_step5-probes.jsonl"
    probes.parent.mkdir()
    probes.write_text('{"probe": "passkey"}\n')  # no rows of evaluate.py
    export(path, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids = random_ids(60)
    ids[0, [20, 41]] = END
    one_document = from_config(load([], [*SHAPE, "pos_emb=sinusoidal"]), VOCAB).eval()
    one_document.load_state_dict(model.state_dict())
    logits = theirs(ids).logits
    torch.testing.assert_close(logits, one_document(ids), rtol=0, atol=2e-5)
    # Up to its end the first document has no other before it.
    torch.testing.assert_close(logits[:, :21], model(ids)[:, :21], rtol=0, atol=2e-5)
    assert (logits - model(ids))[:, 21:].abs().max() > 1e-2
    card = (tmp_path / "out" / "README.md").read_text()
    told = "| documents | in training, tokens attended to their own document alone"
    assert (
        f"{told}, whose positions began again; this model takes each text as one document" in card
    )


@torch.no_grad()
def test_what_was_exported_is_opened_as_it_was_trained(tmp_path):
    path, model = a_run(tmp_path, "pos_emb=mep_free", *KEYS, tokenizer=TOKENIZER)
    model.end_of_document = END
    export(path, tmp_path / "out")
    opened, config = open_model(tmp_path / "out")
    assert config.attention.reset_attention_mask
    ids = random_ids(60)
    ids[0, 30] = END
    torch.testing.assert_close(opened(ids), model(ids), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_a_window_of_documents_has_the_logits_of_transformers_for_each(kind, tmp_path):
    sizes = {"vocab_size": VOCAB, "bos_token_id": END, "eos_token_id": END}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96, **sizes)
        theirs = GPT2LMHeadModel(config).eval()
    else:
        layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(hidden_size=32, intermediate_size=64, **layers, **sizes)
        theirs = LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path)
    ours, _ = open_model(tmp_path)
    ours.end_of_document = END
    apart = {"reset_attention_mask": True, "reset_position_ids": True}
    ours.use_attention(replace(ours.attention, **apart))
    ids = random_ids(90).clamp(min=1)
    ids[0, [20, 41, 42]] = END
    alone = [theirs(part).logits for part in ids.split([21, 21, 1, 47], dim=1)]
    torch.testing.assert_close(ours(ids), torch.cat(alone, dim=1), rtol=0, atol=1e-4)
