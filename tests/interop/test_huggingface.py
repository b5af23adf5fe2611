"""Folders of Hugging Face's classes give their logits and gradients, and go back bit for bit."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from evaluate import add_options
from evaluate import main as evaluate_main
from megatron.checkpoints.manifest import faults_of
from megatron.checkpoints.read import load_for_evaluation
from megatron.config import load
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from megatron.entry import run as run_entry
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.compare import compared
from megatron.interop.families import FAMILIES
from megatron.interop.huggingface import read_settings
from megatron.interop.import_checkpoint import brought_in, import_checkpoint
from megatron.interop.weights import read_weights, write_weights
from megatron.model import Architecture, Cache, from_config, padded_vocab
from tests.interop.theirs import (
    CASES,
    SAME_OTHERWISE,
    SCALED,
    VOCAB,
    edited,
    of_theirs,
    random_ids,
    words_tokenizer,
)
from tests.support import ROOT
from tools.import_checkpoint import main as import_main

every_case = pytest.mark.parametrize("case", CASES)


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
    "a class misspelt": ("llama", {"architectures": ["LlamaForCausalM"]}, "known are GPTNeoX"),
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
    "no factor": (
        "llama",
        {"rope_parameters": {"rope_type": "linear"}},
        "rope_parameters.factor: is missing, and rope_type linear needs it",
    ),
    "kinds of layers": (
        "mistral",
        {"layer_types": ["full_attention", "full_attention"]},
        "layer_types: not known for MistralForCausalLM",
    ),
    "windows of some layers": (
        "qwen2 window",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types: must name sliding_attention or full_attention for each of 2 layers",
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
    compared("huggingface", place, open_model(place)[0])
    (place / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read .* copy it again"):
        open_model(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights \(model\.safetensors, or"):
        open_model(place)
    torch.save({"model": open}, place / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"as plain weights \(.* code in it is never run\)"
    ) as fault:
        open_model(place)
    assert "weights_only" not in str(fault.value)
    (place / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match=r"index\.json: has no list of shards"):
        open_model(place)
    (place / "config.json").write_text('{"a": NaN}')
    with pytest.raises(UserError, match=r"config\.json: cannot be read \(it has NaN"):
        open_model(place)


def test_weights_of_whole_numbers_and_two_output_matrices_are_refused(folder, tmp_path):
    place = edited(folder("pythia"), tmp_path / "copy")
    weights = load_file(place / "model.safetensors")
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    save_file({**weights, name: weights[name].to(torch.int8)}, place / "model.safetensors")
    with pytest.raises(UserError, match=r"mlp\.dense_h_to_4h\.weight of torch\.int8"):
        open_model(place)
    head = weights["gpt_neox.embed_in.weight"].clone()
    both = {"embed_out.weight": head, "lm_head.weight": head + 1}
    save_file({**weights, **both}, place / "model.safetensors")
    with pytest.raises(UserError, match=r"embed_out\.weight, lm_head\.weight are two names of one"):
        open_model(place)


def test_what_published_files_say_besides_the_model_is_read_over(folder, tmp_path):
    keys = {"_num_labels": 1, "n_special": 0, "predict_special_tokens": True}
    old_gpt2 = edited(folder("gpt2"), tmp_path / "gpt2", **keys)
    assert open_model(old_gpt2)[1].hash == open_model(folder("gpt2"))[1].hash
    scaling = {"type": "yarn", "finetuned": True, **SCALED}
    yarn = edited(
        folder("llama yarn"), tmp_path / "yarn", rope_parameters=None, rope_scaling=scaling
    )
    assert open_model(yarn)[1].hash == open_model(folder("llama yarn"))[1].hash


def test_what_transformers_does_not_take_is_one_message(folder, tmp_path):
    model, _ = open_model(folder("llama"))
    place = edited(folder("llama"), tmp_path / "copy", eos_token_id="</s>")
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot open it \(.*'eos_token_id'"):
        compared("huggingface", place, model)
    flash = edited(folder("llama"), tmp_path / "flash", _attn_implementation="flash_attention_2")
    assert compared("huggingface", flash, model)["largest_difference"] < 2e-5
    weights = load_file(place / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, flash / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight has values that are not finite"):
        import_checkpoint(flash, tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


def test_a_tokenizer_with_an_end_of_its_own_is_copied_with_what_names_it(folder, tmp_path):
    source = edited(folder("llama"), tmp_path / "source")
    file = words_tokenizer(source / "tokenizer.json", "world")
    file.write_text(file.read_text().replace("<|endoftext|>", "</s>"))
    assert "has no tokenizer that is used" in import_checkpoint(source, tmp_path / "a").notes[-1]
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    data = import_checkpoint(source, tmp_path / "b").config.data
    assert build_tokenizer(data.tokenizer_type, data.vocab_file).eod == 0


@torch.no_grad()
def test_an_import_is_an_ordinary_checkpoint_with_its_origin(folder, tmp_path, capsys):
    source, run = edited(folder("qwen3"), tmp_path / "source"), tmp_path / "run"
    words_tokenizer(source / "tokenizer.json", "world")
    assert import_main([str(source), "-o", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "Qwen3ForCausalLM (the largest is" in printed
    assert f"written to {run}/global_step0" in printed
    model, config, record = load_for_evaluation(run)
    expected = transformers.Qwen3ForCausalLM.from_pretrained(source)(random_ids(50)).logits
    torch.testing.assert_close(model(random_ids(50)), expected, rtol=0, atol=2e-5)
    origin = record["origin"]
    assert (origin["kind"], origin["architecture"]) == ("huggingface", "Qwen3ForCausalLM")
    weights = (source / "model.safetensors").read_bytes()
    assert origin["files"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert 0 < origin["compared"]["largest_difference"] < 2e-5
    assert record["tokenizer"]["vocab_size"] == 3
    assert record["vocab"] == VOCAB == padded_vocab(3, config.model.make_vocab_size_divisible_by)
    assert config.data.vocab_file == str(run / "tokenizer" / "tokenizer.json")
    assert build_tokenizer(config.data.tokenizer_type, config.data.vocab_file).eod == 0
    assert faults_of(run / "global_step0") == []

    again = import_checkpoint(run, tmp_path / "again")
    assert again.config.hash == config.hash
    assert torch.equal(open_model(tmp_path / "again")[0](random_ids(50)), model(random_ids(50)))


def test_an_import_that_cannot_be_right_writes_nothing(folder, tmp_path):
    source, run = edited(folder("llama"), tmp_path / "source"), tmp_path / "run"
    words_tokenizer(source / "tokenizer.json", "world")
    many = words_tokenizer(tmp_path / "many.json", *(f"word{number}" for number in range(80)))
    with pytest.raises(UserError, match=r"it has 82 tokens, the embedding of .* has 61 rows"):
        import_checkpoint(source, run, tokenizer=many)
    other = words_tokenizer(tmp_path / "other.json", "earth")
    with pytest.raises(UserError, match=r"was trained with [0-9a-f]{12} - give that one, or leave"):
        import_checkpoint(source, run, tokenizer=other)
    with pytest.raises(UserError, match=r"--tokenizer: .* holds none - give tokenizer\.json"):
        import_checkpoint(source, run, tokenizer=tmp_path / "absent")
    assert not run.exists()
    import_checkpoint(source, run)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with pytest.raises(UserError, match="holds a checkpoint already - name another folder"):
        import_checkpoint(source, run)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_another_model_than_that_of_the_other_side_is_not_imported(folder, tmp_path):
    model, _ = open_model(folder("llama"))
    with torch.no_grad():
        model.layers[1].mlp.dense_4h_to_h.weight[0, 0] += 0.5
    with pytest.raises(UserError, match=r"our logits differ from those of transformers .* by"):
        compared("huggingface", folder("llama"), model)


def test_a_foreign_folder_is_evaluated_by_its_own_name(folder, tmp_path, monkeypatch, capsys):
    write_text_of_tokens(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    words = ["--checkpoint", str(folder("mistral")), "--lengths", "32", "64"]
    words += [f"data_path={tmp_path}/text", "eval_tokens=128", "split=5,4,1"]
    for _ in range(2):
        assert evaluated(*words) == 0, capsys.readouterr().err
    (run,) = (tmp_path / "runs" / "imported").iterdir()
    assert run.name.startswith("model-")
    (file,) = (run / "evaluation").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["length"] for row in rows} == {32, 64}
    assert rows[0]["checkpoint"] == str(Path("runs/imported") / run.name / "global_step0")
    config = open_model(run)[1]
    assert config.checkpoint.save == str(Path("runs/imported") / run.name)


def test_what_is_no_checkpoint_of_any_kind_keeps_its_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert brought_in("runs/absent") == Path("runs/absent")
    assert brought_in("runs") == Path("runs")


def test_the_commands_of_the_document_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for case, name in (("pythia", "pythia-70m"), ("qwen3", "qwen3")):
        place = edited(folder(case), tmp_path / "models" / name)
        words_tokenizer(place / "tokenizer.json", "world")
    write_text_of_tokens(tmp_path / "data" / "text")
    text = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("python ")]
    assert len(lines) == 4
    for line in lines:
        _, script, *words = line.split()
        if script == "evaluate.py":
            assert evaluated(*words, "eval_tokens=128", "split=5,4,1") == 0, line
        else:
            assert import_main(words) == 0, line
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == [
        "imported",
        "pythia",
        "qwen3",
    ]


def write_text_of_tokens(prefix: Path) -> None:
    prefix.parent.mkdir(exist_ok=True)
    draw = np.random.default_rng(3)
    with TokenWriter(prefix, np.uint16, meta={"corpus": "noise"}) as writer:
        for _ in range(40):
            writer.add(draw.integers(0, VOCAB, 40))


def evaluated(*words: str) -> int:
    """The exit status of evaluate.py."""
    with pytest.raises(SystemExit) as ended:
        run_entry(
            evaluate_main,
            purpose="evaluate",
            options=add_options,
            config_needed=False,
            argv=words,
        )
    return ended.value.code
