"""Corpora of recipes and of the hub: which files are taken, from where, and what is refused."""

import hashlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron.config.load import load
from megatron.data.corpora import recipes
from megatron.data.corpora.download import matching
from megatron.data.corpora.recipes import (
    FromRecipe,
    at_hand,
    corpus_names,
    listing,
    named,
    read_recipe,
)
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from prepare_data import HUB, _parser, run
from tests.servers import COMMIT, Shown, served

ROOT = Path(__file__).parents[2]


def lines(*texts, part="ArXiv"):
    entries = [{"text": text, "n": 1, "meta": {"pile_set_name": part}} for text in texts]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with served() as server:
        server.files = {
            "/a.jsonl": Shown(lines("a one", "a two")),
            "/b.jsonl": Shown(lines("b one", part="Github")),
        }
        yield server


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Write recipes where the catalogue looks for them; returns their corpora."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.setattr(recipes, "RECIPES", folder)

    def corpus(sources, *, from_dir=None, limit=None, **more):
        facts = {"about": "a test", "licence": "none", "sources": sources} | more
        (folder / "mine.yml").write_text(yaml.safe_dump(facts))
        return FromRecipe("mine", read_recipe("mine"), tmp_path / "data", from_dir, limit)

    return corpus


def urls(server, *paths, **more):
    return {"urls": [server.address + path for path in paths], "tried": "not tried"} | more


def test_every_shipped_recipe_can_be_read_and_no_source_claims_to_be_tried():
    names = corpus_names()
    assert {"openwebtext2", "github", "arxiv", "pile", "pg19", "c4"} <= set(names)
    shown = listing().split("\n")
    assert [line.split(" ")[0] for line in shown] == names
    for name in set(names) - {"stdlib"}:
        [line] = [line for line in shown if line.startswith(f"{name} ")]
        recipe = read_recipe(name)
        assert line.count("(not tried)") == len(recipe.sources)
        assert recipe.about in line
    assert run(["--list"]) == listing()
    for name in ("github", "arxiv"):
        assert "RedPajama's" in read_recipe(name).is_not
        assert "do not compare with KERPLE's table" in read_recipe(f"{name}-redpajama").is_not


def test_every_data_file_is_of_a_corpus_that_can_be_prepared(tmp_path):
    for path in (ROOT / "configs/data").glob("*.yml"):
        config = load([ROOT / "configs/125M.yml", path], ["pos_emb=rotary"])
        name = path.stem
        assert named(name, tmp_path).name == name
        assert config.data.data_path == f"data/{name}/{name}_text_document"
        assert f"python prepare_data.py {name}" in path.read_text(encoding="utf-8")


def test_the_commands_of_the_page_about_data_are_known():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python prepare_data\.py (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        options = _parser().parse_args(shlex.split(command))
        if options.corpus and not options.corpus.startswith(HUB):
            assert options.corpus in corpus_names()


def test_files_are_downloaded_once_and_shared(server, write, tmp_path):
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl")])
    assert list(corpus.documents()) == ["a one", "a two", "b one"]
    sums = [hashlib.sha256(one.content).hexdigest() for one in server.files.values()]
    assert [source["sha256"] for source in corpus.sources()] == sums
    digest = hashlib.sha256(recipes.recipe_path("mine").read_bytes()).hexdigest()
    assert corpus.about == {"recipe": {"name": "mine", "sha256": digest}}
    server.asked.clear()
    again = write([urls(server, "/a.jsonl", "/b.jsonl")], keep={"meta.pile_set_name": "Github"})
    assert list(again.documents()) == ["b one"]
    assert server.asked == []
    kept = tmp_path / "data" / "download" / "127.0.0.1"
    assert sorted(os.listdir(kept)) == ["a.jsonl", "b.jsonl"]


def test_the_next_source_is_taken_and_where_none_is_left_each_reason_is_said(
    server, write, tmp_path, caplog
):
    corpus = write([urls(server, "/gone.jsonl"), urls(server, "/b.jsonl")])
    assert list(corpus.documents()) == ["b one"]
    assert "mine: a source cannot be used: http://127.0.0.1" in caplog.text
    wrong = urls(server, "/a.jsonl", sha256="0" * 64)
    corpus = write([urls(server, "/gone.jsonl"), wrong], at_hand=["*.jsonl.zst"])
    with pytest.raises(UserError) as raised:
        list(corpus.documents())
    message = str(raised.value)
    assert message.startswith("mine: no source can be used: (1) http://127.0.0.1")
    assert "404" in message
    assert "(2) http" in message
    assert "a.jsonl: the answer has another sha256" in message
    end = "prepare_data.py mine --from-dir DIR, with gone.jsonl or a.jsonl or *.jsonl.zst in it"
    assert message.endswith(end)
    assert not list(tmp_path.rglob("*a.jsonl*"))


def test_with_a_limit_only_the_files_that_it_needs_are_downloaded(server, write, tmp_path):
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]
    corpus = write(sources, limit=2)
    assert list(corpus.documents()) == ["a one", "a two"]
    assert [path for path, _ in server.asked] == ["/a.jsonl"]
    assert corpus.about["documents_limit"] == 2
    assert [Path(source["path"]).name for source in corpus.sources()] == ["a.jsonl"]
    hand = tmp_path / "data/download/127.0.0.1"
    (hand / "b.jsonl").write_bytes(lines("never read"))
    corpus = write(sources, limit=2, from_dir=hand)
    assert list(corpus.documents()) == ["a one", "a two"]
    assert [source["path"] for source in corpus.sources()] == [str(hand / "a.jsonl")]


def test_a_disk_that_is_too_small_is_known_before_a_byte_comes(server, write):
    corpus = write([urls(server, "/a.jsonl", bytes=10**18)])
    with pytest.raises(UserError, match=r"needs 1 EB and has .* free - free some space"):
        list(corpus.documents())
    assert server.asked == []


def test_files_at_hand_need_no_network(server, write, tmp_path):
    folder = tmp_path / "hand"
    (folder / "deep").mkdir(parents=True)
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]

    def read(sources, **more):
        return list(write(sources, from_dir=folder, **more).documents())

    with pytest.raises(UserError, match=r"has no files of mine, which are a.jsonl or b.jsonl"):
        read(sources)
    (folder / "deep" / "own.jsonl").write_bytes(lines("own"))
    assert read(sources, at_hand=["*.jsonl"]) == ["own"]
    (folder / "deep" / "a.jsonl").write_bytes(lines("copied"))
    with pytest.raises(UserError, match="has 1 of the 2 files of mine - get the others, or"):
        read(sources, at_hand=["*.jsonl"])
    (folder / "b.jsonl").write_bytes(lines("too"))
    assert read(sources) == ["copied", "too"]
    with pytest.raises(UserError, match=r"deep/a.jsonl has another sha256 than the file of the re"):
        read([urls(server, "/a.jsonl", sha256="0" * 64)])
    assert server.asked == []


def test_a_copy_of_a_whole_data_set_gives_the_files_of_the_recipes_folder(tmp_path, caplog):
    patterns = ["wikitext-103-raw-v1/train-*.parquet", "wikitext-103-raw-v1/test-*.parquet"]
    names = ["wikitext-103-raw-v1/train-0.parquet", "wikitext-103-raw-v1/test-0.parquet"]
    deep = [f"deep/{name}" for name in names]
    elsewhere = ["x/train-0.parquet", "y/test-0.parquet"]
    assert matching([*names, "wikitext-2-raw-v1/train-0.parquet"], patterns) == names
    assert matching(deep, patterns) == deep
    assert matching(elsewhere, patterns) == elsewhere
    assert matching(["wikitext-2-raw-v1-train-0.parquet", "a.txt"], patterns) == []
    pile = tmp_path / "00.jsonl.zst"
    pile.touch()
    with pytest.raises(UserError, match=r"--from-dir: .* has no files of openwebtext2, which are"):
        at_hand("openwebtext2", read_recipe("openwebtext2"), tmp_path)
    own = tmp_path / "scrapes_1_final.jsonl.zst"
    own.touch()
    assert at_hand("openwebtext2", read_recipe("openwebtext2"), tmp_path) == [own]
    assert f"openwebtext2: takes 1 files whose names fit, from {own}" in caplog.text


def test_the_command_prepares_a_corpus_and_its_card_names_the_recipe(
    server, write, tmp_path, caplog
):
    write([urls(server, "/a.jsonl", "/b.jsonl")])
    words = ["mine", "-d", str(tmp_path / "data"), "--vocab-size", "300"]
    assert "mine: 3 documents" in run(words)
    tokens = TokenFile.open(tmp_path / "data/mine/mine_text_document")
    assert tokens.meta["recipe"]["name"] == "mine"
    server.asked.clear()
    assert run(words).startswith("already prepared\n")
    with pytest.raises(UserError, match="exists already, prepared with other documents"):
        run([*words, "--documents", "3"])
    assert "mine: the tokens are not compared with the files of the network" in caplog.text
    assert server.asked == []


def test_gpt2s_files_are_downloaded_or_taken_from_files_at_hand(
    server, monkeypatch, tmp_path, caplog
):
    contents = {"gpt2-vocab.json": b'{"a": 0}', "gpt2-merges.txt": b"#version: 0.2\n"}
    files = []
    for name, content in contents.items():
        server.files[f"/{name}"] = Shown(content)
        sha256 = hashlib.sha256(content).hexdigest()
        places = [f"{server.address}/gone/{name}", f"{server.address}/{name}"]
        facts = {"name": name, "bytes": len(content), "sha256": sha256, "urls": places}
        files.append(facts | {"names": [name.removeprefix("gpt2-")]})
    monkeypatch.setattr(recipes, "GPT2", tmp_path / "gpt2.yml")
    recipes.GPT2.write_text(yaml.safe_dump({"files": files}))

    data = tmp_path / "data"
    for _ in range(2):
        printed = run(["--tokenizer-files", "-d", str(data)])
    assert printed == "\n".join(str(data / name) for name in contents)
    assert {name: (data / name).read_bytes() for name in contents} == contents
    server.files.clear()
    hand = tmp_path / "hand"
    hand.mkdir()
    (hand / "vocab.json").write_bytes(contents["gpt2-vocab.json"])
    words = ["--tokenizer-files", "-d", str(tmp_path / "other"), "--from-dir", str(hand)]
    with pytest.raises(UserError, match=r"gpt2-merges\.txt: cannot be had: neither .*hand nor"):
        run(words)
    (tmp_path / "merges.txt").write_bytes(contents["gpt2-merges.txt"])  # in the folder above
    run(words)
    (data / "gpt2-merges.txt").write_bytes(b"my own")
    run(["--tokenizer-files", "-d", str(data)])
    assert "gpt2-merges.txt: is not GPT-2's own file; it is used as it is" in caplog.text
    with pytest.raises(UserError, match=r"gpt2-vocab\.json: cannot be had: .*404"):
        run(["--tokenizer-files", "-d", str(tmp_path / "third")])


def test_the_shipped_checksums_are_those_of_openais_files():
    shipped = yaml.safe_load(recipes.GPT2.read_text())["files"]
    facts = [(one["bytes"], one["sha256"][:8], one["sha256"][-4:]) for one in shipped]
    assert facts == [(1_042_301, "19613966", "6783"), (456_318, "1ce16647", "adc5")]


# --- The hub ---

NAME = "someone/texts"
CODE = """
import sys
from pathlib import Path
from prepare_data import main
from megatron.data.corpora import recipes
if Path("recipes").is_dir():
    recipes.RECIPES = Path("recipes")
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] + ["--vocab-size", "300"]))
"""
"""Recipes of the current folder, and a tokenizer that needs no file."""
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
            "PYTHONPATH": str(ROOT),
        }
        return forks.run(tmp_path / "prepare.py", *words, cwd=tmp_path, env=environment)

    return command


def write_recipe(folder, **source):
    facts = {"about": "a test", "licence": "none", "sources": [{"tried": "no"} | source]}
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
    [list_of_files] = (tmp_path / "data/download/someone--texts").glob("listing-*.json")
    assert COMMIT in list_of_files.read_text()
    hub.shutdown()  # now there is no network
    done = prepare("mine", "--overwrite")
    assert done.returncode == 0, done.stderr


def test_a_data_set_that_only_lists_addresses_is_followed(hub, prepare, tmp_path):
    books = {"train/1.txt": b"one book", "train/2.txt": b"another"}
    base = f"{hub.address}/datasets/{NAME}/resolve/main/"
    of_list = {"hub": NAME, "address_list": "data/list.txt"}
    hub.show_dataset(NAME, {"data/list.txt": "\n".join(books).encode(), **books})
    write_recipe(tmp_path, **of_list, base=base, count=2)
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    assert len(documents(tmp_path, "mine")) == 2
    hub.show_dataset(NAME, {"data/list.txt": b"../../../outside.txt"})
    write_recipe(tmp_path, **of_list, base=base)
    (tmp_path / "home").rename(tmp_path / "used")
    done = prepare("mine", "-d", "other")
    assert done.returncode == 1
    assert "lists '../../../outside.txt'" in done.stderr
    assert not list(tmp_path.rglob("outside*"))


def test_any_data_set_is_read_as_a_stream(hub, prepare, tmp_path):
    done = prepare("hf:someone/texts", "--documents", "2")
    assert done.returncode == 0, done.stderr
    tokens = documents(tmp_path, "texts")
    assert len(tokens) == 2
    [source] = tokens.meta["sources"]
    assert (source["dataset"], source["split"], source["commit"]) == (NAME, "train", COMMIT)
    assert tokens.meta["documents_limit"] == 2
    assert "validation-0.jsonl" not in {path.rpartition("/")[2] for path, _ in hub.asked}
    assert not (tmp_path / "data/download").exists()
    for words, message in {
        "--revision v9": "hf:someone/texts: cannot be read (",
        "--text-key txt": "row 1 has no text in column 'txt', it has the columns text",
    }.items():
        done = prepare("hf:someone/texts", *words.split(), "-d", "other")
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.strip().split("\n")) == 1, done.stderr
        assert not (tmp_path / "other").exists()
