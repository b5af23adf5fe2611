"""Compiled layers: one graph for each encoding and length, the same values, gradients and names."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.conformance.subject import VOCAB, Subject, random_ids
from megatron.positions import REGISTRY
from tests.encodings import FEW
from tests.support import NEEDED

LENGTH = 48
OPTIONS = {**NEEDED, "learned": {"max_positions": 150}}


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    counters.clear()


def marked(names, fast):
    """`names`, of which all but the fast ones belong to the campaign."""
    slow = pytest.mark.campaign
    return [pytest.param(name, marks=() if name in fast else slow) for name in sorted(names)]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def loss_and_gradients(gpt):
    torch.manual_seed(3)  # abacus and randomized draw
    ids = random_ids(LENGTH + 1, batch=2)
    loss = gpt(ids[:, :-1], labels=ids[:, 1:], mean=True)
    gpt.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", marked(REGISTRY, FEW))
def test_equal_layers_are_one_graph_for_every_encoding(name):
    gpt = Subject(name, OPTIONS.get(name, {})).gpt("eager", layers=3).train()
    plain = loss_and_gradients(gpt)
    names = list(gpt.state_dict())
    gpt.compile_layers(backend="eager", fullgraph=True)
    compiled = loss_and_gradients(gpt)
    assert list(gpt.state_dict()) == names
    assert compiled.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-6)
    of_layers, of_the_loss = 1, 1
    assert graphs() == of_layers + of_the_loss


@pytest.mark.parametrize("name", marked(["rotary", "kerple_log", "fox"], ["kerple_log"]))
def test_an_evaluation_compiles_at_most_once_for_each_length(name):
    gpt = Subject(name).gpt("eager", layers=2)
    gpt.compile_layers(backend="eager", fullgraph=True)
    lengths = [32, 64, 128, 96, 16, 48, 24, 80, 112]  # torch's own limit is 8
    for length in (*lengths, *lengths):
        with torch.no_grad():
            gpt(random_ids(length) % VOCAB)
    assert graphs() == len(lengths)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_documents_and_recomputed_layers_are_the_same_compiled(backend):
    """sdpa's blocks break the graph, and are right."""
    gpt = Subject("kerple_log").gpt(backend, layers=2).train()
    gpt.end_of_document = 5
    gpt.use_attention(replace(gpt.attention, reset_attention_mask=True))
    gpt.checkpoint_activations = True
    plain = loss_and_gradients(gpt)
    gpt.compile_layers(backend="aot_eager", fullgraph=backend == "eager")
    for key, value in loss_and_gradients(gpt).items():
        torch.testing.assert_close(value, plain[key], rtol=1e-4, atol=1e-6)
