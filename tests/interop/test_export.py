"""Exported folders give our logits in transformers, generate beyond the training length, return."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GPT2TokenizerFast,
)

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from megatron.interop import export as exporting
from megatron.interop import open_model
from megatron.interop.export import export
from megatron.interop.import_checkpoint import description, import_checkpoint
from megatron.positions import FILES, REGISTRY
from megatron.results.files import write_results
from tests.encodings import every_signature
from tests.interop import exports
from tests.interop.exports import BUMP, OWN, TRAINED, a_run, exported, greedy, random_ids
from tests.results.rows import rows
from tests.support import ROOT, call, modules

pytestmark = pytest.mark.usefixtures("own_modules")


def opened(folder, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **more)
    assert not model.training
    return model


def check_round_trip(folder, model):
    back, config = open_model(folder)
    assert config.model.num_layers == len(model.layers)
    state, expected = back.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(back(random_ids(70)), model(random_ids(70)))


@torch.no_grad()
@every_signature
def test_every_encoding_is_the_same_model_in_transformers(name, tmp_path):
    # No class of transformers has these together, so every encoding takes our own.
    own = ["norm=rmsnorm", "use_bias_in_mlp=false"]
    if REGISTRY[name].grouped_queries:
        own.append("num_key_value_heads=2")
    folder, model = exported(tmp_path, *own, f"pos_emb={name}", exports.arguments(name))
    theirs = opened(folder)
    for length in (TRAINED, 300):
        ids = random_ids(length, texts=2)
        expected = model(ids)
        assert expected.std() > 0.3
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
    prompt = random_ids(TRAINED - 4)
    continued = theirs.generate(prompt, do_sample=False, max_new_tokens=24, eos_token_id=None)
    assert continued[0, TRAINED - 4 :].tolist() == greedy(model, prompt, 24)
    check_round_trip(folder, model)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        ["pos_emb=kerple_log", "pos_emb_shared=false", "activation=swiglu", "head_dim=6"],
        ["pos_emb=mep_param", "parallel_residual=true", "qk_norm=true", "no_weight_tying=false"],
        ["pos_emb=alibi", "use_bias_in_norms=false", "use_bias_in_attn_linear=false"],
        ["pos_emb=t5", "use_bias_in_attn_output=false", "activation=gelu_new"],
        ["pos_emb=rotary", "num_key_value_heads=1", "window=train_length"],
        ["pos_emb=rotary", "pos_emb_args={scaling: yarn, factor: 4, interleaved: true}"],
        ["pos_emb=xpos", "blockwise=true"],
        ["pos_emb=none", "logn_scale=true", "norm=rmsnorm"],
        ["pos_emb=kerple_log", "paper_precision=true"],
        ["pos_emb_layers=[kerple_log, {rotary: {base: 500}}]", "window_layers=[20, null]"],
        ["num_layers=3", "pos_emb_layers=[rotary, rotary, none]", "pos_emb_shared=false"],
        ["pos_emb=alibi", "window_layers=[null, train_length]"],
    ],
)
def test_every_key_of_model_and_attention_is_kept(settings, tmp_path):
    folder, model = exported(tmp_path, *settings)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "positions_gpt"
    ids = random_ids(300, texts=2)
    torch.testing.assert_close(opened(folder)(ids).logits, model(ids), rtol=0, atol=1e-5)
    back, _ = open_model(folder)
    assert torch.equal(back(ids), model(ids))
    prompt = random_ids(TRAINED)
    continued = opened(folder).generate(prompt, max_new_tokens=20, eos_token_id=None)
    assert continued[0, TRAINED:].tolist() == greedy(model, prompt, 20)


OF_LLAMA = ["norm=rmsnorm", "activation=swiglu", "use_bias_in_mlp=false"]
NO_BIAS = ["use_bias_in_attn_linear=false"]
STANDARD = {
    "GPTNeoXForCausalLM": ["parallel_residual=true", "pos_emb_args={rotary_pct: 0.25}"],
    "GPT2LMHeadModel": ["pos_emb=learned", "activation=gelu_new", "no_weight_tying=false"],
    "LlamaForCausalLM": [*OF_LLAMA, *NO_BIAS, "num_key_value_heads=2"],
    "MistralForCausalLM": [*OF_LLAMA, *NO_BIAS, "window=23"],
    "Qwen2ForCausalLM": [*OF_LLAMA, "use_bias_in_attn_output=false"],
    "Qwen3ForCausalLM": [*OF_LLAMA, *NO_BIAS, "qk_norm=true", "window_layers=[null, 23]"],
    "SmolLM3ForCausalLM": [
        *(*OF_LLAMA, *NO_BIAS, "num_layers=4", "window_layers=[23, 23, null, 23]"),
        "pos_emb_layers=[{rotary: {base: 500}}, none]",
    ],
}


@torch.no_grad()
@pytest.mark.parametrize("name", STANDARD)
def test_a_model_that_is_one_of_transformers_becomes_it(name, tmp_path):
    path, model = a_run(tmp_path, *STANDARD[name])
    done = export(path, tmp_path / "out")
    assert done.architecture == name
    assert max(done.differences.values()) <= 1e-5
    assert not list((tmp_path / "out").glob("*.py")), "no code comes with it"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == name
    for length in (TRAINED, 300):
        ids = random_ids(length, texts=2)
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=0, atol=1e-5)
    check_round_trip(tmp_path / "out", model)


@torch.no_grad()
def test_a_users_own_encoding_goes_along_and_is_not_run_unasked(bump, tmp_path):
    folder, model = exported(tmp_path, "pos_emb=exported_bump", f"pos_emb_file={bump}")
    ids = random_ids(300)
    torch.testing.assert_close(opened(folder)(ids).logits, model(ids), rtol=0, atol=1e-5)
    check_round_trip(folder, model)
    assert (folder / "pos_emb_file.py").read_text() == BUMP
    FILES.clear()
    with pytest.raises(UserError, match=r"is not run unasked: read it, then write pos_emb_file="):
        open_model(folder)


def test_the_command_takes_a_users_file_that_needs_no_other_files(bump, tmp_path, monkeypatch):
    path, _ = a_run(tmp_path, "pos_emb=exported_bump", f"pos_emb_file={bump}")
    exports.forget("exported_bump")
    words = ["tools/export_checkpoint.py", path, "--to", "hf", "-o", tmp_path / "out"]
    assert "(to a tool --from " in call(*words).stderr
    assert call(*words, "--from", bump).returncode == 0
    assert (tmp_path / "out" / "pos_emb_file.py").read_text() == BUMP

    monkeypatch.chdir(tmp_path)
    for back in (
        ["tools/import_checkpoint.py", "out", "--from", bump, "-o", "again"],
        ["evaluate.py", "--checkpoint", "out", f"pos_emb_file={bump}"],
    ):
        exports.forget("exported_bump")
        assert "is not run unasked" not in call(*back).stderr
    assert len(list(tmp_path.glob("runs/imported/*/global_step5"))) == 1
    assert (tmp_path / "again" / "global_step5").is_dir()

    reads_another = f"{BUMP}\nopen(__file__.rpartition('/')[0] + '/bump.py').close()\n"
    bump.write_text(reads_another.replace("exported_bump", "reading_bump"))
    other = bump.rename(tmp_path / "again" / "bump.py")
    path, _ = a_run(tmp_path / "again", "pos_emb=reading_bump", f"pos_emb_file={other}")
    with pytest.raises(UserError, match=r"transformers cannot load it .* must not need other file"):
        export(path, tmp_path / "other" / "out")


@torch.no_grad()
@pytest.mark.parametrize("name", ["mep_free", "learned", "fire", "fox"])
def test_texts_of_a_padded_batch_are_those_alone(name, tmp_path):
    folder, _ = exported(tmp_path, "window=20", f"pos_emb={name}", "logn_scale=true")
    model = opened(folder)
    lengths = (70, 41, 1)
    texts = [random_ids(length)[0] for length in lengths]
    ids = torch.zeros(3, 70, dtype=torch.int64)
    mask = torch.zeros(3, 70, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, 70 - len(text) :] = text
        mask[row, 70 - len(text) :] = 1
    logits = model(ids, attention_mask=mask).logits
    for row, text in enumerate(texts):
        expected = model(text[None]).logits[0]
        torch.testing.assert_close(logits[row, 70 - len(text) :], expected, rtol=0, atol=1e-5)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    continued = model.generate(ids, attention_mask=mask, **options)
    for row, text in enumerate(texts):
        whole = torch.ones(1, len(text), dtype=torch.int64)
        alone = model.generate(text[None], attention_mask=whole, **options)[0, len(text) :]
        assert continued[row, 70:].tolist() == alone.tolist()
    right = model(ids.flip(1), attention_mask=mask.flip(1)).logits
    alone = model(ids.flip(1)[1:2, :41]).logits[0]
    torch.testing.assert_close(right[1, :41], alone, rtol=0, atol=1e-5)


def test_loss_and_gradients_are_ours_with_and_without_recomputation(tmp_path):
    folder, model = exported(tmp_path, *OWN, "pos_emb=kerple_log", "pos_emb_shared=false")
    ids = random_ids(90)
    loss = model(ids[:, :-1], ids[:, 1:], mean=True)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for recompute in (False, True):
        theirs = opened(folder).train()
        if recompute:
            theirs.activation_checkpointing_enable()
        out = theirs(ids, labels=ids, use_cache=False)
        torch.testing.assert_close(out.loss, loss, rtol=0, atol=1e-5)
        out.loss.backward()
        for name, parameter in theirs.named_parameters():
            ours = expected[name.removeprefix("gpt.")]
            torch.testing.assert_close(parameter.grad, ours, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_half_precision_keeps_the_encoding_in_float32(tmp_path):
    path, model = a_run(tmp_path, "pos_emb=kerple_log")
    done = export(path, tmp_path / "out", dtype="bf16")
    assert max(done.differences.values()) <= 1e-5, "compared with the rounded model"
    assert 1e-3 < done.rounding < 1
    weights = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {name.startswith("gpt.positions."): tensor.dtype for name, tensor in weights.items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    theirs = opened(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    for parameter in [*theirs.gpt.positions.parameters(), *theirs.gpt.positions.buffers()]:
        assert parameter.dtype == torch.float32
    ids = random_ids(300)
    assert torch.equal(theirs(ids).logits, model.bfloat16()(ids))
    back, _ = open_model(tmp_path / "out")
    assert torch.equal(back.output_matrix.bfloat16(), theirs.gpt.final_linear.weight)


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SHARD", "20KB")
    for number, settings in enumerate([["pos_emb=t5"], STANDARD["LlamaForCausalLM"]]):
        folder, model = exported(tmp_path / str(number), *settings)
        assert len(list(folder.glob("model-*.safetensors"))) > 1
        check_round_trip(folder, model)


@torch.no_grad()
def test_what_transformers_saves_again_is_the_same_model(tmp_path):
    folder, model = exported(tmp_path, *OWN, "pos_emb=mep_param", "no_weight_tying=false")
    opened(folder).save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    ids = random_ids(300)
    torch.testing.assert_close(opened(tmp_path / "again")(ids).logits, model(ids), rtol=0, atol=0)
    check_round_trip(tmp_path / "again", model)
    built = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    assert built.gpt.final_linear is None
    assert built(ids).logits.isfinite().all()


TEXTS = ["def f(x):\n    return  x + 1\n", "Größe 你好 🙂", "  two\tspaces ", "<|end|> 's 12345"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Settings of a run with each kind of tokenizer: {tokenizer_type: [key=value]}."""
    folder = tmp_path_factory.mktemp("tokenizers")
    whole = train_tokenizer(modules()[:20], 400)
    content = json.loads(whole)
    # A tokenizer.json may add a token to each text; ours does not.
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    model = content["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    files = [f"vocab_file={folder}/vocab.json", f"merge_file={folder}/merges.txt"]
    return {"HFTokenizer": [f"vocab_file={folder}"], "GPT2BPETokenizer": files}


@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer"])
@pytest.mark.parametrize("architecture", ["PositionsGPTForCausalLM", "GPT2LMHeadModel"])
def test_the_tokenizer_gives_the_same_ids(kind, architecture, tokenizers, tmp_path):
    files = [setting.split("=")[1] for setting in tokenizers[kind]]
    built = build_tokenizer(kind, *files)
    form = STANDARD.get(architecture, ["pos_emb=alibi"])
    settings = [*form, f"tokenizer_type={kind}", *tokenizers[kind]]
    path, _ = a_run(tmp_path, *settings, tokenizer=description(built))
    done = export(path, tmp_path / "out")
    assert (done.architecture, done.notes) == (architecture, ())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for text in [*TEXTS, modules()[3]]:
        ids = built.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == built.eod
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == built.eod


def test_the_command_writes_a_card_with_the_evaluation(tmp_path):
    old = {"path": str(tmp_path / "old"), "step": 7, "config_hash": "aa11", "weights": "bb22"}
    words = {"parent": old, "parent_model": "rotary step 7"}
    path, _ = a_run(tmp_path, "pos_emb=mep_free", **words)
    step = path / "global_step5"
    record = json.loads((step / "checkpoint.json").read_text())
    measured = rows("mep_free", {64: 12.5, 128: 12.25}, step=5, config_hash=record["config_hash"])
    other = rows("mep_free", {64: 99.5}, step=4, config_hash=record["config_hash"])
    write_results(path / "evaluation" / "equal_tokens.jsonl", measured + other)
    out = tmp_path / "card | model"
    more = rows("mep_free", {256: 12.75}, step=5, config_hash=record["config_hash"])
    write_results(tmp_path / "more.jsonl", more)
    words = [path, "--to", "hf", "-o", out, "--dtype", "fp16", "--results", tmp_path / "more.jsonl"]
    done = call("tools/export_checkpoint.py", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{out}: PositionsGPTForCausalLM, step 5"
    assert "logits at 128 tokens: within " in done.stdout
    assert "fp16 itself changes logits by up to " in done.stdout
    assert "No tokenizer: CharLevelTokenizer has none in transformers" in done.stdout
    card = (out / "README.md").read_text()
    for line in (
        "license: unknown",
        f"| config hash | {record['config_hash']} |",
        "| step | 5 |",
        "| dtype of the matrices | fp16 |",
        "| parent | rotary step 7, config aa11, weights bb22 |",
        "No tokenizer: CharLevelTokenizer has none in transformers. Ids are bytes of UTF-8.",
        "Perplexity by length of the text (stdlib, protocol equal_tokens). \\* is the training"
        " length.",
        "| mep_free | 12.50 | 12.25 | 12.75 |",
    ):
        assert line in card.splitlines(), line
    assert "99.5" not in card
    settings = (out / "config.json").read_text()
    assert str(tmp_path) not in settings + card, "no path of this machine is published"


def test_the_model_refuses_what_it_would_compute_wrongly(tmp_path):
    folder, _ = exported(tmp_path, "pos_emb=alibi")
    model = opened(folder)
    ids = random_ids(6, texts=2)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    for given, message in (
        ({"attention_mask": mask[:, :4]}, r"attention_mask: \[2, 4\] must be \[2, 6\]"),
        ({"attention_mask": mask.roll(2, 1)}, "every text needs tokens, and none of padding amo"),
        ({"position_ids": mask}, "position_ids: is not offered by this model; leave it out"),
        ({"output_attentions": True}, "output_attentions: is not offered"),
        ({"past_key_values": DynamicCache()}, "DynamicCache does not hold what this model keeps"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **given)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="tokens that were read cannot be taken back"):
        cache.crop(3)


@torch.no_grad()
def test_outputs_are_those_of_other_models(tmp_path):
    folder, model = exported(tmp_path, "pos_emb=sinusoidal")
    theirs = opened(folder)
    ids = random_ids(9)
    whole = theirs(ids).logits
    assert torch.equal(whole, model(ids))
    torch.testing.assert_close(theirs(ids, logits_to_keep=2).logits, whole[:, -2:])
    logits, cache = theirs(ids, return_dict=False)
    assert torch.equal(logits, whole)
    assert cache.get_seq_length() == 9
    assert theirs(ids, use_cache=False).past_key_values is None
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    beams = theirs.generate(random_ids(5, texts=2), **options)
    assert (
        beams.tolist()
        == theirs.generate(random_ids(5, texts=2), **options, use_cache=False).tolist()
    )


def test_no_tokenizer_is_made_as_transformers_5_makes_an_empty_one(tokenizers):
    vocab, merges = (setting.split("=")[1] for setting in tokenizers["GPT2BPETokenizer"])
    # These keywords, which older guides use, are ignored without a word.
    empty = GPT2TokenizerFast(vocab_file=vocab, merges_file=merges)
    assert (len(empty), empty("the cat").input_ids) == (1, [])
    whole = GPT2TokenizerFast(vocab, merges)
    ours = build_tokenizer("GPT2BPETokenizer", vocab, merges)
    assert ours.vocab_size == len(whole) == 400
    assert ours.encode(modules()[4]) == whole(modules()[4]).input_ids


def test_logits_that_differ_leave_nothing(tmp_path, monkeypatch):
    path, _ = a_run(tmp_path, "pos_emb=alibi")
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    message = "PositionsGPTForCausalLM: its logits differ by 0.0e.00 from ours at 64 tokens"
    with pytest.raises(UserError, match=message):
        export(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
def test_an_exported_model_is_imported_again(end, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(train_tokenizer(modules()[:20], 400).replace("<|endoftext|>", end))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    built = build_tokenizer("HFTokenizer", file)
    settings = ["pos_emb=mep_free", "tokenizer_type=HFTokenizer", f"vocab_file={file}"]
    path, model = a_run(tmp_path, *settings, tokenizer=description(built), vocab=400)
    export(path, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert theirs("a", return_tensors="pt").keys() == {"input_ids", "attention_mask"}
    assert (len(theirs), theirs.eos_token, theirs.eos_token_id) == (400, end, built.eod)
    imported = import_checkpoint(tmp_path / "out", tmp_path / "again")
    record = json.loads((imported.path / "checkpoint.json").read_text())
    assert (record["step"], record["origin"]["kind"]) == (5, "exported")
    assert record["tokenizer"] == description(built), "data of the training still fit"
    check_round_trip(imported.path, model)


def test_the_commands_of_the_guide_run(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "exporting.md").read_text(encoding="utf-8")
    blocks = {
        language: "".join(re.findall(rf"```{language}\n(.*?)```", guide, flags=re.DOTALL))
        for language in ("bash", "python")
    }
    a_run(tmp_path / "runs", "pos_emb=mep_free")
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "mep")
    monkeypatch.chdir(tmp_path)
    commands = blocks["bash"].splitlines()
    assert len(commands) == 2
    for command in commands:
        done = call(*command.split()[1:])
        assert done.returncode == 0, done.stderr
    names = {"ids": random_ids(TRAINED)}
    exec(blocks["python"], names)
    assert names["continued"].shape[1] > TRAINED
