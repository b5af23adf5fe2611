"""What is read beside the rows of a checkpoint, and the message where it cannot be read."""

import json
import math

import pytest
from safetensors.torch import save_file

from megatron.config import load
from megatron.model import from_config
from megatron.positions import FILES, REGISTRY, load_file
from megatron.report.evidence import NOT_FOUND, OTHER_CODE, OWN_CODE, evidence_of, gathered
from megatron.report.html.page import Page
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


def test_an_unknown_encoding_does_not_cost_the_kernels_of_others(sweep):
    _, paths = sweep
    found = {name: evidence_of(path, []) for name, path in paths.items()}
    assert {name: len(one.positions) for name, one in found.items()} == {
        "bump": 0, "alibi": 1, "rotary": 1
    }  # fmt: skip
    causes = {name: [gap.cause for gap in one.gaps] for name, one in found.items()}
    assert causes["bump"][0] == OWN_CODE
    assert "--from FILE" in OWN_CODE
    assert all(len(found[name].gaps) == 1 for name in ("alibi", "rotary")), "no training curve"
    assert "bump" not in REGISTRY, "the checkpoint's own copy is never run"
    assert {one.settings["pos_emb"] for one in found.values()} == set(paths)


def test_a_file_that_the_user_names_gives_its_kernels(sweep):
    file, paths = sweep
    load_file(file)
    found = evidence_of(paths["bump"], [])
    (placed,) = found.positions
    assert placed.position.distance_bias(5)[0].tolist() == [0.0, -0.25, -0.5, -0.75, -1.0]


def test_a_file_with_another_text_is_not_taken_for_the_checkpoints(sweep, tmp_path):
    _, paths = sweep
    other = tmp_path / "other.py"
    other.write_text(OWN.format(width=8))
    load_file(other)
    found = evidence_of(paths["bump"], [])
    assert found.positions == []
    assert found.gaps[0].cause == OTHER_CODE
    assert "that --from names is not the text" in OTHER_CODE
    assert evidence_of(paths["alibi"], []).positions, "its encoding is the project's"


def test_a_configuration_that_was_edited_is_said(sweep, tmp_path):
    _, paths = sweep
    config = tmp_path / "alibi/global_step10/config.yml"
    config.write_text(config.read_text().replace("num_layers: 1", "num_layers: 2"))
    found = evidence_of(paths["alibi"], [])
    assert found.positions == []
    assert "config.yml: it was edited after training" in found.gaps[0].cause


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


def test_a_page_of_a_sweep_says_once_what_its_own_encodings_need(sweep):
    _, paths = sweep
    rows = [row(name, 1, 512, 9.0, checkpoint=path) for name, path in paths.items()]
    rows.append(row("bump", 2, 512, 9.0, checkpoint=paths["bump"].replace("bump", "./bump")))
    page = Page(rows, [], gathered(rows, []))
    text = page.html("t")
    assert {"2-kernel", "3-kernel"} <= set(page.figures)
    assert "1-kernel" not in page.figures
    assert text.count("name the file with --from FILE") == 1
    assert f"2 times: {paths['bump']}" in text
    assert '<td>pos_emb</td><td class="text long">alibi</td>' in text


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
