"""What an export refuses, and the code that it takes along: without transformers."""

import ast
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import load
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_sentence_pieces, train_tokenizer
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.export import export, form_of
from megatron.interop.export_code import sources
from megatron.interop.import_checkpoint import description
from megatron.model import from_config
from tests.interop.exports import BUMP, SHAPE, VOCAB, a_run, exported
from tests.support import modules, run

ALLOWED = {"torch", "transformers", "triton"} | sys.stdlib_module_names
"""triton is asked for where it is installed."""


def imported(text):
    """Each module that a source imports, and whether from beside it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield node.module, node.level == 1
        elif isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)


def test_an_exported_folder_needs_torch_and_transformers_alone(bump, tmp_path):
    settings = ["pos_emb=mep", "pos_emb_args={kernels: [exp, t5, kerple_log, tanh]}"]
    for number, chosen in enumerate([settings, ["pos_emb=exported_bump", f"pos_emb_file={bump}"]]):
        run, _ = a_run(tmp_path / str(number), *chosen)
        model, config, _ = load_for_evaluation(run)
        files = sources(model, config)
        files.pop("pos_emb_file.py", None)  # the original text, which no other file imports
        assert {"modeling_positions_gpt.py", "model_gpt.py", "attention.py"} < files.keys()
        for name, text in files.items():
            for module, is_relative in imported(text):
                if is_relative:
                    assert f"{module}.py" in files, (name, module)
                else:
                    assert module.split(".")[0] in ALLOWED, (name, module)


def refused(run_folder, out, **options):
    """The message of an export that fails and leaves nothing."""
    before = sorted(path.name for path in out.parent.iterdir())
    with pytest.raises(UserError) as fault:
        export(run_folder, out, **options)
    assert sorted(path.name for path in out.parent.iterdir()) == before
    return str(fault.value)


def test_what_cannot_be_exported_is_one_message_and_leaves_nothing(tmp_path):
    path, _ = a_run(tmp_path / "alibi", "pos_emb=alibi")
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    assert refused(path, used) == (
        f"--output: {used} is in use - name a new folder, or an empty one"
    )
    assert "is in use" in refused(path, used / "file")
    assert "looked for global_step7" in refused(path, tmp_path / "out", step=7)

    missing = tmp_path / "missing.jsonl"
    assert str(missing) in refused(path, tmp_path / "out", results=[missing])

    learned_with = {"type": "HFTokenizer", "hash": "0123456789ab", "eod": 0}
    path, _ = a_run(tmp_path / "other", "pos_emb=alibi", tokenizer=learned_with)
    other = tmp_path / "tokenizer.json"
    other.write_text(train_tokenizer(modules()[:2], 300))
    message = refused(path, tmp_path / "out", vocab_file=other)
    assert message.startswith(f"vocab_file: {other} is tokenizer ")
    assert "the model learned with 0123456789ab - give the files of that one" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import megatron.positions", "line 1 imports in a way that an exported file cannot"),
        ("from megatron.positions.base import *", "line 1 imports in a way that"),
        (
            "from megatron.config import load",
            "line 1 imports load from megatron.config, which an exported file cannot take along",
        ),
    ],
)
def test_a_users_file_that_cannot_be_copied_is_named(line, message, bump, tmp_path):
    bump.write_text(f"{line}\n{BUMP}")
    path, _ = a_run(tmp_path, "pos_emb=exported_bump", f"pos_emb_file={bump}")
    assert f"pos_emb_file: {bump}: {message}" in refused(path, tmp_path / "out")


@pytest.mark.parametrize(
    "settings",
    [
        ["window=23"],
        ["logn_scale=true"],
        ["blockwise=true"],
        ["paper_precision=true"],
        ["pos_emb_args={interleaved: true}"],
        ["pos_emb_args={scaling: ntk, factor: 2}"],
        ["pos_emb=learned", "pos_emb_shared=false", "activation=gelu_new"],
    ],
)
def test_what_a_class_of_transformers_cannot_say_takes_our_own(settings):
    config = load([], [*SHAPE, *settings])
    form = form_of(from_config(config, vocab=VOCAB), config)
    assert form.architecture == "PositionsGPTForCausalLM"
    assert form.sources
    config = load([], SHAPE)
    assert not form_of(from_config(config, vocab=VOCAB), config).sources


@pytest.mark.campaign
def test_an_exported_folder_loads_where_this_package_is_not(tmp_path):
    folder, model = exported(tmp_path, "pos_emb=mep_param")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained('{folder}', trust_remote_code=True)\n"
        f"ids = torch.arange(300)[None] % {VOCAB}\n"
        f"torch.save(model(ids).logits.detach(), '{tmp_path / 'logits.pt'}')\n"
        "assert not [name for name in sys.modules if name.startswith('megatron')]\n"
    )
    env = {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = run("-P", script, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    expected = model(torch.arange(300)[None] % VOCAB)
    torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-5)


def test_a_damaged_exported_folder_is_one_message(tmp_path):
    folder, _ = exported(tmp_path, "pos_emb=alibi")
    place = folder / "config.json"
    settings = json.loads(place.read_text())

    def with_keys(**more):
        return {**settings["training"], "keys": {**settings["training"]["keys"], **more}}

    for changes, message in (
        ({"training": None}, "config.json: has no vocab_size, or does not say how the model was"),
        ({"training": {**settings["training"], "step": "5"}}, "does not say how the model was"),
        ({"vocab_size": "61"}, "config.json: has no vocab_size"),
        (
            {"encoding_of_layer": [0, 1]},
            r"encoding_of_layer is \[0, 1\], its training had \[0, 0\]",
        ),
        ({"training": with_keys(num_layers=0)}, "config.json: .*num_layers"),
        ({"training": with_keys(nmu_layers=2)}, "config.json: .*nmu_layers"),
        ({"vocab_size": 62}, "the weights are not those of its config.json"),
    ):
        place.write_text(json.dumps(settings | changes))
        with pytest.raises(UserError, match=f"(?s){message}"):
            open_model(folder)


def test_a_folder_of_an_earlier_version_is_read_back(tmp_path):
    """Its weights had our names without a prefix, and its config.json other keys."""
    folder, model = exported(tmp_path, "pos_emb=mep_param")
    weights = load_file(folder / "model.safetensors")
    old = {name.removeprefix("gpt."): tensor for name, tensor in weights.items()}
    assert old.keys() == model.state_dict().keys()
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    place = folder / "config.json"
    settings = json.loads(place.read_text())
    settings.pop("architecture")
    place.write_text(json.dumps(settings | {"encodings": None, "norm": "layernorm"}))
    back, _ = open_model(folder)
    ids = torch.arange(70)[None] % VOCAB
    assert torch.equal(back(ids), model(ids))


def test_a_tokenizer_that_is_no_tokenizer_json_is_left_out_with_a_note(tmp_path):
    file = tmp_path / "t.model"
    file.write_bytes(train_sentence_pieces(modules()[:3], 400, "bpe"))
    built = build_tokenizer("SPMTokenizer", file)
    settings = ["pos_emb=alibi", "tokenizer_type=SPMTokenizer", f"vocab_file={file}"]
    path, _ = a_run(tmp_path, *settings, tokenizer=description(built), vocab=512)
    done = export(path, tmp_path / "out")
    assert done.notes == (
        "No tokenizer: SPMTokenizer is not written as a tokenizer.json. Users of the model need the"
        " library of t.model.",
    )
    other = tmp_path / "other.model"
    other.write_bytes(train_sentence_pieces(modules()[:2], 400, "bpe"))
    with pytest.raises(
        UserError, match=r"vocab_file: .*other\.model is tokenizer \w+, the model l"
    ):
        export(path, tmp_path / "out2", vocab_file=other)
