"""The recipes of examples/ in small models with the names of five trainers (tests/trainers.py)."""

import ast
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from tests import trainers
from tests.support import ROOT
from tests.trainers import LENGTH, VOCAB

MODELS = {
    "nanogpt": trainers.NanoGPT,
    "nanochat": trainers.Nanochat,
    "litgpt": trainers.Litgpt,
    "torchtitan": trainers.Torchtitan,
    "megatron_lm": trainers.MegatronLM,
}
every_trainer = pytest.mark.parametrize("trainer", MODELS)
NOT_OF_THE_RECIPE = {"read", "groups", "setup_optimizer"}  # longer texts, and the optimizer


@pytest.fixture(autouse=True)
def no_bias(monkeypatch):
    monkeypatch.setattr(trainers, "BIAS", [])
    monkeypatch.setitem(sys.modules, "nanochat", SimpleNamespace(gpt=trainers.gpt))


def example(trainer):
    path = ROOT / "examples" / f"{trainer}.py"
    spec = importlib.util.spec_from_file_location(f"example_{trainer}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_with(trainer, name, **options):
    """A model in float64 with an encoding, whose numbers are far from their first values."""
    torch.manual_seed(0)
    use = example(trainer).use
    if trainer == "megatron_lm":
        spec = trainers.specification()
        use(spec, name, LENGTH, **options)
        model = trainers.MegatronLM(spec)
    else:
        model = MODELS[trainer]()
        length = {"length": LENGTH} if trainer == "torchtitan" else {}
        use(model, name, **length, **options)
    model = model.double()
    torch.manual_seed(1)
    for path, number in model.named_parameters():
        if "encoding." in path:
            torch.nn.init.uniform_(number, 0.1, 0.9)
        elif number.requires_grad:
            torch.nn.init.normal_(number, std=0.3)
    return model


def first_ids(length=LENGTH):
    return torch.arange(2 * length).view(2, length) * 7 % VOCAB


def without_encoding(trainer, model):
    """Its own model with the same weights, which has no positions."""
    plain = MODELS[trainer]().double()
    weights = {path: x for path, x in model.state_dict().items() if "encoding." not in path}
    missing = plain.load_state_dict(weights, strict=False)
    assert missing == ([], []), missing
    return plain


def kerple(encoding, length):
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    p, a = (number.detach().view(-1, 1, 1).double() for number in (encoding.p, encoding.a))
    return -p * torch.log1p(a * distance)


def learned(model):
    return {path: x for path, x in model.named_parameters() if "encoding." in path}


@every_trainer
def test_logits_are_those_of_the_papers_formula_in_its_own_attention(trainer):
    model = model_with(trainer, "kerple_log")
    logits = model(first_ids())
    logits.square().sum().backward()
    numbers = learned(model)
    assert {path.rpartition(".")[2] for path in numbers} == {"p", "a"}
    assert all(number.grad.abs().max() > 0 for number in numbers.values())

    if trainer in ("torchtitan", "megatron_lm"):  # whose layers have numbers of their own
        first, second = numbers.values(), iter(numbers.values())
        for number, other in zip(list(first)[2:], second, strict=False):
            number.data.copy_(other)
        logits = model(first_ids())
    encoding = next(part for path, part in model.named_modules() if path.endswith(".encoding"))
    expected_model = without_encoding(trainer, model)
    trainers.BIAS.append(kerple(encoding, LENGTH))
    torch.testing.assert_close(logits, expected_model(first_ids()))
    trainers.BIAS.clear()
    assert (logits - expected_model(first_ids())).abs().max() > 0.01


@every_trainer
def test_first_tokens_reach_the_last_logits_of_a_text_of_four_times_the_length(trainer):
    model = model_with(trainer, "kerple_log")
    length = 4 * LENGTH
    ids = first_ids(length)
    others = ids.clone()
    others[:, :2] = (ids[:, :2] + 1) % VOCAB
    module = example(trainer)
    if hasattr(module, "read"):
        with pytest.raises(AssertionError):
            model(ids)
        module.read(model, length)
    logits = model(ids)
    assert (model(others) - logits)[:, -1].abs().max() > 1e-6
    prefix = ids[:, :LENGTH]
    torch.testing.assert_close(model(prefix), logits[:, :LENGTH])


def test_without_its_lines_nanochat_reads_no_far_token():
    """Why `read` exists: an L layer has a window of sequence_len tokens."""
    model = model_with("nanochat", "kerple_log")
    model.cos, model.sin = (x[:, :1].expand(-1, 4 * LENGTH, -1, -1) for x in (model.cos, model.sin))
    ids = first_ids(4 * LENGTH)
    others = ids.clone()
    others[:, :2] = (ids[:, :2] + 1) % VOCAB
    assert (model(others) - model(ids))[:, -1].abs().max() == 0.0


@torch.no_grad()
@pytest.mark.parametrize("name", ["rotary", "kerple_log"])
def test_nanochat_decodes_with_its_own_cache(name):
    model, ids = model_with("nanochat", name), first_ids()
    expected = model(ids)
    stores = [torch.zeros(2, 2, LENGTH, 2, trainers.HEAD_DIM).double() for _ in range(2)]
    cache = SimpleNamespace(stores=stores, seqlens=torch.zeros(2, dtype=torch.int32))
    parts = [model(part, cache) for part in ids.split([10, 1, 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_what_an_encoding_learns_has_no_decay():
    nanochat = model_with("nanochat", "kerple_log")
    of_nanochat = nanochat.setup_optimizer(matrix_lr=0.5).param_groups
    litgpt = model_with("litgpt", "kerple_log")
    of_litgpt = torch.optim.AdamW(example("litgpt").groups(litgpt), weight_decay=0.1).param_groups
    for model, groups in ((nanochat, of_nanochat), (litgpt, of_litgpt)):
        ours = [*learned(model).values()]
        *others, last = groups
        assert {*last["params"]} == {*ours}
        assert last["weight_decay"] == 0.0
        assert sum(len(group["params"]) for group in others) == len({*model.parameters()}) - 2
        assert others[0]["weight_decay"] == 0.1
    assert of_nanochat[0]["lr"] == 0.5


def test_torchtitan_builds_on_the_meta_device_and_keeps_packed_documents_apart():
    with torch.device("meta"):
        model = trainers.Torchtitan()
        example("torchtitan").use(model, "sum", LENGTH, parts=["rotary", "fox"])
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    model.init_states()
    ids, positions = first_ids()[:1], torch.arange(LENGTH) % 9
    logits = model(ids, positions)
    for start in range(0, LENGTH, 9):
        document = slice(start, min(start + 9, LENGTH))
        alone = model(ids[:, document], positions[document])
        torch.testing.assert_close(logits[:, document], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("trainer", "name", "message"),
    [
        ("nanogpt", "learned", r"applied=\['on_embeddings'\]"),
        ("nanogpt", "rope_pp", "must be"),
        ("nanochat", "fox", "reads content; give x"),
        ("litgpt", "fox", "reads content; give x"),
        ("megatron_lm", "fope", "num_key_value_heads"),
    ],
)
def test_what_a_recipe_cannot_compute_is_refused(trainer, name, message):
    model = model_with(trainer, name)
    with pytest.raises(ValueError, match=message):
        model(first_ids())


def test_other_settings_of_a_trainer_are_refused():
    with pytest.raises(ValueError, match="rotary_percentage: 0"):
        example("litgpt").use(trainers.Litgpt(rope_n_elem=8), "alibi")
    spec = trainers.specification()
    example("megatron_lm").use(spec, "alibi", LENGTH)
    with pytest.raises(ValueError, match=r"needs \{'window_size': None\}"):
        trainers.MegatronLM(spec, window_size=64)


def test_drawn_positions_are_those_of_all_layers_in_nanogpt():
    model = model_with("nanogpt", "randomized").train()
    torch.manual_seed(3)
    model(first_ids())
    (encoding,) = {block.attn.encoding for block in model.transformer.h}
    drawn = encoding.drawn
    assert len(drawn) == LENGTH
    model(first_ids())
    assert not torch.equal(encoding.drawn, drawn)


@every_trainer
def test_a_recipe_is_short(trainer):
    text = (ROOT / "examples" / f"{trainer}.py").read_text()
    count = 0
    for part in ast.parse(text).body:
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name not in NOT_OF_THE_RECIPE:
            lines = text.splitlines()[part.lineno - 1 : part.end_lineno]
            count += sum(line.strip() != "" and not line.strip().startswith("#") for line in lines)
    assert count <= (12 if trainer == "nanogpt" else 20)
