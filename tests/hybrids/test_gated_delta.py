"""Gated DeltaNet and KDA against their recurrence, and hybrids.

tests/interop compares the layers with transformers' Qwen3.5 and Kimi Linear.
"""

from copy import deepcopy

import pytest
import torch

from megatron.attention.documents import Documents
from megatron.attention.encoded import LayerInputs
from megatron.config import load
from megatron.errors import UserError
from megatron.hybrids import gated_delta
from megatron.hybrids.gated_delta import PER_STATE, GatedDelta, KimiDelta, gated_delta_rule
from megatron.model import GPT, Architecture, Cache, from_config
from megatron.model.settings import initialize
from megatron.model.size import attention_flops
from megatron.positions import Shape, build
from tests.architectures import architecture
from tests.model import test_documents
from tests.model.test_cache import in_pieces

SIZES = ["num_layers=6", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
HYBRID = [*SIZES, "layers=[gated_delta, attention, gated_delta]", "init_method_std=0.15"]
MODEL = architecture(seq_length=48, num_layers=2)
OTHER_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}


def hybrid(**sizes) -> Architecture:
    return architecture(
        num_layers=2, seq_length=48, layers=["gated_delta", "attention"], **(sizes or OTHER_HEADS)
    )


def model(*settings: str) -> GPT:
    return from_config(load([], [*HYBRID, *settings]), vocab=50).eval()


@pytest.mark.parametrize(("decays", "fastest"), [(1, 0.3), (8, 0.3), (8, 200)])
@pytest.mark.parametrize("largest_beta", [1.0, 2.0])
def test_chunks_have_the_numbers_and_gradients_of_the_papers_recurrence(
    largest_beta, decays, fastest
):
    """S_t = S_(t-1) Diag(a_t) (I - b_t k_t k_tᵀ) + b_t v_t k_tᵀ, in float64, also in two pieces."""
    inputs = [torch.randn(2, 3, 141, 8, dtype=torch.float64) for _ in range(3)]
    inputs.append(largest_beta * torch.rand(2, 3, 141, 1, dtype=torch.float64))
    inputs.append(-fastest * torch.rand(2, 3, 141, decays, dtype=torch.float64))
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v, beta, log_decay = inputs
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, expected = torch.zeros(2, 3, 8, 8, dtype=torch.float64), []
    for t in range(141):
        key, value, b = unit_k[:, :, t, :, None], v[:, :, t, :, None], beta[:, :, t, :, None]
        householder = torch.eye(8, dtype=torch.float64) - b * key @ key.mT
        state = state * log_decay[:, :, t, None].exp() @ householder + b * value @ key.mT
        expected.append((state @ unit_q[:, :, t, :, None])[..., 0] / 8**0.5)
    expected = torch.stack(expected, dim=2)

    result, last = gated_delta_rule(*inputs, torch.zeros_like(state))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(last.mT, state, rtol=0, atol=1e-12)
    first, middle = gated_delta_rule(*(x[:, :, :70] for x in inputs), torch.zeros_like(state))
    second, _ = gated_delta_rule(*(x[:, :, 70:] for x in inputs), middle)
    torch.testing.assert_close(torch.cat([first, second], dim=2), expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    mine = torch.autograd.grad((result * weight).sum(), inputs)
    paper = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(mine, paper, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [GatedDelta, KimiDelta])
def test_queries_and_keys_turn_by_their_places_in_the_text(kind, monkeypatch):
    """HyPE: k_t e^(itθ) in the recurrence, with complex numbers as pairs."""
    layer, start, length = kind(hybrid()).double(), 1000, 71
    x = torch.randn(2, length, 32, dtype=torch.float64)
    frequencies = (50 ** (-torch.arange(0, 12, 2, dtype=torch.float64) / 12)).float().double()
    angle = torch.arange(start, start + length)[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angle), angle)  # [length, pairs]

    def turned(part):
        pairs = torch.complex(*part.chunk(2, dim=-1)) * turns
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def rule(q, k, *others):
        return gated_delta_rule(turned(q), turned(k), *others)

    with monkeypatch.context() as patch:
        patch.setattr(gated_delta, "gated_delta_rule", rule)
        expected = layer(x, LayerInputs())
    assert (layer(x, LayerInputs()) - expected).abs().max() > 1e-2
    layer.position = build("rotary", Shape(4, 12, 32, 48), base=50).double()
    result = layer(x, LayerInputs(start=start))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def window_of_documents() -> torch.Tensor:
    """[2, 207] ids: documents of 1 to 130 tokens, which end at, before and after ends of chunks."""
    ids = torch.randint(1, 50, (2, 207))
    ids[0, [0, 2, 63, 64, 65, 130, 140, 151]] = test_documents.END
    ids[1, [61, 191, 192, 206]] = test_documents.END
    return ids


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", [GatedDelta, KimiDelta])
def test_a_document_reads_what_it_reads_alone_and_has_its_gradients(kind, dtype, exact):
    """Alone in float64: in float32 a document alone is as far from that."""
    layer = kind(hybrid())
    documents = Documents.of(window_of_documents(), test_documents.END)
    x = torch.randn(2, 207, 32)
    alone, same_x = deepcopy(layer).double(), x.double().requires_grad_()
    expected = []
    for row, numbers in zip(same_x, documents.numbers, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        parts = [alone(part[None], LayerInputs()) for part in row.split(lengths)]
        expected.append(torch.cat(parts, dim=1))
    expected = torch.cat(expected)
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    result = layer(x, LayerInputs(documents=documents))
    assert (result - layer(x, LayerInputs())).abs().max() > 1e-2
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=exact)

    weight = torch.randn_like(expected) / documents.numbers.numel()  # a mean over tokens
    result = torch.autograd.grad((result * weight).sum(), [x, *layer.parameters()])
    expected = torch.autograd.grad((expected * weight).sum(), [same_x, *alone.parameters()])
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=exact)


@torch.no_grad()
@pytest.mark.parametrize("turned", [[], ["linear_pos_emb=rotary", "reset_position_ids=true"]])
@pytest.mark.parametrize("kind", ["gated_delta", "kda"])
def test_documents_of_a_hybrid_are_each_of_them_alone_also_in_pieces(kind, turned):
    ids = window_of_documents()
    settings = [f"layers=[{kind}, attention, {kind}]", "pos_emb=rotary", *turned[:1]]
    plain = model(*settings)
    expected = test_documents.one_by_one(plain, ids)
    assert (plain(ids) - expected).abs().max() > 0.1
    gpt = model(*settings, "reset_attention_mask=true", *turned[1:])
    gpt.end_of_document = test_documents.END
    torch.testing.assert_close(gpt(ids), expected, rtol=0, atol=2e-5)
    result = in_pieces(gpt, ids, [1, 1, 60, 1, 1, 1, 2, 64, 5, 71])
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_lengths_that_a_rotation_in_states_counts_are_those_of_the_text():
    longrope = "linear_pos_emb={longrope: {factor: 4, long_factor: 4}}"
    gpt, ids = model("pos_emb=rotary", longrope), torch.randint(50, (1, 60))
    turning = gpt.layers[0].attention.position
    assert turning.shape == Shape(4, 8, 32, 48)
    for length in (60, 48):
        gpt(ids[:, :length])
        assert turning.is_short == (length == 48)
    cache = Cache()
    gpt(ids[:, :48], cache=cache)
    with pytest.raises(UserError, match="cached keys of a shorter text cannot be used"):
        gpt(ids[:, 48:], cache=cache)


def test_first_values_are_those_of_flash_linear_attention():
    """A in (0, 16), steps from 0.001 to 0.1, and torch's own first values of a convolution."""
    layer = torch.nn.ModuleList([GatedDelta(MODEL)])
    initialize(layer, MODEL)
    of = dict(layer.named_parameters())
    steps = torch.nn.functional.softplus(of["0.dt_bias"])
    assert 0.001 <= steps.min() <= steps.max() <= 0.1001
    assert 0.0099 <= of["0.A_log"].exp().min() <= of["0.A_log"].exp().max() <= 16
    assert of["0.convolution.weight"].std().item() == pytest.approx(0.5 / 3**0.5, rel=0.1)
    assert of["0.query_key_value.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(of["0.norm.weight"], torch.ones(8))


@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_pass_also_of_chosen_texts():
    ids = torch.randint(50, (3, 141))
    other = ["linear_num_key_heads=2", "linear_num_value_heads=4"]
    kda = ["layers=[kda, attention]", *other]
    for settings in (
        ["pos_emb=kerple_log", *other],
        ["pos_emb=fox", "allow_neg_eigval=true"],
        ["pos_emb=rotary", *kda],
        ["pos_emb=none", "linear_pos_emb={yarn: {factor: 4}}", *kda],
    ):
        gpt = model(*settings)
        expected = gpt(ids)
        result = in_pieces(gpt, ids, [1, 5, 64, 1, 1, 5, 64])
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)
        cache, chosen = Cache(), torch.tensor([2, 0])
        gpt(ids[:, :90], cache=cache)
        cache.select(chosen)
        rest = gpt(ids[chosen, 90:], cache=cache)
        torch.testing.assert_close(rest, expected[chosen, 90:], rtol=0, atol=1e-4)


def test_patterns_of_encodings_and_windows_repeat_over_the_layers_with_attention():
    gpt = model("pos_emb_layers=[kerple_log, fox]", "window_layers=[9, null]")
    assert [x.label for x in gpt.placed] == ["layer 1 (kerple_log)", "layer 4 (fox)"]
    assert [plan.window for plan in gpt.plans.values()] == [9, None]
    assert {name.split(".")[0] for name in gpt.learned()} == {"layer1", "layer4"}
    gpt(torch.randint(50, (1, 40))).square().mean().backward()
    assert all(x.grad is not None for x in gpt.parameters())


def test_operations_of_states_and_of_attention_are_counted():
    """Two layers have attention, and four a state of 12 x 8 in each of 6 heads."""
    heads = [f"{key}={number}" for key, number in OTHER_HEADS.items()]
    model = Architecture.of(load([], [*HYBRID, *heads]).model)
    assert attention_flops(model, keys=100) == 4 * 2 * 32 * 100 + PER_STATE * 4 * 6 * 12 * 8


def test_labels_name_kinds_and_the_encoding_of_states():
    words = ["layers=[gated_delta, attention]", "linear_pos_emb={rotary: {base: 100}}"]
    label = "rotary, layer_kinds 1 gated_delta + 1 attention, linear_pos_emb rotary (base: 100)"
    assert load([], [*SIZES, *words]).label == label
