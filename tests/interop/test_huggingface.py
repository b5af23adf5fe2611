"""Folders of Hugging Face's classes give their logits and gradients, and go back bit for bit."""

import hashlib
import json
import re
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.checkpoints.manifest import faults_of
from megatron.checkpoints.read import load_for_evaluation
from megatron.config import load
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from megatron.errors import UserError
from megatron.evaluation.loaded_run import checked_tokenizer, loaded_model
from megatron.interop import open_model
from megatron.interop.families import FAMILIES, each_weight, write_weights
from megatron.interop.huggingface import WHOLE, open_folder, read_settings
from megatron.interop.importing import (
    compared_with_transformers,
    import_checkpoint,
    import_if_foreign,
)
from megatron.model import Architecture, Cache, padded_vocab
from tests.interop.models import (
    CASES,
    MODELS,
    VOCAB,
    edited,
    of_theirs,
    random_ids,
    spread,
    words_tokenizer,
)
from tests.servers import served
from tests.support import ROOT, blocks, call

SAME_OTHERWISE = ("n_inner", "hidden_act", "rope_parameters", "pretraining_tp", "max_window_layers")
"""Keys that may be spelled in more than one way; `settings_of` must read them alike."""
every_case = pytest.mark.parametrize("case", MODELS)


@pytest.fixture(scope="module")
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
def test_logits_and_gradients_are_those_of_hugging_face(case, folder):
    theirs, (ours, config) = of_theirs(case), open_model(folder(case))
    ids = random_ids(300)
    expected = theirs(ids).logits
    logits = ours(ids)
    assert expected.std() > 0.3
    # MPT adds distances from its last position before the softmax, states multiply rounding, and
    # Gemma 3's frequencies are powers in float32: with these, ours are within 1e-6. Of Kimi Linear
    # ours are 2e-6 from float64, theirs 5e-6.
    relative = 1e-5 if case.startswith(("mpt", "qwen3.5", "gemma3", "kimi")) else 2e-6
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=relative * largest)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * direction).sum().backward()
    (logits * direction).sum().backward()
    family = FAMILIES[type(theirs).__name__]
    gradients = {
        name.replace("lm_head", family.head): weight.grad
        for name, weight in theirs.named_parameters()
    }
    architecture = Architecture.of(config.model)
    expected_gradients = dict(each_weight(family, gradients, architecture))
    zeros = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    constants = dict(each_weight(family, zeros, architecture))  # 1 in norms of Qwen3-Next
    # Qwen3.5's dt_bias sums what cancels: ours are 1.1e-4 from float64, theirs 5e-5.
    relative = 2e-4 if case == "qwen3.5" else 1e-4
    for name, parameter in ours.named_parameters():
        expected_gradient = expected_gradients[name] - constants[name]
        difference = (parameter.grad - expected_gradient).abs().max()
        assert difference <= relative * expected_gradient.abs().max(), name


@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["dynamic", "longrope", "longrope, more", "proportional", "pythia proportional"]
)
def test_frequencies_by_length_are_those_of_transformers_at_every_length(case, folder):
    case = case if case in MODELS else f"llama {case}"
    ours, _ = open_model(folder(case))
    texts = [random_ids(length, texts=1) for length in (40, 64, 65, 320, 321, 700)]
    for ids in texts:
        expected = of_theirs(case)(ids).logits  # each of a new model: dynamic keeps the longest
        largest = float(expected.abs().max())  # 2.6 to 3.1
        torch.testing.assert_close(ours(ids), expected, rtol=0, atol=2e-6 * largest)
    stretched = case == "llama dynamic"
    theirs = of_theirs(case)
    theirs(texts[-1])
    after_longer = (theirs(texts[-2]).logits - ours(texts[-2])).abs().max()
    assert (after_longer > 1e-3) == stretched


def test_dynamic_refuses_keys_that_were_cached_with_other_frequencies(folder):
    ours, _ = open_model(folder("llama dynamic"))
    cache = Cache()
    ours(random_ids(319), cache=cache)
    ours(random_ids(1), cache=cache)
    with pytest.raises(UserError, match="at each length beyond 320 tokens, so cached keys"):
        ours(random_ids(1), cache=cache)


@every_case
def test_ours_goes_back_bit_for_bit(case, folder):
    family, _, _ = read_settings(folder(case))
    model, config = open_model(folder(case))
    architecture = Architecture.of(config.model)
    back = write_weights(family, model.state_dict(), architecture)
    again = dict(each_weight(family, back, architecture))
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    theirs = load_file(folder(case) / "model.safetensors")
    if case == "kimi linear":  # transformers has other names in files than in its class
        theirs = of_theirs(case).state_dict()
    assert back.keys() == theirs.keys()
    for name, weight in theirs.items():
        # Norms of these are 1 + weight, which rounds.
        above_one = case.startswith(("qwen3 next", "qwen3.5", "gemma3"))
        rounded = above_one and name.endswith(("norm.weight", "layernorm.weight"))
        atol = torch.finfo(torch.float32).eps if rounded else 0  # 1 + weight is below 4
        torch.testing.assert_close(back[name], weight, rtol=0, atol=atol)
    assert model.vocab == VOCAB == padded_vocab(VOCAB, config.model.make_vocab_size_divisible_by)
    if case == "mpt storywriter":
        with pytest.raises(UserError, match="alibi_bias_max: 16, where transformers computes 8"):
            family.config_of(config, VOCAB)
        return
    theirs = type(of_theirs(case).config)
    written = theirs(**family.config_of(config, VOCAB)).to_dict()
    original = theirs.from_pretrained(folder(case)).to_dict()
    free = {"bos_token_id", "eos_token_id", "dtype", "_name_or_path", *SAME_OTHERWISE}
    for key, value in original.items():
        assert key in free or written[key] == value, key


@torch.no_grad()
def test_other_spellings_are_the_same_model(folder, tmp_path):
    for number, (case, changes) in enumerate(CASES["spellings"]):
        model, config = open_model(folder(case))
        old, old_config = open_model(edited(folder(case), tmp_path / str(number), **changes))
        assert old_config.hash == config.hash
        assert torch.equal(old(random_ids(300)), model(random_ids(300)))
    # What a file leaves out is as its class has it.
    for case in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        place = edited(folder(case), tmp_path / case, rope_parameters=None)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
        ids = random_ids(24)
        torch.testing.assert_close(open_model(place)[0](ids), theirs(ids).logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_keys_that_transformers_takes_from_elsewhere_are_taken_from_there(folder, tmp_path):
    for number, (case, changes) in enumerate(CASES["elsewhere"]):
        place = edited(folder(case), tmp_path / str(number), **changes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
        ours, _ = open_model(place)
        for ids in (random_ids(10, 1), random_ids(60, 1)):
            expected = theirs(ids).logits
            difference = (ours(ids) - expected).abs().max()
            assert difference <= 1e-5 * expected.abs().max(), (case, changes)


@torch.no_grad()
@pytest.mark.parametrize("case", ["phi", "gpt-j"])
def test_a_tied_matrix_with_a_bias_is_read_as_two(case, tmp_path):
    with mock.patch.dict(MODELS, {case: MODELS[case] | {"tie_word_embeddings": True}}):
        theirs = of_theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    run = import_checkpoint(tmp_path / "theirs", tmp_path / "run").path
    model, config, _ = load_for_evaluation(run)
    expected = theirs(random_ids(20)).logits
    torch.testing.assert_close(model(random_ids(20)), expected, rtol=0, atol=2e-5)
    assert torch.equal(model.final_linear.weight, theirs.get_input_embeddings().weight)
    assert config.model.no_weight_tying


@pytest.mark.parametrize("name", CASES["published"])
def test_the_config_of_a_published_model_is_read(name, tmp_path):
    theirs, expected = CASES["published"][name]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    family, config, _ = read_settings(tmp_path)
    assert family.model_type == theirs["model_type"]
    keys = config.flat()
    assert {key: keys[key] for key in expected} == expected


@torch.no_grad()
@pytest.mark.parametrize(("name", "case"), [("Qwen3_5", "qwen3.5"), ("Gemma3", "gemma3")])
def test_of_a_model_of_text_and_images_the_text_model_is_read(name, case, tmp_path, caplog):
    """Published folders have it beside a tower for images, and Qwen3.5 a head for training."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4}
    if name == "Gemma3":
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
    else:
        sizes |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = getattr(transformers, f"{name}Config")(
        text_config=dict(MODELS[case]),
        vision_config=sizes,
        tie_word_embeddings=True,  # beside text_config, which says false
    )
    torch.manual_seed(3)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    spread(theirs, 0.7)
    theirs.eval().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if name == "Qwen3_5":
        weights["mtp.fc.weight"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors")
    ours, _ = open_model(tmp_path)
    for length in (1, 40, 64, 300):  # chunks of the delta rule have 64 tokens
        ids = random_ids(length)
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=2e-5)
    assert f"of {name}ForConditionalGeneration the text model alone is read" in caplog.text


@torch.no_grad()
def test_shards_half_precision_and_names_of_the_bare_model_are_read(folder, tmp_path):
    expected = open_model(folder("gpt2"))[0](random_ids(20))
    sharded = tmp_path / "sharded"
    transformers.GPT2LMHeadModel.from_pretrained(folder("gpt2")).save_pretrained(
        sharded, max_shard_size="20KB"
    )
    assert torch.equal(open_model(sharded)[0](random_ids(20)), expected)
    assert torch.equal(open_model(sharded)[0](random_ids(20)), expected)
    next(sharded.glob("model-*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"cannot open it \(.*model-0.* copy all weights beside it"):
        open_model(sharded)

    bare = edited(folder("gpt2"), tmp_path / "bare")
    weights = load_file(bare / "model.safetensors")
    old = {name.removeprefix("transformer."): weight.half() for name, weight in weights.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 320, 320)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, bare / "model.safetensors")
    model, _ = open_model(bare)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(random_ids(20)), expected, rtol=0, atol=0.05)


def test_what_cannot_be_computed_is_one_message(folder, tmp_path):
    for number, (case, changes, message) in enumerate(CASES["refused"]):
        with pytest.raises(UserError, match=re.escape(message)):
            open_model(edited(folder(case), tmp_path / str(number), **changes))


def test_damaged_and_missing_files_are_one_message_and_code_is_not_run(folder, tmp_path, caplog):
    place = edited(folder("pythia"), tmp_path / "copy", auto_map={"AutoModelForCausalLM": "m.M"})
    (place / "m.py").write_text("raise SystemExit('it ran')")
    open_model(place)
    assert "names code of its own, which is not run" in caplog.text
    weights = place / "model.safetensors"
    cannot_open = pytest.raises(UserError, match=r"GPTNeoXForCausalLM cannot open it .* again")
    for content in (b"nothing", None):
        weights.unlink()
        if content is not None:
            weights.write_bytes(content)
        with cannot_open:
            open_model(place)
    for shards in ("{}", '{"a": {}}', '{"a": 5, "b": "x"}'):
        (place / "model.safetensors.index.json").write_text(f'{{"weight_map": {shards}}}')
        with cannot_open:
            open_model(place)
    with pytest.raises(UserError, match="holds no checkpoint that is known here"):
        open_model(tmp_path)
    with pytest.raises(UserError, match="is not a folder - give a checkpoint or a hub's"):
        open_model(tmp_path / "absent")


def test_names_of_a_wrapped_model_are_read_without_their_prefix(folder, tmp_path):
    place = edited(folder("llama"), tmp_path / "wrapped")
    weights = load_file(place / WHOLE)
    expected = open_model(place)[0].state_dict()
    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        save_file({prefix + name: x for name, x in weights.items()}, place / WHOLE)
        read = open_model(place)[0].state_dict()
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_new_weights_in_shards_of_any_name_are_imported_anew(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = edited(folder("llama"), tmp_path / "sharded")
    weights = load_file(place / WHOLE)
    (place / WHOLE).unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "weights-1.safetensors")}
    (place / f"{WHOLE}.index.json").write_text(json.dumps(index))
    runs = []
    for scale in (1, 1, 0.5):
        scaled = {name: scale * weight for name, weight in weights.items()}
        save_file(scaled, place / "weights-1.safetensors")
        runs.append(import_if_foreign(place))
    assert runs[0] == runs[1] != runs[2]
    norm = open_model(runs[2])[0].state_dict()["norm.weight"]
    assert torch.equal(norm, scaled["model.norm.weight"])


@torch.no_grad()
def test_steep_weights_multiply_rounding_and_are_no_other_model(tmp_path):
    """Logits of both programs are up to 1e-3 from float64, in which they agree."""
    theirs = of_theirs("qwen3.5")
    for weight in theirs.parameters():
        if weight.dim() > 1:
            weight.normal_(std=3 / weight.shape[-1] ** 0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    compared = import_checkpoint(tmp_path / "theirs", tmp_path / "run").compared
    assert compared["largest_difference"] > 1e-5 * compared["largest_logit"]


def test_a_name_of_the_hub_is_downloaded_without_code(folder, tmp_path, monkeypatch):
    downloads = {}

    def download(name, **options):
        downloads[name] = options
        if name != "someone/tiny":
            raise OSError("offline")
        return str(folder("pythia"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert open_model("someone/tiny")[0].vocab == VOCAB
    allowed = set(downloads["someone/tiny"]["allow_patterns"])
    texts = {"tokenizer.model", "merges.txt", "chat_template.jinja"}
    assert allowed == {"*.safetensors", "*.json", "config.yml", *texts}
    assert import_if_foreign("someone/tiny").name.startswith("tiny-")
    with pytest.raises(UserError, match=r"someone/other: is not a folder here, and .* --local-dir"):
        open_model("someone/other")
    assert open_model("someone/tiny@step3000")[0].vocab == VOCAB
    assert downloads["someone/tiny"]["revision"] == "step3000"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as after `pip install .`
    with pytest.raises(UserError, match=r"someone/tiny: is not a folder here, and .* pip install"):
        open_model("someone/tiny")


HUB = """
import sys
from megatron.interop import open_model
from megatron.interop.importing import import_if_foreign
model, config = open_model(sys.argv[1])
print(model.vocab, import_if_foreign(sys.argv[1]).name)
open_model(sys.argv[2])
"""


def test_a_revision_of_the_hub_lies_in_its_cache_as_links(folder, forks, tmp_path):
    files = {path.name: path.read_bytes() for path in folder("pythia").iterdir()}
    with served() as hub:
        hub.show_model("someone/tiny", files | {"code.py": b"1 / 0"}, "step3000")
        names = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
        names |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}
        script = tmp_path / "hub.py"
        script.write_text(HUB)
        words = ["someone/tiny@step3000", "someone/tiny@step1"]  # step1 is not there
        done = forks.run(script, *words, cwd=tmp_path, env=names)
        assert done.stdout.startswith(f"{VOCAB} tiny@step3000-"), done.stderr
        assert "hf download someone/tiny --revision step1 --local-dir tiny@step1" in done.stderr
    snapshots = tmp_path / "home/hub/models--someone--tiny/snapshots"
    [snapshot] = snapshots.iterdir()
    assert (snapshot / "config.json").is_symlink()
    assert not (snapshot / "code.py").exists()
    assert open_model(snapshot)[0].vocab == VOCAB


def test_a_relative_of_rotary_is_written_as_a_scaling():
    shape = ["num_layers=1", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    shape += ["norm=rmsnorm", "activation=swiglu"]
    rope = FAMILIES["LlamaForCausalLM"]
    p_rope = load([], [*shape, "pos_emb=p_rope", "pos_emb_args={fraction: 0.5}"])
    theirs = rope.config_of(p_rope, VOCAB)["rope_parameters"]
    assert (theirs["rope_type"], theirs["partial_rotary_factor"]) == ("proportional", 0.5)
    for name, scaling in (("pi", "linear"), ("yarn", "yarn"), ("llama3", "llama3")):
        scaled = load([], [*shape, f"pos_emb={name}", "pos_emb_args={factor: 4, base: 500}"])
        theirs = rope.config_of(scaled, VOCAB)["rope_parameters"]
        keys = ("rope_type", "factor", "rope_theta")
        assert [theirs[key] for key in keys] == [scaling, 4, 500]


def test_a_model_of_another_kind_says_why_it_is_none_of_theirs():
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    for name, settings, message in (
        ("GPTNeoX", ["pos_emb=alibi"], "GPTNeoXForCausalLM is another model: .*pos_emb: .*alibi"),
        ("Llama", [], "LlamaForCausalLM is another model: .*activation: gelu"),
        ("Mpt", [], "MptForCausalLM is another model: .*pos_emb: "),
        ("GPTNeoX", ["num_key_value_heads=2"], "another model: num_key_value_heads: 2"),
    ):
        with pytest.raises(UserError, match=message) as fault:
            FAMILIES[f"{name}ForCausalLM"].config_of(load([], [*shape, *settings]), VOCAB)
        assert "NoneType" not in str(fault.value)


def test_what_transformers_does_not_take_or_compute_is_one_message(folder, tmp_path):
    place = edited(folder("llama"), tmp_path / "copy", eos_token_id="</s>")
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot open it \(.*'eos_token_id'"):
        open_model(place)
    flash = edited(folder("llama"), tmp_path / "flash", _attn_implementation="flash_attention_2")
    model, _, theirs = open_folder(flash)
    with torch.no_grad():
        model.layers[1].mlp.dense_4h_to_h.weight[0, 0] += 0.5
    with pytest.raises(UserError, match=r"logits of transformers .* differ from ours by"):
        compared_with_transformers(theirs, model)
    weights = load_file(place / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, flash / "model.safetensors")
    with pytest.raises(UserError, match=r"differ from ours by nan"):
        import_checkpoint(flash, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def test_an_import_is_an_ordinary_checkpoint_with_its_origin(folder, tmp_path):
    source, run = edited(folder("qwen3"), tmp_path / "source"), tmp_path / "run"
    # Its documents end in its own way, which a file beside it names.
    file = words_tokenizer(source / "tokenizer.json", "world")
    file.write_text(file.read_text().replace("<|endoftext|>", "</s>"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    done = call("tools/import_checkpoint.py", source, "-o", run)
    assert "Qwen3ForCausalLM (the largest is" in done.stdout
    assert f"written to {run}/global_step0" in done.stdout
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
    assert build_tokenizer(config.data.tokenizer_type, config.data.vocab_file).eod == 0
    assert faults_of(run / "global_step0") == []
    # A run that was moved has its tokenizer with it.
    tokenizer = checked_tokenizer(loaded_model(None, run.rename(tmp_path / "moved"), None))
    assert tokenizer.hash == record["tokenizer"]["hash"]


def test_an_import_that_cannot_be_right_writes_nothing(folder, tmp_path):
    source, run = edited(folder("llama"), tmp_path / "source"), tmp_path / "run"
    words_tokenizer(source / "tokenizer.json", "world")
    many = words_tokenizer(tmp_path / "many.json", *(f"word{number}" for number in range(80)))
    for place, tokenizer, message in (
        (folder("llama"), tmp_path / "absent", r"holds none - give tokenizer\.json"),
        (folder("llama"), many, r"it has 82 tokens, the embedding of .* has 61 rows"),
    ):
        with pytest.raises(UserError, match=message):
            import_checkpoint(place, run, tokenizer=tokenizer)
    assert not run.exists()
    import_checkpoint(source, run)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    with pytest.raises(UserError, match="holds a checkpoint already - name another folder"):
        import_checkpoint(source, run)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def test_the_commands_of_the_document_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for case, name in (("pythia", "pythia-70m"), ("qwen3", "qwen3")):
        place = edited(folder(case), tmp_path / "models" / name)
        words_tokenizer(place / "tokenizer.json", "world")
    draw = np.random.default_rng(3)
    with TokenWriter(
        tmp_path / "data/text/text_text_document", np.uint16, meta={"corpus": "noise"}
    ) as writer:
        for _ in range(40):
            writer.add(draw.integers(0, VOCAB, 40))
    text = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("python ")]
    assert len(lines) == 3
    for line in [*lines, lines[-1]]:
        _, script, *words = line.split()
        small = ["eval_tokens=128", "split=5,4,1"] if script == "evaluate.py" else []
        done = call(script, *words, *small)
        assert done.returncode == 0, done.stderr
    (code,) = blocks("docs/importing.md", "python")
    Path("text.txt").write_text("Hello world Hello")
    names = {}
    exec(code, names)
    assert names["nats"].shape == (2,)
    # A foreign folder is evaluated by its own name, and imported once.
    (run,) = Path("runs/imported").glob("[!.]*")
    assert run.name.startswith("qwen3-")
    (file,) = (run / "evaluation").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["length"] for row in rows} == {32, 64}
    assert rows[0]["checkpoint"] == str(run / "global_step0")
    assert open_model(run)[1].checkpoint.save == str(run)
    assert import_if_foreign("runs/absent") == Path("runs/absent")
    assert import_if_foreign("runs") == Path("runs")
    # Another tokenizer makes another import.
    words_tokenizer(tmp_path / "models" / "qwen3" / "tokenizer.json", "earth")
    assert import_if_foreign("models/qwen3") != run
