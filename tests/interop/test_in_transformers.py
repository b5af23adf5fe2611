"""Encodings of ours in models of transformers: as by the formula, as by our import, in training."""

import copy
import json
import os
from contextlib import chdir
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import Dataset

from megatron.config import load
from megatron.errors import UserError
from megatron.interop import open_model, use
from megatron.interop.families import FAMILIES, each_weight
from megatron.interop.importing import import_checkpoint
from megatron.interop.modeling_positions_gpt import PositionsGPTConfig, PositionsGPTForCausalLM
from megatron.model import Architecture, from_config
from megatron.positions import REGISTRY
from tests.architectures import architecture
from tests.encodings import SAMPLE
from tests.interop.models import VOCAB, of_theirs, random_ids, spread
from tests.support import NEEDED, blocks

FAMILY_CASES = ["llama", "mistral", "qwen2 windows", "qwen3", "gpt2", "pythia"]
every_family = pytest.mark.parametrize("case", FAMILY_CASES)
FITTING = [name for name in SAMPLE if REGISTRY[name].heads_per_query == 1 and name != "abacus"]
every_signature = pytest.mark.parametrize("name", FITTING)


def changed(case: str, name: str, **options) -> transformers.PreTrainedModel:
    """One of their models with an encoding of ours, whose parameters are far from first values."""
    model = use(of_theirs(case), name, **{**NEEDED.get(name, {}), **options})
    torch.manual_seed(5)
    spread(model.base_model.encodings, 0.3)
    return model


def our_import(model: transformers.PreTrainedModel) -> torch.nn.Module:
    """Our GPT with the weights of such a model, read by the table of families."""
    family = FAMILIES[type(model).__name__]
    keys = model.config.to_dict()
    settings = family.settings_of(keys)
    [(name, options)] = keys["megatron_positions"].items()
    settings |= {"pos_emb": name, "pos_emb_args": options}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = load([], [*words, f"make_vocab_size_divisible_by={VOCAB}"])
    ours = from_config(config, vocab=VOCAB)
    weights = model.state_dict()
    weights[f"{family.head}.weight"] = weights["lm_head.weight"]
    read = dict(each_weight(family, weights, Architecture.of(config.model)))
    prefix = f"{family.trunk}encodings."
    for key, value in weights.items():
        if key.startswith(prefix):
            read[f"positions.{key.removeprefix(prefix)}"] = value
    if not config.model.no_weight_tying:
        del read["final_linear.weight"]
    ours.load_state_dict(read)
    return ours.eval()


def assert_near(logits, expected, relative=2e-6):
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=relative * largest)


# --- As others compute it ---


@torch.no_grad()
@every_family
def test_their_own_positions_by_ours_give_their_logits(case):
    theirs, ids = of_theirs(case), random_ids(200)
    expected = theirs(ids).logits
    model = of_theirs(case)
    if case == "gpt2":
        table = model.transformer.wpe.weight.clone()
        use(model, "learned").transformer.encodings[0].weight.copy_(table)
    else:
        rope = model.config.rope_parameters
        share = rope.get("partial_rotary_factor", 1.0)
        use(model, "rotary", base=rope["rope_theta"], rotary_pct=share)
    assert_near(model(ids).logits, expected)
    assert (use(model, "none")(ids).logits - expected).abs().max() > 0.01


@torch.no_grad()
def test_kerple_is_its_formula_as_a_mask_of_their_eager_attention():
    model = of_theirs("llama")
    model.set_attn_implementation("eager")
    model.base_model.rotary_emb.inv_freq.zero_()  # every angle is 0
    p, a = torch.tensor([0.3, 1.0, 1.7, 0.1]), torch.tensor([0.2, 1.1, 3.0, 0.6])
    length = 90
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    bias = -p[:, None, None] * torch.log1p(a[:, None, None] * distance)
    later = torch.ones(length, length).triu(1).bool()
    mask = bias.masked_fill(later, torch.finfo(torch.float32).min)[None]
    ids = random_ids(length)
    expected = model(ids, attention_mask=mask.expand(2, -1, -1, -1)).logits
    use(model, "kerple_log")
    encoding = model.base_model.encodings[0]
    encoding.p.copy_(p.view_as(encoding.p))
    encoding.a.copy_(a.view_as(encoding.a))
    assert_near(model(ids).logits, expected)


@every_signature
def test_logits_and_gradients_are_those_of_our_import(name):
    model, ids = changed("llama", name), random_ids(150)
    ours = our_import(model).double()  # sums of many terms: a processor's order must not decide
    model.double()
    torch.manual_seed(2)  # for encodings that draw positions
    logits = model(ids).logits
    torch.manual_seed(2)
    expected = ours(ids)
    assert_near(logits, expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    parameters = dict(model.base_model.encodings.named_parameters())
    assert parameters.keys() == dict(ours.positions.named_parameters()).keys()
    in_model = {id(parameter) for parameter in model.parameters()}
    gradients = {key: parameter.grad for key, parameter in ours.positions.named_parameters()}
    learned = [gradient for gradient in gradients.values() if gradient is not None]
    largest = max((float(gradient.abs().max()) for gradient in learned), default=0.0)
    for key, parameter in parameters.items():
        assert id(parameter) in in_model
        if gradients[key] is None:
            assert parameter.grad is None
        else:
            difference = (parameter.grad - gradients[key]).abs().max()
            assert difference <= 1e-5 * largest, key
    assert largest > 0 or not learned


@torch.no_grad()
@every_family
@pytest.mark.parametrize("name", ["fox", "ssmax", "sum"])
def test_every_family_gives_the_logits_of_our_import(case, name):
    model, ids = changed(case, name), random_ids(150)
    assert_near(model(ids).logits, our_import(model)(ids))


# --- Generation ---


@torch.no_grad()
@every_signature
def test_a_cached_text_is_the_text_in_one_pass(name):
    model, ids = changed("llama", name), random_ids(70)
    whole = model(ids).logits
    cache = transformers.DynamicCache()
    pieces = [
        model(part, past_key_values=cache, use_cache=True).logits
        for part in ids.split([40, 1, 1, 25, 3], dim=1)
    ]
    assert_near(torch.cat(pieces, dim=1), whole, 5e-6)
    assert cache.get_seq_length() == 70


@torch.no_grad()
@pytest.mark.parametrize(("case", "name"), [("llama", "fox"), ("pythia", "kerple_log")])
def test_generate_with_a_cache_is_generate_without_one(case, name):
    model, ids = changed(case, name), random_ids(30)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    options["no_repeat_ngram_size"] = 2  # else random models repeat one token
    for beams in (1, 3):
        expected = model.generate(ids, use_cache=False, num_beams=beams, **options)
        assert model.generate(ids, num_beams=beams, **options).tolist() == expected.tolist()
        assert len(set(expected[:, 30:].flatten().tolist())) > 5


@torch.no_grad()
@every_signature
def test_padding_before_a_text_changes_nothing_or_is_refused(name):
    model, text = changed("llama", name), random_ids(40, texts=1)
    alone = model(text).logits
    ids = torch.cat([random_ids(9, texts=1), text], dim=1)
    ids = torch.cat([ids, random_ids(49, texts=1)])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    encoding = model.base_model.encodings[0]
    try:
        encoding.check_documents(restart=True)
    except UserError:
        message = f"attention_mask, position_ids: {type(encoding).__name__} reads the row"
        with pytest.raises(UserError, match=message):
            model(ids, attention_mask=mask)
        return
    padded = model(ids, attention_mask=mask).logits
    assert_near(padded[:1, 9:], alone, 1e-5)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    cache = transformers.DynamicCache()
    first = model(ids[:, :45], attention_mask=mask[:, :45], past_key_values=cache)
    second = model(
        ids[:, 45:],
        attention_mask=mask,
        past_key_values=cache,
        position_ids=position_ids[:, 45:],
    )
    assert_near(torch.cat([first.logits, second.logits], 1)[:1, 9:], alone, 1e-5)


@torch.no_grad()
def test_texts_in_one_row_are_kept_apart_by_positions_and_padding_behind_is_free():
    for name in ("kerple_log", "sinusoidal", "fox", "ssmax"):
        model = changed("qwen2 windows", name)
        texts = [random_ids(length, texts=1) for length in (33, 50)]
        alone = torch.cat([model(text).logits for text in texts], dim=1)
        positions = torch.cat([torch.arange(33), torch.arange(50)])[None]
        row = torch.cat(texts, dim=1)
        assert_near(model(row, position_ids=positions, use_cache=False).logits, alone, 1e-5)
        mask = torch.ones_like(row)
        mask[:, 33:] = 0
        assert_near(model(row, attention_mask=mask).logits[:, :33], alone[:, :33], 1e-5)


@torch.no_grad()
def test_texts_of_several_lengths_are_refused_where_frequencies_depend_on_the_length():
    model = changed("llama", "rotary", scaling="dynamic", factor=4)
    ids = random_ids(330)  # trained with 320
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with pytest.raises(UserError, match="Dynamic reads the row, and not each text"):
        model(ids, attention_mask=mask)


# --- Files ---


@torch.no_grad()
@every_family
def test_a_saved_folder_opens_again_here_and_in_transformers(case, tmp_path):
    model, ids = changed(case, "sum", parts=["rotary", "fox"]), random_ids(90)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"call megatron\.interop\.use\(model\)"):
        again(ids)
    use(again)
    assert torch.equal(again(ids).logits, expected)
    ours, config = open_model(tmp_path)
    assert config.position.pos_emb == "sum"
    assert_near(ours(ids), expected)
    if case == "llama":
        imported = import_checkpoint(tmp_path, tmp_path / "run")
        assert imported.compared["largest_difference"] < 1e-5


@torch.no_grad()
def test_the_encoding_is_that_of_the_revision_or_folder_of_the_model(tmp_path):
    """One p for each: beside an older one in a hub's cache, and in a folder's folder."""
    hub = tmp_path / "models--me--model"
    (hub / "refs").mkdir(parents=True)
    model = changed("llama", "kerple_log")
    for p, revision in enumerate(("main", "old")):
        place = hub / "snapshots" / (40 * str(p))
        (hub / "refs" / revision).write_text(place.name)
        for folder, number in ((place, p), (place / "checkpoint-10", 10 + p)):
            model.model.encodings[0].p.fill_(number)
            model.save_pretrained(folder, max_shard_size="30KB")

    def loaded(**options):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            "me/model", cache_dir=tmp_path, local_files_only=True, **options
        )
        return use(model).model.encodings[0].p.unique().tolist()

    assert loaded() == [0]
    assert loaded(revision="old") == [1]
    assert loaded(subfolder="checkpoint-10", dtype=torch.bfloat16) == [10]


@torch.no_grad()
def test_no_attn_implementation_reads_a_saved_folder_without_its_encoding(tmp_path):
    model, ids = changed("llama", "kerple_log"), random_ids(60)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(UserError, match="use"):
        again(ids)
    assert torch.equal(use(use(again))(ids).logits, model(ids).logits)


# --- Training ---


class Texts(Dataset):
    """80 random texts of 48 tokens, each a walk, so that there is something to learn."""

    def __init__(self) -> None:
        steps = torch.randint(3, (80, 48), generator=torch.Generator().manual_seed(4))
        self.ids = steps.cumsum(1) % VOCAB

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[0] = -100  # no target: the Trainer counts it for some classes
        return {"input_ids": self.ids[index], "labels": labels}


@patch.dict(os.environ)  # accelerate sets a launcher's variables where a test opened a group
def train(model, folder) -> list[float]:
    """The losses of twenty steps with transformers' Trainer."""
    losses = []
    model.register_forward_hook(lambda *step: losses.append(step[2].loss.item()))
    settings = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        max_steps=20,
    )
    transformers.Trainer(model, settings, train_dataset=Texts()).train()
    return losses


def test_twenty_steps_of_their_trainer_are_those_of_a_loop_with_our_model(tmp_path):
    model = use(of_theirs("llama"), "kerple_log")
    ours = our_import(model)
    before = copy.deepcopy(model.base_model.encodings.state_dict())
    losses = train(model, tmp_path)
    assert len(losses) == 20

    optimizer = torch.optim.AdamW(ours.parameters(), lr=3e-3, weight_decay=0.0)
    expected = []
    for ids in Texts().ids.split(4):
        logits = ours.train()(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    for key, value in model.base_model.encodings.state_dict().items():
        moved = (value - before[key]).abs().max()
        assert moved > 0.01
        assert (value - ours.positions.state_dict()[key]).abs().max() < 0.03 * moved


def test_layers_that_are_computed_again_give_the_same_gradients():
    model, ids = changed("llama", "kerple_log"), random_ids(60)  # all layers read one table
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected = model(ids, attention_mask=mask, labels=labels)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    again = model(ids, attention_mask=mask, labels=labels)
    again.loss.backward()
    assert_near(again.logits[1], expected.logits[1])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_weight_decay_of_their_trainer_spares_what_an_encoding_learns(tmp_path):
    config = PositionsGPTConfig(architecture=vars(architecture()), encodings=[{"kerple_log": {}}])
    exported, changed_model = PositionsGPTForCausalLM(config), changed("llama", "kerple_log")
    arguments = transformers.TrainingArguments(
        tmp_path, weight_decay=0.1, report_to=[], use_cpu=True
    )
    for model, encodings, matrix in (
        (changed_model, changed_model.model.encodings, changed_model.lm_head.weight),
        (exported, exported.gpt.positions, exported.gpt.layers[0].mlp.dense_h_to_4h.weight),
    ):
        groups = transformers.Trainer(model, arguments).create_optimizer().param_groups
        decay = {id(x): group["weight_decay"] for group in groups for x in group["params"]}
        assert {decay[id(x)] for x in encodings.parameters()} == {0}
        assert decay[id(matrix)] == 0.1


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_compiled_model_computes_what_the_model_does(case):
    model, ids = changed(case, "kerple_log"), random_ids(60)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    again = compiled(ids, labels=ids)
    again.loss.backward()
    assert_near(again.logits, expected.logits)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@torch.no_grad()
def test_a_copy_of_a_model_has_an_encoding_of_its_own():
    model, ids = changed("llama", "kerple_log"), random_ids(60)
    expected = model(ids).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids).logits, expected)
    copied.model.encodings[0].p.add_(1.0)
    assert (copied(ids).logits - expected).abs().max() > 0.01
    assert torch.equal(model(ids).logits, expected)


def test_a_model_in_half_precision_keeps_its_encoding_in_float32():
    model, ids = changed("llama", "kerple_log"), random_ids(60)
    expected = model(ids).logits
    table = model.base_model.encodings[0].distance_bias(60)
    model.bfloat16()
    assert torch.equal(model.base_model.encodings[0].distance_bias(60), table)
    assert_near(model(ids).logits.float(), expected, 0.1)


def test_the_page_runs(tmp_path):
    of_theirs("llama").save_pretrained(tmp_path / "models/llama")
    (example,) = blocks("docs/in_transformers.md", "python")
    names = {"texts": Texts(), "ids": random_ids(20)}
    with chdir(tmp_path):
        exec(example, names)
    written = {"sum": {"parts": ["rotary", "kerple_log"]}}
    assert names["model"].config.megatron_positions == written
    assert names["model"].base_model.encodings[0].parts[1].p.grad is None  # read from the folder


# --- What is refused ---


def test_what_cannot_be_right_is_refused_by_name():
    ids = random_ids(30)
    with pytest.raises(UserError, match="use: BloomForCausalLM is not offered; give one of Llama"):
        use(of_theirs("bloom"), "alibi")
    with pytest.raises(UserError, match="no encoding is called 'kerpel'"):
        use(of_theirs("llama"), "kerpel")
    with pytest.raises(UserError, match="use: Sum counts by the ids of tokens"):
        use(of_theirs("llama"), "sum", parts=[{"abacus": {"digits": [3, 4]}}, "rotary"])
    with pytest.raises(UserError, match="num_key_value_heads: 2 is less than"):
        use(of_theirs("mistral"), "fope")
    with pytest.raises(UserError, match="use: the model was not loaded"):
        use(of_theirs("llama"))
    model = changed("llama", "kerple_log")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(UserError, match="past_key_values: StaticCache does not hold"):
        model(ids, past_key_values=cache)
    hole = torch.ones_like(ids)
    hole[0, 5] = 0
    with pytest.raises(ValueError, match="attention_mask: every text needs tokens"):
        model(ids, attention_mask=hole)
    with pytest.raises(UserError, match="position_ids: must count the tokens"):
        model(ids, position_ids=torch.arange(3, 33)[None])
    with pytest.raises(UserError, match=r"attention_dropout: 0\.1 is not offered"):
        use(of_theirs("gpt2").train(), "alibi")(ids)
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="attn_implementation: computes no encoding"):
        model(ids)


def test_a_folder_without_the_parameters_is_refused(tmp_path):
    changed("llama", "kerple_log").save_pretrained(tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text())
    keys["megatron_positions"] = {"fox": {}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does not hold the encoding that its config\.json names"):
        use(model)
    model.config.megatron_positions = ["fox", "alibi"]
    with pytest.raises(UserError, match=r"megatron_positions: .* is no encoding; write a name"):
        use(model)
