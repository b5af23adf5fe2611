"""The recipe for nanoGPT, as it stands on the page, in a small model with nanoGPT's names."""

import importlib.util
import math
import re

import pytest
import torch
from torch import nn

from tests.encodings import HOOKS
from tests.support import ROOT

# Written for this test: what the recipe reads of a nanoGPT, with its names.
MODEL = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x):
        fused = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).movedim(2, 0).transpose(2, 3)
        y = F.scaled_dot_product_attention(*fused, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)

    def forward(self, x):
        return x + self.attn(self.norm(x))


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[: idx.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[2]), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        learned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(learned, learning_rate, betas, weight_decay=weight_decay)
"""
PAGE = ROOT / "docs" / "other_trainers.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LENGTH, HEADS, HIDDEN = 24, 4, 64
TEXT = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 50


@pytest.fixture
def copy(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def gpt(copy):
    """A model in float64 whose learned positions are zero already."""
    spec = importlib.util.spec_from_file_location("nanogpt_for_a_test", copy / "model.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    torch.manual_seed(0)
    model = theirs.GPT(theirs.GPTConfig(LENGTH, 50, 2, HEADS, HIDDEN)).double()
    nn.init.zeros_(model.transformer.wpe.weight)
    nn.init.normal_(model.lm_head.weight)
    return model


def recipe(section="nanoGPT"):
    shared, *sections = PAGE.read_text().split("\n## ")
    (text,) = [text for text in sections if text.startswith(f"{section}\n")]
    names = {}
    for block in CODE.findall(shared + text):
        exec(compile(block, PAGE, "exec"), names)
    return names


def logits_by_formula(gpt):
    """The model's logits with the bias of KERPLE."""

    def forward(attention, x):
        parts = attention.c_attn(x).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT / math.sqrt(HIDDEN // HEADS) + kerple(attention.encoding)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return attention.c_proj(y.transpose(1, 2).flatten(2))

    x = gpt.transformer.wte(TEXT)
    for block in gpt.transformer.h:
        x = x + forward(block.attn, block.norm(x))
    return gpt.lm_head(x)


def kerple(encoding):
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    p, a = encoding.p[:, None, None].double(), encoding.a[:, None, None].double()
    return -p * torch.log(1 + a * distance.clamp(min=0))


def test_logits_and_gradients_are_those_of_the_papers_formula(gpt):
    recipe()["use"](gpt, "kerple_log")
    gpt.double()
    encoding = gpt.transformer.h[0].attn.encoding
    assert gpt.transformer.h[1].attn.encoding is encoding
    assert "transformer.h.0.attn.encoding.p" in gpt.state_dict()
    numbers = {path: value for path, value in gpt.named_parameters() if "encoding." in path}
    with torch.no_grad():
        for value in numbers.values():
            value.uniform_(0.1, 1.0)
    expected = logits_by_formula(gpt)
    logits = gpt(TEXT, TEXT)[0]
    torch.testing.assert_close(logits, expected)

    weights = torch.randn(logits.shape, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, list(numbers.values()), weights)
    gradients = torch.autograd.grad(logits, list(numbers.values()), weights)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected_gradient)


def test_encodings_with_hooks_that_the_recipe_does_not_call_are_refused_by_name(gpt):
    use, refused = recipe()["use"], {}
    for name in ("alibi", "none", "rotary", "cope", "fire", "path", "learned", "rope_pp"):
        try:
            use(gpt, name)
        except ValueError as fault:
            refused[name] = str(fault)
    assert refused == {
        "cope": "cope: this recipe does not call ['on_scores']",
        "fire": "fire: this recipe does not call ['index_bias']",
        "path": "path: this recipe does not call ['block_scores']",
        "learned": "learned: this recipe does not call ['on_embeddings']",
        "rope_pp": "rope_pp: this recipe does not call heads_per_query",
    }


def test_a_recipe_knows_every_hook_of_an_encoding():
    called = {"distance_bias", "distance_weight", "on_queries_keys_at"}
    assert {*recipe()["HOOKS"]} | called == {*HOOKS}


@pytest.mark.parametrize("section", ["nanoGPT", "nanochat", "litgpt", "torchtitan", "Megatron-LM"])
def test_every_section_defines_a_recipe_and_its_trial(section):
    assert {"use", "trial"} <= recipe(section).keys()
