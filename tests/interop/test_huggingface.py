"""Folders of Hugging Face's classes give their logits and gradients, and go back bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.config import load
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.families import FAMILIES
from megatron.interop.huggingface import read_settings
from megatron.interop.weights import read_weights, write_weights
from megatron.model import Architecture, Cache, from_config, padded_vocab

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 320,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT_2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320}
BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
YARN = {"beta_fast": 16.0, "truncate": False, "attention_factor": 1.2}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, **more}}


CASES = {
    "pythia": ("GPTNeoX", SIZES),
    "neox one after the other": ("GPTNeoX", {**SIZES, "use_parallel_residual": False}),
    "neox tied, gelu_new": (
        "GPTNeoX",
        {**SIZES, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "neox without bias": ("GPTNeoX", {**SIZES, "attention_bias": False, "layer_norm_eps": 1e-2}),
    "gpt2": ("GPT2", GPT_2),
    "gpt2 wide": ("GPT2", {**GPT_2, "n_inner": 80, "layer_norm_epsilon": 1e-2}),
    "llama": ("Llama", SIZES),
    "llama grouped, biases": ("Llama", {**GROUPED, **BIASES}),
    "llama tied, linear": (
        "Llama",
        {**GROUPED, "tie_word_embeddings": True, **rope("linear", factor=4.0)},
    ),
    "llama3": ("Llama", {**GROUPED, **rope("llama3", **SCALED, **LLAMA_3)}),
    "llama yarn": ("Llama", {**GROUPED, **rope("yarn", **SCALED)}),
    "llama yarn, more": ("Llama", {**SIZES, **rope("yarn", **SCALED, **YARN)}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 23, "rms_norm_eps": 1e-2}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2 window": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 23, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    "qwen3 one key head": ("Qwen3", {**SIZES, "num_key_value_heads": 1, "head_dim": 24}),
}
SAME_OTHERWISE = ("n_inner", "hidden_act", "rope_parameters", "pretraining_tp", "max_window_layers")
"""Keys that may be spelled in more than one way; `settings_of` must read them alike."""
HEAD = {"GPT2": "LMHeadModel"}
every_case = pytest.mark.parametrize("case", CASES)


def of_theirs(case: str) -> transformers.PreTrainedModel:
    """One of their models with random weights, far from values at which a slip is hidden."""
    name, settings = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        **settings, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(3)
    model = getattr(transformers, name + HEAD.get(name, "ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.12))
    return model.eval()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder that `save_pretrained` wrote for a case, each written once."""
    made: dict[str, Path] = {}

    def folder_of(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("hf") / "model"
            of_theirs(case).save_pretrained(made[case])
        return made[case]

    return folder_of


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


@every_case
@pytest.mark.parametrize("length", [7, 64, 300])
def test_logits_and_gradients_are_those_of_hugging_face(case, length, folder):
    theirs, (ours, config) = of_theirs(case), open_model(folder(case))
    ids = random_ids(length)
    expected = theirs(ids).logits
    logits = ours(ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * direction).sum().backward()
    (logits * direction).sum().backward()
    family = FAMILIES[type(theirs).__name__]
    gradients = {name: one.grad for name, one in theirs.named_parameters()}
    gradients = {name.replace("lm_head", family.head[0]): one for name, one in gradients.items()}
    expected_gradients = read_weights(
        family, gradients, ours.state_dict(), Architecture.of(config.model)
    )
    for name, parameter in ours.named_parameters():
        size = expected_gradients[name].abs().max()
        difference = (parameter.grad - expected_gradients[name]).abs().max()
        assert difference <= 1e-4 * size, name


@every_case
def test_ours_goes_back_bit_for_bit(case, folder):
    family, config, vocab = read_settings(folder(case))
    model, _ = open_model(folder(case))
    back = write_weights(family, model.state_dict(), Architecture.of(config.model))
    there = load_file(folder(case) / "model.safetensors")
    assert back.keys() == there.keys()
    assert all(torch.equal(back[name], there[name]) for name in there)
    assert vocab == VOCAB == padded_vocab(VOCAB, config.model.make_vocab_size_divisible_by)
    name = CASES[case][0]
    described = getattr(transformers, f"{name}Config")(**family.config_of(config, vocab))
    original = getattr(transformers, f"{name}Config").from_pretrained(folder(case))
    free = {"bos_token_id", "eos_token_id", "dtype", "_name_or_path", *SAME_OTHERWISE}
    written = described.to_dict()
    for key, value in original.to_dict().items():
        assert key in free or written[key] == value, key
    again = family.settings_of(written)
    assert again == family.settings_of(original.to_dict())


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3", "mistral", "llama3"])
def test_decoding_in_pieces_is_the_whole_pass(case, folder):
    model, _ = open_model(folder(case))
    ids, cache = random_ids(90), Cache()
    pieces = [model(part, cache=cache) for part in ids.split([3, 1, 70, 16], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), rtol=0, atol=2e-5)


def edited(source: Path, place: Path, **changes) -> Path:
    """A copy of a folder with other keys in its config.json; None leaves a key out."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("pythia", {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("llama3", {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": "theirs"}),
    ],
)
@torch.no_grad()
def test_the_old_spelling_of_the_rotation_is_the_same_model(case, changes, folder, tmp_path):
    if "rope_scaling" in changes:
        scaling = {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "type": "llama3"}
        changes = {**changes, "rope_scaling": scaling}
    old, _ = open_model(edited(folder(case), tmp_path / "old", **changes))
    assert torch.equal(old(random_ids(300)), open_model(folder(case))[0](random_ids(300)))


@torch.no_grad()
def test_shards_pickles_half_precision_and_names_of_the_bare_model_are_read(folder, tmp_path):
    expected = open_model(folder("gpt2"))[0](random_ids(20))
    sharded = tmp_path / "sharded"
    transformers.GPT2LMHeadModel.from_pretrained(folder("gpt2")).save_pretrained(
        sharded, max_shard_size="20KB"
    )
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert torch.equal(open_model(sharded)[0](random_ids(20)), expected)

    bare = edited(folder("gpt2"), tmp_path / "bare")
    weights = load_file(bare / "model.safetensors")
    (bare / "model.safetensors").unlink()
    old = {name.removeprefix("transformer."): one for name, one in weights.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 320, 320)
    old["lm_head.weight"] = old["wte.weight"]
    torch.save(old, bare / "pytorch_model.bin")
    assert torch.equal(open_model(bare)[0](random_ids(20)), expected)

    half = edited(folder("gpt2"), tmp_path / "half")
    save_file({name: one.half() for name, one in weights.items()}, half / "model.safetensors")
    model, _ = open_model(half)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(random_ids(20)), expected, rtol=0, atol=0.05)
    next(sharded.glob("model-*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"model-0.*missing, which model\.safetensors\.index\.json"):
        open_model(sharded)


REFUSED = {
    "another class": ("llama", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not"),
    "a class misspelt": ("llama", {"architectures": ["LlamaForCausalM"]}, "did you mean Llama"),
    "no class": ("llama", {"architectures": None}, "does not name one class; known are GPTNeoX"),
    "missing": ("llama", {"num_hidden_layers": None}, "num_hidden_layers: is missing"),
    "softcap": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: not known"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: not known"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not offered; open"),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type: 'dynamic' is not offered; open a model with one of default, linear, llama3",
    ),
    "partial": (
        "llama",
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
        "partial_rotary_factor: 0.5 is not what LlamaForCausalLM computes",
    ),
    "rope key": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}},
        r"rope_parameters.mrope_section: \[1\] is not offered",
    ),
    "windows of some layers": (
        "qwen2 window",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_window: 23 acts on 1 of 2 layers",
    ),
    "scores by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx: True changes what the model computes",
    ),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: True changes"),
    "kind": ("llama", {"num_attention_heads": "four"}, "config.json: "),
    "rows": ("llama", {"vocab_size": 64}, r"embed_tokens.weight \[61, 32\], not \[64, 32\]"),
    "no rows": ("llama", {"vocab_size": -3}, "vocab_size: -3 is no number of tokens"),
    "layers": ("llama", {"num_hidden_layers": 1}, r"model.layers.1.* left over"),
    "tied": ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
    "bias": ("llama", {"mlp_bias": True}, r"mlp.gate_proj.bias, .*up_proj.bias missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_one_message(name, folder, tmp_path):
    case, changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        open_model(edited(folder(case), tmp_path / "copy", **changes))


def test_damaged_and_missing_files_are_one_message_and_code_is_not_run(folder, tmp_path, caplog):
    place = edited(folder("llama"), tmp_path / "copy", auto_map={"AutoModelForCausalLM": "m.M"})
    (place / "m.py").write_text("raise SystemExit('it ran')")
    assert open_model(place)[0].vocab == VOCAB
    assert "names code of its own, which is not run" in caplog.text
    (place / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read .* copy it again"):
        open_model(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights \(model\.safetensors, or"):
        open_model(place)
    torch.save({"model": open}, place / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot be read as plain weights"):
        open_model(place)
    (place / "config.json").write_text('{"a": NaN}')
    with pytest.raises(UserError, match=r"config\.json: cannot be read \(it has NaN"):
        open_model(place)


def test_sources_that_are_nothing_are_one_message(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no checkpoint that is known here"):
        open_model(tmp_path)
    with pytest.raises(UserError, match="is no folder - give a checkpoint, or a hub's owner/model"):
        open_model(tmp_path / "absent")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError) as fault:
        open_model("EleutherAI/pythia-of-no-size")
    assert "127.0.0.1 cannot be reached" in str(fault.value)
    assert "--local-dir pythia-of-no-size`; copy that folder here" in str(fault.value)


def test_a_model_of_another_kind_says_why_it_is_none_of_theirs():
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    alibi = load([], [*shape, "pos_emb=alibi"])
    with pytest.raises(UserError, match="GPTNeoXForCausalLM is another model: pos_emb: alibi"):
        FAMILIES["GPTNeoXForCausalLM"].config_of(alibi, VOCAB)
    plain = load([], shape)
    with pytest.raises(UserError, match="activation: gelu") as fault:
        FAMILIES["LlamaForCausalLM"].config_of(plain, VOCAB)
    assert "LlamaForCausalLM is another model" in str(fault.value)
    grouped = load([], [*shape, "num_key_value_heads=2"])
    with pytest.raises(UserError, match="another model: num_key_value_heads: 2"):
        FAMILIES["GPTNeoXForCausalLM"].config_of(grouped, VOCAB)
    config = FAMILIES["GPTNeoXForCausalLM"].config_of(plain, VOCAB)
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**config)).eval()
    ours = from_config(plain, VOCAB).eval()
    family = FAMILIES["GPTNeoXForCausalLM"]
    weights = write_weights(family, ours.state_dict(), Architecture.of(plain.model))
    named = {name.replace("embed_out", "lm_head"): one for name, one in weights.items()}
    theirs.load_state_dict(named)
    ids = random_ids(64)
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)
