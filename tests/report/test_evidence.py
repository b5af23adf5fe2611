"""What is read beside the rows of a checkpoint, and the message where it cannot be read."""

import json
import math

import pytest
from safetensors.torch import save_file

from megatron.config import load
from megatron.model import from_config
from megatron.positions import FILES, REGISTRY, load_file
from megatron.report.evidence import NOT_FOUND, evidence_of, gathered
from tests.report.support import row
from tools.report import main

OWN = """
from megatron.positions import DistanceBias, register


@register("bump")
class Bump(DistanceBias):
    '''-d / {width}.'''

    def log_kernel(self, distance):
        return (-distance.float() / {width}).expand(self.shape.heads, -1)
"""
SHAPE = [
    "num_layers=1",
    "hidden_size=16",
    "num_attention_heads=2",
    "seq_length=16",
    "tokenizer_type=CharLevelTokenizer",
]


def checkpoint(folder, *words):
    """A checkpoint with the first weights of its model."""
    config = load([], [*SHAPE, f"save={folder}", *words])
    path = folder / "global_step10"
    path.mkdir(parents=True)
    save_file(from_config(config, vocab=512).state_dict(), path / "model.safetensors")
    config.save(path / "config.yml")
    meta = {"step": 10, "config_hash": config.hash, "vocab": 512}
    (path / "checkpoint.json").write_text(json.dumps(meta))
    return str(path)


def forget():
    """As a new process: no file of the user's own has been loaded."""
    FILES.clear()
    REGISTRY.pop("bump", None)


@pytest.fixture
def sweep(tmp_path, own_registry):
    """Checkpoints of a sweep whose cells all name the user's file: bump, alibi and rotary."""
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(width=4))
    names = ("bump", "alibi", "rotary")
    paths = {
        name: checkpoint(tmp_path / name, f"pos_emb_file={file}", f"pos_emb={name}")
        for name in names
    }
    forget()
    return file, paths


def test_a_checkpoint_of_the_users_own_encoding_needs_the_file_that_the_user_names(sweep, tmp_path):
    file, paths = sweep
    found = evidence_of(paths["bump"], [])
    assert found.positions == []
    assert "is not run unasked" in found.gaps[0].cause
    assert "bump" not in REGISTRY, "the checkpoint's own copy is never run"
    assert found.settings["pos_emb"] == "bump"
    other = tmp_path / "other.py"
    other.write_text(OWN.format(width=8))
    load_file(other)
    assert evidence_of(paths["bump"], []).positions == [], "another text"
    forget()
    load_file(file)
    (placed,) = evidence_of(paths["bump"], []).positions
    assert placed.position.distance_bias(5)[0].tolist() == [0.0, -0.25, -0.5, -0.75, -1.0]


def test_a_configuration_that_was_edited_is_said(sweep, tmp_path):
    file, paths = sweep
    load_file(file)
    config = tmp_path / "alibi/global_step10/config.yml"
    config.write_text(config.read_text().replace("num_layers: 1", "num_layers: 2"))
    found = evidence_of(paths["alibi"], [])
    assert found.positions == []
    assert "it was edited after training" in found.gaps[0].cause


def test_a_checkpoint_that_lies_nowhere_is_a_gap(tmp_path):
    found = gathered([row("mep", 1, 512, 9.0)], [tmp_path / "results.jsonl"])
    ((name, one),) = found.items()
    assert one.gaps == [(name, NOT_FOUND)]
    assert not one.settings


def test_beside_the_results_each_model_finds_its_own_checkpoint(tmp_path):
    rows, files = [], []
    for name in ("alibi", "rotary", "none"):
        folder = tmp_path / "runs" / name
        path = checkpoint(folder, f"pos_emb={name}")
        config_hash = load([f"{path}/config.yml"]).hash
        rows.append(row(name, 1, 512, 9.0, config_hash=config_hash))
        rows[-1]["checkpoint"] = f"elsewhere/{name}/global_step10"
        files.append(folder / "evaluation" / "results.jsonl")
    found = gathered(rows, files[:2])
    assert [one.settings.get("pos_emb") for one in found.values()] == ["alibi", "rotary", None]
    assert found[rows[2]["checkpoint"]].gaps == [(rows[2]["checkpoint"], NOT_FOUND)]


def test_the_tool_takes_the_users_file(sweep, tmp_path, capsys):
    file, paths = sweep
    results = tmp_path / "results.jsonl"
    facts = {"loss": math.log(9.0), "checkpoint": paths["bump"]}
    results.write_text(json.dumps(row("bump", 1, 512, 9.0, **facts)) + "\n")
    words = [str(results), "-o", str(tmp_path / "page.html")]
    assert main(words) == 0
    assert "kernel exp(bias)" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main([*words, "--from", str(file)]) == 0
    assert "kernel exp(bias)" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main([*words, "--from", str(tmp_path / "nowhere.py")]) == 1
    assert "nowhere.py cannot be read" in capsys.readouterr().err
