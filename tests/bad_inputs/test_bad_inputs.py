"""The table of bad inputs, cases.yml: each ends in its message with status 1, and loses nothing."""

import os
import re
import shlex
import shutil
import struct
from pathlib import Path

import pytest
import yaml

from megatron.checkpoints.manifest import read_record, write_record
from megatron.checkpoints.saved import keep_weights_only
from tests.support import call

CASES = yaml.safe_load(Path(__file__).with_name("cases.yml").read_text(encoding="utf-8"))
MODEL = (
    "num_layers=2 hidden_size=32 num_attention_heads=4 seq_length=64"
    " tokenizer_type=CharLevelTokenizer"
)
DATA = "eval_interval=0 data_path={corpus}"
WORDS = {
    "{train}": f"train.py {MODEL} {DATA} train_iters=4 save=run",
    "{resume}": f"train.py {MODEL} {DATA} train_iters=6 save=copy load=copy",
    "{task}": "train.py num_layers=1 hidden_size=16 num_attention_heads=2 seq_length=24"
    " eval_interval=0 save=run",
    "{model}": MODEL,
}


@pytest.fixture(scope="session")
def trained(forks, corpus, tmp_path_factory):
    """The folder of a run of four steps; cases work on copies of it."""
    folder = tmp_path_factory.mktemp("bad_inputs") / "trained"
    words = f"{MODEL} train_iters=4 eval_interval=0 data_path={corpus} save={folder}"
    done = forks.run("train.py", *words.split())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The empty folder in which commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    """Every file of a folder with its bytes; links, pipes and folders as names alone."""
    contents: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        is_plain = path.is_file() and not path.is_symlink()
        contents[str(path.relative_to(folder))] = path.read_bytes() if is_plain else None
    return contents


def check(command, message, places):
    """Run a command, which must end in this message and leave the current folder as it is."""
    before = contents(Path.cwd())
    for name, value in places.items():
        command, message = command.replace(name, value), message.replace(name, value)
    message = re.sub(r"\n +", "\n", message)
    done = call(*shlex.split(command))
    assert message.strip() in re.sub(r"\n +", "\n", done.stderr)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert contents(Path.cwd()) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_bad_input_is_one_message_and_loses_nothing(case, corpus, trained, folder, own_registry):
    if case.get("copy"):
        shutil.copytree(trained, "copy")
    if "move" in case:
        shutil.move(*case["move"])
    for name, content in case.get("files", {}).items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if "index" in case:
        index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQiqqq", *case["index"]) + b"\x00"
        Path("c.idx").write_bytes(index[: len(index) + case.get("index_end", 0) - 1])
    for name in case.get("delete", ()):
        Path(name).unlink()
    if "link" in case:
        os.symlink(Path(case["link"][1]).absolute(), case["link"][0])
    if "flip" in case:
        content = bytearray(Path(case["flip"]).read_bytes())
        content[-2] ^= 1
        Path(case["flip"]).write_bytes(content)
    places = {"{corpus}": str(corpus), "{trained}": str(trained), "{here}": str(folder)}
    check(case["command"], case["message"], WORDS | places)


def test_a_checkpoint_that_cannot_be_continued_says_why(corpus, trained, folder):
    places = WORDS | {"{corpus}": str(corpus)}
    shutil.copytree(trained, "copy")
    step = folder / "copy/global_step4"
    record = read_record(step)
    write_record(step, record | {"ranks": 2, "data_ranks": 2, "windows_per_step": 8})
    check(
        "{resume}",
        "load: a step of copy/global_step4 had 8 windows on 2 rank(s), but here it would have 4 on"
        " 1 - change gradient_accumulation_steps to keep that number, or set train_batch_size=4"
        " if you want to change it",
        places,
    )
    write_record(step, record)
    keep_weights_only(folder / "copy")
    check(
        "{resume}",
        "copy/global_step4: has no state of this optimizer, so training cannot continue from it -"
        " finetune=true starts a new run from its weights",
        places,
    )
    del record["files"]
    write_record(step, record)
    fault = "copy/global_step4/checkpoint.json: not readable (files: Field required)"
    check("evaluate.py --checkpoint copy", fault, places)
