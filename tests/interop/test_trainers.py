"""Checkpoints of nanoGPT, litgpt, torchtitan and flame give the logits of transformers' classes.

Only names, order of rows and configurations are theirs; docs/experiments.md has the differences
from their own code at named commits.
"""

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.config import load
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.importing import import_checkpoint, import_if_foreign
from tests.interop.models import VOCAB, random_ids, spread

HIDDEN, HEADS, KEY_HEADS, LENGTH, WIDTH = 32, 4, 2, 40, 48


def random_model(kind: str, **keys) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    shape |= {"vocab_size": VOCAB, "max_position_embeddings": LENGTH, "intermediate_size": WIDTH}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **shape | keys)
    )
    spread(model)
    return model.eval()


def llama(**keys) -> torch.nn.Module:
    keys.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 500.0})
    return random_model("llama", num_key_value_heads=KEY_HEADS, **keys)


def renamed(weights: dict, names: dict[str, str]) -> dict:
    for theirs, others in names.items():
        weights = {name.replace(theirs, others): tensor for name, tensor in weights.items()}
    return weights


@torch.no_grad()
def check(source: Path, theirs: torch.nn.Module, config=None):
    model, read = open_model(source, config=config)
    ids = random_ids(LENGTH)
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    return read


# --- nanoGPT ---


def write_nanogpt(folder: Path, **changes) -> torch.nn.Module:
    """ckpt.pt of a compiled model; changes: its own entries."""
    theirs = random_model("gpt2", activation_function="gelu", intermediate_size=4 * HIDDEN)
    weights = theirs.state_dict()
    for name in weights:
        if ".attn.c_" in name or ".mlp.c_" in name:  # GPT-2's Conv1D is nn.Linear there
            weights[name] = weights[name].T.contiguous() if "weight" in name else weights[name]
    arguments = {"n_layer": 2, "n_head": HEADS, "n_embd": HIDDEN, "block_size": LENGTH}
    arguments |= {"bias": True, "vocab_size": VOCAB, "dropout": 0.1}
    folder.mkdir(exist_ok=True)
    content = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": arguments,
        "iter_num": 300,
        "best_val_loss": torch.tensor(2.5),
        "config": {"out_dir": "out"},
    }
    torch.save(content | changes, folder / "ckpt.pt")
    return theirs


def test_nanogpts_checkpoint_is_opened_and_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = write_nanogpt(tmp_path / "out")
    for source in (tmp_path / "out", tmp_path / "out/ckpt.pt"):
        config = check(source, theirs)
    assert (config.position.pos_emb, config.model.seq_length) == ("learned", LENGTH)
    files = import_checkpoint(tmp_path / "out", tmp_path / "run")
    assert files.path == tmp_path / "run/global_step300"
    check(files.path, theirs)
    check(import_if_foreign("out/ckpt.pt"), theirs)


def test_what_nanogpt_does_not_write_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    write_nanogpt(tmp_path)
    arguments = torch.load(tmp_path / "ckpt.pt", weights_only=True)["model_args"]
    weights = torch.load(tmp_path / "ckpt.pt", weights_only=True)["model"]
    smaller = dict(list(weights.items())[:-3])
    for changes, message in (
        ({"model_args": arguments | {"rope": True}}, r"ckpt.pt: .*'rope'.: not known.* - open"),
        ({"model_args": arguments | {"n_head": 5}}, r"ckpt.pt: .*hidden_size: 32 .* 5"),
        ({"model_args": arguments | {"n_head": "x"}}, r"ckpt.pt: .*num_attention_heads: "),
        ({"model_args": arguments | {"n_layer": 3}}, r"layers.2.input_layernorm.*missing"),
        ({"model_args": None}, r"ckpt.pt: cannot be read as nanoGPT's .*NoneType"),
        ({"model": weights | {"extra": torch.ones(1)}}, r"left over: ..extra"),
        ({"model": smaller}, r"norm.weight.*missing"),
        ({"model": {"x": torch.ones(1)}}, r"names of weights are those of another model.* - open"),
        ({"optimizer": Harmful()}, r"holds more than .*code in it is never run"),
    ):
        write_nanogpt(tmp_path, **changes)
        with pytest.raises(UserError, match=message):
            open_model(tmp_path)
    assert not (tmp_path / "ran").exists()


# --- litgpt ---


def write_litgpt(folder: Path, weights: dict, **keys) -> Path:
    config = {"n_layer": 2, "n_head": HEADS, "n_embd": HIDDEN, "block_size": LENGTH, **keys}
    config |= {"name": "mine", "hf_config": {"org": "me"}, "padding_multiple": 512}
    folder.mkdir()
    (folder / "model_config.yaml").write_text(yaml.dump(config | {"padded_vocab_size": VOCAB}))
    (folder / "config.json").write_text("{}")  # which litgpt copies
    torch.save({"model": weights, "step_count": 5}, folder / "lit_model.pth")
    return folder


NAMES = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}


def test_litgpts_llama_has_all_queries_before_all_keys(tmp_path):
    theirs = llama()
    weights = theirs.state_dict()
    for layer in range(2):
        place = f"model.layers.{layer}.self_attn."
        parts = [weights.pop(f"{place}{part}_proj.weight") for part in "qkv"]
        weights[f"{place}qkv.weight"] = torch.cat(parts)
    names = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    names |= {"model.layers": "transformer.h", "self_attn.o_proj": "attn.proj", "self_attn": "attn"}
    names |= {"gate_proj": "fc_1", "up_proj": "fc_2", "down_proj": "proj", **NAMES}
    keys = {
        "n_query_groups": KEY_HEADS,
        "rotary_percentage": 1.0,
        "rope_base": 500,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": 1e-6,
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": WIDTH,
    }
    weights = renamed(weights, names)
    check(write_litgpt(tmp_path / "a", weights, **keys), theirs)
    for number, (key, value) in enumerate(
        (("mlp_class_name", "LLaMAMoE"), ("final_logit_softcapping", 30.0), ("mystery", 1))
    ):
        folder = write_litgpt(tmp_path / str(number), weights, **keys | {key: value})
        with pytest.raises(UserError, match=rf"{key}.*: .*litgpt convert_from_litgpt"):
            open_model(folder)


def test_litgpts_pythia_is_what_it_fills_in(tmp_path):
    theirs = random_model("gpt_neox", intermediate_size=4 * HIDDEN, rotary_pct=0.25)
    weights = theirs.state_dict()
    for name in [name for name in weights if "query_key_value" in name]:
        by_head = weights[name].unflatten(0, (HEADS, 3, -1))
        weights[name] = by_head.transpose(0, 1).flatten(0, 2)
    names = {
        "gpt_neox.embed_in": "transformer.wte",
        "gpt_neox.final_layer_norm": "transformer.ln_f",
    }
    names |= {"gpt_neox.layers": "transformer.h", "query_key_value": "qkv", "attention": "attn"}
    names |= {"attn.dense": "attn.proj", "post_attn": "post_attention", "embed_out": "lm_head"}
    names |= {"dense_h_to_4h": "fc", "dense_4h_to_h": "proj", **NAMES}
    check(write_litgpt(tmp_path / "a", renamed(weights, names)), theirs)


# --- Folders of torch.distributed.checkpoint ---

TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.o_proj": "attention.wo",
    "self_attn.": "attention.qkv_linear.w",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "_proj": "",
}
FLAME = {
    "model.embed_tokens": "model.embeddings",
    "self_attn": "attn",
    "post_attention_layernorm": "mlp_norm",
    "input_layernorm": "attn_norm",
}


def sizes(*more: str):
    words = ["num_layers=2", f"hidden_size={HIDDEN}", f"num_attention_heads={HEADS}"]
    words += [f"num_key_value_heads={KEY_HEADS}", f"intermediate_size={WIDTH}"]
    words += [f"seq_length={LENGTH}", "layernorm_epsilon=1e-6", "pos_emb_args={base: 500}"]
    return load([], [*words, *more])


def titan_weights(theirs: torch.nn.Module, names: dict[str, str]) -> dict:
    """Its pairs of features stand side by side, as in Meta's files."""
    weights = theirs.state_dict()
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            by_head = tensor.unflatten(0, (-1, 2, HIDDEN // HEADS // 2))
            weights[name] = by_head.transpose(1, 2).flatten(0, 2)
    return renamed(weights, names)


def save_folder(weights: dict, folder: Path) -> Path:
    others = {
        "optimizer": {"state.norm.weight.exp_avg": torch.ones(HIDDEN)},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.save({**weights, **others}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_folder_of_torchtitan_or_flame_is_read_with_its_sizes(tmp_path):
    theirs = llama()
    older = {**TITAN, "attention.qkv_linear.": "attention.", "lm_head": "output"}
    new = titan_weights(theirs, TITAN)
    below = {"model": titan_weights(theirs, older)}
    flame = renamed(theirs.state_dict(), FLAME)
    for number, weights in enumerate(
        (new, titan_weights(theirs, older), below, flame, {"model": flame})
    ):
        folder = save_folder(weights, tmp_path / str(number))
        check(folder, theirs, sizes())
        with pytest.raises(UserError, match=r"no configuration .*in our keys .*convert_to_hf.py"):
            open_model(folder)
    check(import_checkpoint(folder, tmp_path / "run", config=sizes()).path, theirs)
    with pytest.raises(UserError, match=r"layers.2.* missing.*convert_to_hf.py"):
        open_model(folder, config=sizes("num_layers=3"))
    scaled = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 16}
    theirs = llama(rope_parameters=scaled | rope)
    folder = save_folder(titan_weights(theirs, TITAN), tmp_path / "scaled")
    options = json.dumps(scaled | {"base": 500, "original_length": 16})
    check(folder, theirs, sizes("pos_emb=llama3", f"pos_emb_args={options}"))
    tied = llama(tie_word_embeddings=True)
    folder = save_folder(titan_weights(tied, TITAN), tmp_path / "tied")
    check(folder, tied, sizes("no_weight_tying=false"))


def write_shards(weights: dict, folder: Path) -> Path:
    """The upper and the lower half of each tensor in the files of two ranks."""
    folder.mkdir()
    entries, places = {}, {}
    for rank in range(2):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            for name, tensor in weights.items():
                half = (len(tensor) + 1) // 2
                offset = torch.Size([rank * half, *[0] * (tensor.dim() - 1)])
                piece = tensor[half:] if rank else tensor[:half]
                start = file.tell()
                torch.save(piece.clone(), file)
                place = _StorageInfo(f"__{rank}_0.distcp", start, file.tell() - start)
                places[MetadataIndex(name, offset)] = place
                chunk = ChunkStorageMetadata(offset, piece.shape)
                properties = TensorProperties(tensor.dtype)
                entry = TensorStorageMetadata(properties, tensor.shape, [])
                entries.setdefault(name, entry).chunks.append(chunk)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    return folder


def test_pieces_of_ranks_are_joined_and_one_that_is_missing_is_named(tmp_path):
    theirs = llama()
    folder = write_shards(titan_weights(theirs, TITAN), tmp_path / "shards")
    check(folder, theirs, sizes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data.popitem()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"cannot be read .*lm_head.weight"):
        open_model(folder, config=sizes())


def test_metadata_runs_no_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for content in (Harmful(), {"x": Harmful()}, print, 5):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(UserError, match=r"cannot be read .*code in it is never run"):
            open_model(tmp_path, config=sizes())
    assert not (tmp_path / "ran").exists()


def test_nanochats_checkpoint_is_called_by_its_name(tmp_path):
    torch.save({"transformer.h.0.attn.ve_gate.weight": torch.ones(2)}, tmp_path / "model_000100.pt")
    (tmp_path / "meta_000100.json").write_text(json.dumps({"model_config": {"n_layer": 2}}))
    for source in (tmp_path, tmp_path / "model_000100.pt"):
        with pytest.raises(UserError, match=r"as nanochat's .* value embeddings.*base_eval.py"):
            open_model(source)
