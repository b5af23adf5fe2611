"""Exported folders give our logits in transformers, and generate beyond the training length."""

import ast
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaTokenizer,
)

from megatron.checkpoints.read import load_for_evaluation
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from megatron.interop import export as exporting
from megatron.interop import open_model
from megatron.interop.export import export
from megatron.interop.export_code import sources
from megatron.interop.importing import (
    TokenizerSource,
    description,
    facts_of_texts,
    import_checkpoint,
    import_if_foreign,
)
from megatron.positions import FILES, REGISTRY
from megatron.results.files import write_results
from tests.encodings import every_hook
from tests.interop.models import (
    BUMP,
    CASES,
    TRAINED,
    VOCAB,
    a_run,
    edited,
    exported,
    greedy,
    random_ids,
    words,
)
from tests.results.rows import rows
from tests.support import ROOT, call, modules, of_encoding

pytestmark = pytest.mark.usefixtures("own_modules")
ALLOWED = {"torch", "transformers", "triton"} | sys.stdlib_module_names
"""triton is asked for where it is installed."""
END = 0
APART = {"reset_attention_mask": True, "reset_position_ids": True}
# No class of transformers has these together, so every encoding takes our own.
ENDS = {"MptForCausalLM": "max_seq_len", "GPTJForCausalLM": "n_positions"}
"""The key beyond which a class computes nothing."""
OWN = ["norm=rmsnorm", "use_bias_in_mlp=false"]


def opened(folder, **more):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **more)


@torch.no_grad()
def check_same_in_transformers(folder, model):
    theirs = opened(folder)
    ids = random_ids(300)
    expected = model(ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
    prompt = random_ids(TRAINED - 4, 1)
    continued = theirs.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert continued[0, TRAINED - 4 :].tolist() == greedy(model, prompt, 12)


@every_hook
def test_every_encoding_is_the_same_model_in_transformers(name, tmp_path):
    grouped = ["num_key_value_heads=2"] if REGISTRY[name].grouped_queries else []
    folder, model = exported(tmp_path, *OWN, *grouped, *of_encoding(name))
    check_same_in_transformers(folder, model)


@pytest.mark.parametrize("settings", CASES["no_class"], ids=str)
def test_every_key_of_model_and_attention_is_kept(settings, tmp_path):
    folder, model = exported(tmp_path, *words(settings))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "positions_gpt"
    check_same_in_transformers(folder, model)
    card = (folder / "README.md").read_text()
    assert "no class of transformers is exactly this model" in card
    for key, line in {
        "softmax_type": "1 gated_attention, attention_gate head, softmax_type learnable |",
        "num_layers": "+ 1 attention + 1 kda, linear_pos_emb clipped_rope |",
    }.items():
        assert (line in card) == (key in settings)


@pytest.mark.parametrize("name", CASES["ours"])
def test_a_model_that_is_one_of_transformers_becomes_it_and_comes_back(name, tmp_path):
    path, model = a_run(tmp_path, *words(CASES["ours"][name]))
    done = export(path, tmp_path / "out")
    assert done.architecture == name
    assert max(done.differences.values()) <= 1e-5
    assert not list((tmp_path / "out").glob("*.py")), "no code comes with it"
    back, _ = open_model(tmp_path / "out")
    if limit := ENDS.get(name):
        edited(tmp_path / "out", tmp_path / "longer", **{limit: 320})
    check_same_in_transformers(tmp_path / ("longer" if limit else "out"), model)
    # Norms of these are 1 + weight, which rounds.
    above_one = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Gemma3ForCausalLM")
    atol = 1e-5 if name in above_one else 0
    ids = random_ids(70)
    torch.testing.assert_close(back(ids), model(ids), rtol=0, atol=atol)


def test_a_users_own_encoding_goes_along_and_is_not_run_unasked(bump, tmp_path):
    def forget():
        FILES.clear()
        del REGISTRY["exported_bump"]

    path, model = a_run(tmp_path, "pos_emb=exported_bump", f"pos_emb_file={bump}")
    forget()
    command = ["tools/export_checkpoint.py", path, "--to", "hf", "-o", tmp_path / "out"]
    assert "(to a tool --from " in call(*command).stderr
    assert call(*command, "--from", bump).returncode == 0
    check_same_in_transformers(tmp_path / "out", model)
    forget()
    command = ["tools/import_checkpoint.py", tmp_path / "out", "-o", tmp_path / "again"]
    assert "never runs without your consent: read it" in call(*command).stderr
    assert call(*command, "--from", bump).returncode == 0
    forget()
    bump.write_text(f"from megatron.config import load\n{BUMP}")
    path, _ = a_run(tmp_path / "another", "pos_emb=exported_bump", f"pos_emb_file={bump}")
    assert "imports load from megatron.config, w" in refused(path, tmp_path / "other")


def test_an_exported_folder_needs_torch_and_transformers_alone(tmp_path):
    path, _ = a_run(tmp_path, "pos_emb=mep", "pos_emb_args={kernels: [exp, t5, kerple_log]}")
    model, config, _ = load_for_evaluation(path)
    files = sources(model, config)
    assert {"modeling_positions_gpt.py", "model_gpt.py", "attention_encoded.py"} < files.keys()
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                assert f"{node.module}.py" in files, (name, node.module)
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in ALLOWED, (name, node.module)
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED, name


@torch.no_grad()
def test_texts_of_a_padded_batch_are_those_alone(tmp_path):
    folder, _ = exported(tmp_path, "window=20", "pos_emb=fox", "logn_scale=true")
    model = opened(folder)
    texts = [random_ids(length, 1) for length in (70, 41, 1)]
    ids = torch.cat([F.pad(text, (70 - text.shape[1], 0)) for text in texts])
    mask = torch.cat([F.pad(torch.ones_like(text), (70 - text.shape[1], 0)) for text in texts])
    logits = model(ids, attention_mask=mask).logits
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    continued = model.generate(ids, attention_mask=mask, **options)[:, 70:]
    for row, text in enumerate(texts):
        expected = model(text).logits[0]
        torch.testing.assert_close(logits[row, -len(expected) :], expected, rtol=0, atol=1e-5)
        alone = model.generate(text, attention_mask=torch.ones_like(text), **options)
        assert continued[row].tolist() == alone[0, text.shape[1] :].tolist()


def test_loss_and_gradients_are_ours_with_and_without_recomputation(tmp_path):
    folder, model = exported(tmp_path, *OWN, "pos_emb=kerple_log", "pos_emb_shared=false")
    ids = random_ids(90)
    loss = model(ids[:, :-1], ids[:, 1:], mean=True)
    loss.backward()
    expected = {f"gpt.{name}": parameter.grad for name, parameter in model.named_parameters()}
    for recompute in (False, True):
        theirs = opened(folder).train()
        if recompute:
            theirs.activation_checkpointing_enable()
        out = theirs(ids, labels=ids, use_cache=False)
        torch.testing.assert_close(out.loss, loss, rtol=0, atol=1e-5)
        out.loss.backward()
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_half_precision_keeps_the_encoding_in_float32(tmp_path):
    folder, model = exported(tmp_path, "pos_emb=kerple_log")
    theirs = opened(folder, dtype=torch.bfloat16)
    assert theirs.gpt.final_linear.weight.dtype == torch.bfloat16
    for parameter in [*theirs.gpt.positions.parameters(), *theirs.gpt.positions.buffers()]:
        assert parameter.dtype == torch.float32
    ids = random_ids(300)
    assert torch.equal(theirs(ids).logits, model.bfloat16()(ids))


@torch.no_grad()
def test_what_transformers_saves_again_and_builds_anew_is_the_same_model(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SHARD", "20KB")
    folder, model = exported(tmp_path, *OWN, "pos_emb=mep_param", "no_weight_tying=false")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    opened(folder).save_pretrained(tmp_path / "again", max_shard_size="20KB")
    again = opened(tmp_path / "again")
    assert torch.equal(again(random_ids(70)).logits, model(random_ids(70)))
    again.resize_token_embeddings(VOCAB + 3)
    logits = again(random_ids(70)).logits
    assert logits.shape[2] == VOCAB + 3
    torch.testing.assert_close(logits[:, :, :VOCAB], model(random_ids(70)))
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    built = AutoModelForCausalLM.from_config(settings, trust_remote_code=True)
    assert built.gpt.final_linear is None
    assert built(random_ids(300)).logits.isfinite().all()


# --- Documents: transformers passes none ---


# --- Tokenizer and card ---

TEXTS = ["def f(x):\n    return  x + 1\n", "Größe 你好 🙂", "  two\tspaces ", "<|end|> 's 12345"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Files of each kind of tokenizer: {tokenizer_type: (vocab_file, merge_file)}."""
    folder = tmp_path_factory.mktemp("tokenizers")
    text = train_tokenizer(modules()[:20], 400)
    model = json.loads(text)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    # A tokenizer.json may add a token to each text, and cut it; ours does not.
    whole = Tokenizer.from_str(text)
    end = "<|endoftext|>"
    whole.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    whole.enable_truncation(4)
    whole.save(str(folder / "tokenizer.json"))
    pair = (folder / "vocab.json", folder / "merges.txt")
    files = {"HFTokenizer": (folder, None), "GPT2BPETokenizer": pair}
    pieces = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("".join(modules()[:20]).splitlines()),
        model_writer=pieces,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        minloglevel=2,
        normalization_rule_name="identity",  # nothing is lost, so that texts come back
        remove_extra_whitespaces=False,
    )
    (folder / "spm.model").write_bytes(pieces.getvalue())
    files["SPMTokenizer"] = (folder / "spm.model", None)
    return files


@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_the_tokenizer_gives_the_same_ids(kind, tokenizers, tmp_path):
    vocab, merges = tokenizers[kind]
    built = build_tokenizer(kind, vocab, merges)
    settings = ["pos_emb=alibi", f"tokenizer_type={kind}", f"vocab_file={vocab}"]
    settings += [f"merge_file={merges}"] if merges else []
    path, _ = a_run(tmp_path, *settings, tokenizer=description(built), vocab=built.vocab_size)
    notes = export(path, tmp_path / "out").notes
    if kind == "SPMTokenizer":  # token files of the run are those of what comes back
        assert "transformers may give spaces other ids" in str(notes)
        back = import_checkpoint(tmp_path / "out", tmp_path / "back").path
        assert load_for_evaluation(back)[2]["tokenizer"]["hash"] == built.hash
        return
    assert notes == ()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for text in [*TEXTS, modules()[3]]:
        ids = built.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == built.eod
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == built.eod


@pytest.mark.parametrize("form", ["pair", "whole"])
def test_a_model_keeps_how_texts_begin_and_end(form, tokenizers, tmp_path):
    """pair: as OPT, with </s> before each text, and <|endoftext|> as an ordinary token.

    whole: a chat model, whose turns end with a token of their own
    """
    source, out = tmp_path / "source", tmp_path / "out"
    config = transformers.OPTConfig(
        vocab_size=410,
        hidden_size=8,
        word_embed_proj_dim=8,
        ffn_dim=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16,
    )
    theirs = transformers.OPTForCausalLM(config)
    theirs.generation_config.eos_token_id = [401, 0]
    theirs.save_pretrained(source)
    if form == "pair":
        vocab, merges = tokenizers["GPT2BPETokenizer"]
        ids = json.loads(vocab.read_text()) | {"</s>": 400}
        (source / "vocab.json").write_text(json.dumps(ids))
        (source / "merges.txt").write_bytes(merges.read_bytes())
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "eos_token": "</s>"}
        settings["bos_token"] = "</s>"
    else:
        whole = Tokenizer.from_file(str(tokenizers["HFTokenizer"][0] / "tokenizer.json"))
        whole.add_special_tokens(["<|im_end|>"])
        whole.save(str(source / "tokenizer.json"))
        settings = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}\n"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    record = load_for_evaluation(import_checkpoint(source, tmp_path / "run").path)[2]["tokenizer"]
    export(tmp_path / "run", out)

    before, after = map(AutoTokenizer.from_pretrained, (source, out))
    assert len(before("").input_ids) == 1
    for text in TEXTS:
        assert after(text).input_ids == before(text).input_ids
    assert (after.eos_token, after.chat_template) == (before.eos_token, before.chat_template)
    assert record["bos"] == before("").input_ids[0]
    assert record["eod"] == (before.eos_token_id if form == "pair" else END)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [401, 0]
    card = (out / "README.md").read_text()
    assert not re.search(r"^\| (step|precision of the training|seed) \|", card, re.MULTILINE)


def test_a_bare_sentencepiece_model_begins_texts_as_llama(tokenizers, tmp_path):
    vocab, _ = tokenizers["SPMTokenizer"]
    files = TokenizerSource("SPMTokenizer", vocab)
    facts = facts_of_texts(tmp_path, files, build_tokenizer(*files))
    (tmp_path / "tokenizer.model").write_bytes(vocab.read_bytes())
    theirs = LlamaTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    assert facts == {"bos": theirs("a").input_ids[0], "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert facts_of_texts(tmp_path, files, build_tokenizer(*files)) == {}


def test_a_damaged_file_of_results_keeps_no_model_from_export(tmp_path, caplog):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "torn.jsonl").write_text('{"pos_emb": ')
    assert exporting.gain_of(tmp_path / "global_step5", {"config_hash": "ab", "step": 5}) == ""
    assert "torn.jsonl, line 1" in caplog.text


def test_the_commands_of_the_guide_run_and_write_a_card(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "exporting.md").read_text(encoding="utf-8")
    [command] = re.findall(r"```bash\npython (.*)\n```", guide)
    [code] = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    old = {"path": str(tmp_path / "old"), "step": 7, "config_hash": "aa11", "weights": "bb22"}
    origin = {"source": str(tmp_path / "tiny"), "architecture": None, "kind": "gpt-neox"}
    more = {"parent": old, "parent_model": "rotary step 7", "origin": origin}
    stages = "seq_length_schedule=[[32,2],[16,9]]"
    a_run(tmp_path / "runs", "pos_emb=mep_free", stages, vocab=512, **more)
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "mep")
    record = json.loads((tmp_path / "runs/mep/global_step5/checkpoint.json").read_text())
    facts = {"protocol": "tail", "train_length": TRAINED, "step": 5}
    facts |= {"config_hash": record["config_hash"], "stage_length": TRAINED}
    noise = np.random.default_rng(0).normal(0, 0.01, 20)
    measured = []
    for window, loss in ((None, 2.0), (TRAINED, 2.5)):
        losses = (loss + noise).tolist()
        facts |= {"window": window, "window_losses": losses}
        measured += rows("mep_free", {4 * TRAINED: np.exp(np.mean(losses))}, **facts)
    write_results(tmp_path / "runs" / "mep" / "evaluation" / "tail.jsonl", measured)
    monkeypatch.chdir(tmp_path)
    done = call(*command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "models/mep: PositionsGPTForCausalLM, step 5" in done.stdout.splitlines()
    assert "logits at 128 tokens: within " in done.stdout
    card = (tmp_path / "models" / "mep" / "README.md").read_text()
    note = "No tokenizer: CharLevelTokenizer has no tokenizer.json."
    assert note in done.stdout
    for line in (
        "license: unknown",
        "| step | 5 |",
        "| training length | 32 to 16 to 64 tokens |",
        "| stages: tokens of a window, last step | [[32, 2], [16, 9]] |",
        "| origin | tiny (gpt-neox) |",
        "| effective length (tail, against a window of the training length, these weights)"
        f" | {4 * TRAINED} or more (mep_free, stdlib valid: tail) |",
        "| parent | rotary step 7, config aa11, weights bb22 |",
        note,
    ):
        assert line in card.splitlines(), line
    assert str(tmp_path) not in card, "no path of this machine is published"
    names = {"ids": random_ids(TRAINED, 1)}
    exec(code, names)
    assert names["continued"].shape[1] > TRAINED


# --- Reading it back ---


@pytest.mark.parametrize("settings", [CASES["ours"]["GPTNeoXForCausalLM"], {"pos_emb": "mep_free"}])
def test_an_export_is_imported_bit_for_bit_and_refused_where_it_is_damaged(
    settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path, _ = a_run(tmp_path, *words(settings), f"data_path={tmp_path}/text")
    export(path, "out")
    for file in Path("out").glob("*.[jsy]*"):  # weights and settings
        whole = file.read_bytes()
        assert os.fsencode(tmp_path) not in whole, "no path of this machine is published"
        file.write_bytes(whole.replace(b"0", b"1", 1))
        with pytest.raises(UserError, match=f"{file}: was changed .* - copy the folder again"):
            open_model("out")
        file.write_bytes(whole)
    weights = [next(run.rglob("model.safetensors")) for run in (path, import_if_foreign("out"))]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# --- What is refused ---


def refused(run_folder, out, **options):
    """The message of an export that fails and leaves nothing."""
    before = {*out.parent.iterdir()}
    with pytest.raises(UserError) as fault:
        export(run_folder, out, **options)
    assert {*out.parent.iterdir()} == before
    return str(fault.value)


def test_what_cannot_be_exported_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    path, _ = a_run(tmp_path / "alibi", "pos_emb=alibi")
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    assert f"--output: {used} is in use - name a new folder, or" in refused(path, used)
    assert "looked for global_step7" in refused(path, tmp_path / "out", step=7)
    learned_with = {"type": "HFTokenizer", "hash": "0123456789ab", "eod": 0}
    other, _ = a_run(tmp_path / "other", "pos_emb=alibi", tokenizer=learned_with)
    assert export(other, tmp_path / "none").notes == ("No tokenizer: its files were not found.",)
    monkeypatch.setattr("megatron.interop.huggingface.TOLERANCE", -1.0)
    monkeypatch.setattr("megatron.interop.huggingface.ROUNDINGS", -1.0)
    message = "logits of PositionsGPTForCausalLM differ from ours by 0 at 64 tokens"
    assert message in refused(path, tmp_path / "out")
    full = mock.Mock(side_effect=SafetensorError("No space left on device (os error 28)"))
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    message = "out: cannot be written (No space left on device (os error 28))"
    assert message in refused(path, tmp_path / "out")


def test_the_model_refuses_what_it_would_compute_wrongly(tmp_path):
    folder, _ = exported(tmp_path, "pos_emb=alibi")
    model = opened(folder)
    ids = random_ids(6)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    for arguments, message in (
        ({"attention_mask": mask[:, :4]}, r"attention_mask: \[2, 4\] must be \[2, 6\]"),
        ({"attention_mask": mask.roll(2, 1)}, "every text needs tokens, and none of padding amo"),
        ({"position_ids": mask}, "position_ids: is not offered by this model; leave it out"),
        ({"past_key_values": DynamicCache()}, "DynamicCache does not hold what this model keeps"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **arguments)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="tokens that were read cannot be taken back"):
        cache.crop(3)


@pytest.mark.parametrize(
    ("last", "architecture"),
    [(0.001, "GPTNeoXForCausalLM"), (0.0, "PositionsGPTForCausalLM")],  # longrope divides by it
)
def test_frequencies_of_ones_own_leave_as_longrope_where_it_can_say_them(
    last, architecture, tmp_path
):
    options = f"pos_emb_args={{frequencies: [1.0, 0.3, 0.02, {last}]}}"
    path, _ = a_run(tmp_path, "pos_emb=rotary", options)
    done = export(path, tmp_path / "out")
    assert done.architecture == architecture
    assert len(done.differences) == 2
