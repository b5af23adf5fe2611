"""Data sets of the hub, from a small hub on this machine and from a folder in the hub's layout."""

import hashlib
import json
import os
import random
import signal
from pathlib import Path

import pytest
import yaml

from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from prepare_data import run
from tests.servers import COMMIT, Shown, served

NAME = "someone/texts"
CODE = """
import sys
from pathlib import Path
from prepare_data import main
from megatron.data.corpora import recipe
if Path("recipes").is_dir():
    recipe.RECIPES = Path("recipes")
sys.exit(main(sys.argv[1:] + ["--vocab-size", "300"]))
"""
"""Recipes of the current folder, and a tokenizer that needs no file."""


def lines(*texts):
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


FILES = {
    "data/train-0.jsonl": lines("first", "second"),
    "data/train-1.jsonl": lines("third"),
    "data/validation-0.jsonl": lines("held out"),
}


@pytest.fixture
def hub():
    with served() as server:
        server.show_dataset(NAME, FILES)
        yield server


@pytest.fixture
def prepare(hub, forks, tmp_path):
    """Run the command where this hub is the only one."""
    (tmp_path / "prepare.py").write_text(CODE)

    def command(*words):
        environment = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        return forks.run(tmp_path / "prepare.py", *words, cwd=tmp_path, env=environment)

    return command


def write_recipe(folder, **source):
    facts = {"about": "a test", "licence": "none", "at_hand": ["*.jsonl"]}
    facts["sources"] = [{"tried": "not tried"} | source]
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "recipes" / "mine.yml").write_text(yaml.safe_dump(facts))


def documents(folder, name):
    return TokenFile.open(folder / f"data/{name}/{name}_text_document")


def test_the_files_of_a_data_set_are_downloaded_at_one_commit(hub, prepare, tmp_path):
    write_recipe(tmp_path, hub=NAME, files=["data/train-*.jsonl"], count=2)
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    tokens = documents(tmp_path, "mine")
    assert len(tokens) == 3
    names = ["data/train-0.jsonl", "data/train-1.jsonl"]
    sums = [hashlib.sha256(FILES[name]).hexdigest() for name in names]
    assert [source["sha256"] for source in tokens.meta["sources"]] == sums
    folder = tmp_path / "data/download/someone--texts"
    [listing] = folder.glob("listing-*.json")
    assert sorted(os.listdir(folder)) == ["data", listing.name]
    assert sorted(os.listdir(folder / "data")) == ["train-0.jsonl", "train-1.jsonl"]
    assert COMMIT in listing.read_text()
    hub.shutdown()  # now there is no network
    done = prepare("mine", "--overwrite")
    assert done.returncode == 0, done.stderr


def test_files_of_an_earlier_listing_are_not_mixed_with_those_of_a_new_one(hub, prepare, tmp_path):
    write_recipe(tmp_path, hub=NAME, files=["data/train-*.jsonl"])
    assert prepare("mine").returncode == 0
    hub.show_dataset(NAME, FILES | {"data/train-1.jsonl": lines("THIRD")})  # of the same size
    assert prepare("mine", "--overwrite").returncode == 0
    [listing] = (tmp_path / "data/download/someone--texts").glob("listing-*.json")
    second = tmp_path / "data/download/someone--texts/data/train-1.jsonl"
    assert second.read_bytes() == lines("third")
    listing.unlink()  # docs/data.md: take today's version
    hub.asked.clear()
    done = prepare("mine", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "is listed anew; 2 files are compared" in done.stderr
    assert second.read_bytes() == lines("THIRD")
    assert not any(path.endswith("train-0.jsonl") for path, _ in hub.asked)


def test_files_with_wrong_bytes_get_no_name(hub, prepare, tmp_path):
    write_recipe(tmp_path, hub=NAME, files=["data/train-*.jsonl"])
    place = f"/datasets/{NAME}/resolve/{COMMIT}/data/train-1.jsonl"
    hub.files[place].content = FILES["data/train-1.jsonl"].replace(b"third", b"THIRD")
    done = prepare("mine")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.split("\n") if "no source can be used" in line]
    assert "data/train-1.jsonl has the sha256" in line
    assert not list((tmp_path / "data").rglob("train-1*"))


def test_a_data_set_that_only_lists_addresses_is_followed(hub, prepare, tmp_path):
    books = {"train/1.txt": b"one book", "train/2.txt": b"another"}
    hub.show_dataset(NAME, {"data/train_files.txt": "\n".join(books).encode(), **books})
    base = f"{hub.address}/datasets/{NAME}/resolve/main/"
    write_recipe(tmp_path, hub=NAME, address_list="data/train_files.txt", base=base, count=2)
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    assert len(documents(tmp_path, "mine")) == 2
    write_recipe(tmp_path, hub=NAME, address_list="data/train_files.txt", base=base, count=3)
    done = prepare("mine", "-d", "other")
    assert done.returncode == 1
    assert "it lists 2 files, not 3" in done.stderr


def test_two_files_of_one_name_are_not_written_over_each_other(hub, prepare, tmp_path):
    hub.show_dataset(NAME, {"list.txt": b"http://one.org/1.txt http://other.org/1.txt"})
    write_recipe(tmp_path, hub=NAME, address_list="list.txt")
    done = prepare("mine")
    assert done.returncode == 1
    assert "the data set someone/texts lists two files '1.txt'" in done.stderr


def test_a_list_of_addresses_cannot_name_files_outside(hub, prepare, tmp_path):
    hub.show_dataset(NAME, {"data/train_files.txt": b"../../../outside.txt"})
    base = f"{hub.address}/datasets/{NAME}/resolve/main/"
    write_recipe(tmp_path, hub=NAME, address_list="data/train_files.txt", base=base)
    done = prepare("mine")
    assert done.returncode == 1
    assert "lists '../../../outside.txt', which is no file's name" in done.stderr
    assert not list(tmp_path.rglob("outside*"))


WRONG = {
    "other": (["hf:someone/other"], "hf:someone/other: the hub has no such data set, or you need"),
    "revision": (
        ["hf:someone/texts", "--revision", "v9"],
        "--revision: hf:someone/texts has no v9",
    ),
}
WRONG_IN_A_FOLDER = {
    "split": (["--split", "dev"], "--split: hf:someone/texts: Bad split: dev. Available splits"),
    "key": (["--text-key", "txt"], "has no column 'txt' - did you mean text? Its columns are text"),
    "number": (["--text-key", "n"], "row 1: 'n' is int, not text - choose another column"),
    "config": (["--config", "big"], "--config: hf:someone/texts: BuilderConfig 'big' not found"),
}


def test_any_data_set_is_read_as_a_stream(hub, prepare, tmp_path):
    done = prepare("hf:someone/texts", "--documents", "2")
    assert done.returncode == 0, done.stderr
    tokens = documents(tmp_path, "texts")
    assert len(tokens) == 2
    [source] = tokens.meta["sources"]
    assert (source["dataset"], source["split"], source["commit"]) == (NAME, "train", COMMIT)
    assert tokens.meta["documents_limit"] == 2
    asked = {path.rpartition("/")[2] for path, _ in hub.asked}
    assert "validation-0.jsonl" not in asked
    assert not (tmp_path / "data/download").exists()


@pytest.mark.parametrize("case", WRONG)
def test_what_the_hub_does_not_have_is_one_message(prepare, tmp_path, case):
    words, message = WRONG[case]
    done = prepare(*words)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1, done.stderr
    assert not (tmp_path / "data").exists()


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "copy"


def test_a_folder_in_the_hubs_layout_needs_no_network(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    words = ["hf:someone/texts", "--from-dir", str(folder), "-d", str(tmp_path / "data")]
    run([*words, "--split", "validation", "--vocab-size", "300", "--name", "small"])
    tokens = documents(tmp_path, "small")
    assert len(tokens) == 1
    [source] = tokens.meta["sources"]
    assert source["commit"] is None
    assert set(source["files"]) == set(FILES)
    with pytest.raises(UserError, match="exists already, prepared from other sources"):
        run([*words, "--split", "train", "--vocab-size", "300", "--name", "small"])


@pytest.mark.parametrize("case", WRONG_IN_A_FOLDER)
def test_what_a_data_set_does_not_have_is_one_message(folder, tmp_path, monkeypatch, case):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    more, message = WRONG_IN_A_FOLDER[case]
    words = ["hf:someone/texts", "--from-dir", str(folder), "-d", str(tmp_path / "data"), *more]
    with pytest.raises(UserError) as raised:
        run([*words, "--vocab-size", "300"])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "data").exists()


def test_a_script_in_a_folder_is_not_run(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "copy.py").write_text("raise SystemExit('this was run')")
    words = ["hf:someone/texts", "--from-dir", str(tmp_path / "copy"), "--vocab-size", "300"]
    with pytest.raises(UserError, match="hf:someone/texts: "):
        run([*words, "-d", str(tmp_path / "data")])


def token_bytes(folder):
    prefix = folder / "mine/mine_text_document"
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.campaign
@pytest.mark.parametrize("limited", [(), ("--documents", "5000")])
@pytest.mark.parametrize("seed", range(5))
def test_a_command_that_was_killed_gives_the_same_tokens(forks, tmp_path, seed, limited):
    draw = random.Random(seed)
    (tmp_path / "prepare.py").write_text(CODE)
    words = (tmp_path / "prepare.py", "mine", "--workers", "1", *limited)
    with served() as server:
        for number in range(3):
            texts = [" ".join(draw.choices("abcdefgh", k=60)) for _ in range(2_000)]
            server.files[f"/{number}.jsonl"] = Shown(lines(*texts))
        write_recipe(tmp_path, urls=[server.address + path for path in server.files])
        for _ in range(4):
            waiting, go_on = server.pause_after(draw.randrange(60))
            process = forks.start(*words, log=tmp_path / "log", cwd=tmp_path)
            while not waiting.wait(0.01) and forks.poll(process) is None:
                pass
            if forks.poll(process) is None:
                os.kill(process, signal.SIGKILL)
                assert forks.wait(process) == -signal.SIGKILL
            go_on.set()
        server.hook = lambda: None
        assert forks.run(*words, cwd=tmp_path).returncode == 0
        assert forks.run(*words, "-d", "whole", cwd=tmp_path).returncode == 0
    assert token_bytes(tmp_path / "data") == token_bytes(tmp_path / "whole")
    names = os.listdir(tmp_path / "data/download/127.0.0.1")
    assert not [name for name in names if "partial" in name or name.endswith(".tmp")]
