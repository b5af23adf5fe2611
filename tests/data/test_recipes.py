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
    WITHOUT_RECIPE,
    FromRecipe,
    at_hand,
    corpus_names,
    named,
    read_recipe,
)
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.files import ROOT
from prepare_data import HUB, _parser, run
from tests.servers import COMMIT, Shown, served


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
def write(monkeypatch):
    """Write recipes where the catalogue looks for them; returns their corpora."""
    folder = Path("recipes")
    folder.mkdir()
    monkeypatch.setattr(recipes, "RECIPES", folder)

    def corpus(sources, *, from_dir=None, limit=None, part=(1, 1), **more):
        facts = {"about": "a test", "licence": "none", "sources": sources} | more
        (folder / "mine.yml").write_text(yaml.safe_dump(facts))
        made = FromRecipe("mine", read_recipe("mine"), Path("data"), from_dir, limit)
        made.part = part
        return made

    return corpus


def urls(server, *paths, **more):
    return {"urls": [server.address + path for path in paths], "tried": "not tried"} | more


def test_every_shipped_recipe_has_a_data_file_and_claims_nothing_that_was_not_tried(tmp_path):
    names = corpus_names()
    shown = run(["--list"]).partition("\n\n")[0].split("\n")
    assert [line.split(" ")[0] for line in shown] == names
    assert sorted(path.stem for path in (ROOT / "configs/data").glob("*.yml")) == names
    for name, line in zip(names, shown, strict=True):
        path = ROOT / f"configs/data/{name}.yml"
        config = load([ROOT / "configs/125M.yml", path], ["pos_emb=rotary"])
        assert named(name, tmp_path).name == name
        assert config.data.data_path == f"data/{name}/{name}_text_document"
        if name not in WITHOUT_RECIPE:
            assert line.count("(not tried)") == len(read_recipe(name).sources)
    for name in ("github", "arxiv"):
        assert read_recipe(name).keep.keys() == {"meta.pile_set_name"}
        assert "do not compare with KERPLE's table" in read_recipe(f"{name}-redpajama").is_not
    gpt2 = yaml.safe_load(recipes.GPT2.read_text())["files"]
    facts = [(file["bytes"], file["sha256"][:8], file["sha256"][-4:]) for file in gpt2]
    assert facts == [(1_042_301, "19613966", "6783"), (456_318, "1ce16647", "adc5")]  # OpenAI's


def test_the_commands_of_the_page_about_data_are_known():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python prepare_data\.py (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        options = _parser().parse_args(shlex.split(command))
        if options.corpus and not options.corpus.startswith(HUB):
            assert options.corpus in corpus_names()


def test_files_are_downloaded_once_and_shared_and_the_card_names_the_recipe(server, write, caplog):
    write([urls(server, "/a.jsonl", "/b.jsonl")])
    words = ["mine", "-d", "data", "--vocab-size", "300"]
    assert "mine: 3 documents" in run(words)
    card = TokenFile.open("data/mine/mine_text_document").meta
    digest = hashlib.sha256(recipes.recipe_path("mine").read_bytes()).hexdigest()
    assert card["recipe"] == {"name": "mine", "sha256": digest}
    sums = [hashlib.sha256(shown.content).hexdigest() for shown in server.files.values()]
    assert [source["sha256"] for source in card["sources"]] == sums
    server.asked.clear()
    assert run(words).startswith("already prepared\n")
    assert "mine: the tokens are not compared with the files of the network" in caplog.text
    with pytest.raises(UserError, match="exists already, prepared with other documents"):
        run([*words, "--documents", "3"])
    again = write([urls(server, "/a.jsonl", "/b.jsonl")], keep={"meta.pile_set_name": "Github"})
    assert list(again.documents()) == ["b one"]
    assert server.asked == []
    downloads = Path("data/download/127.0.0.1")
    assert sorted(os.listdir(downloads)) == ["a.jsonl", "b.jsonl"]


def test_the_next_source_is_taken_and_where_none_is_left_each_reason_is_said(server, write, caplog):
    corpus = write([urls(server, "/gone.jsonl"), urls(server, "/b.jsonl")])
    assert list(corpus.documents()) == ["b one"]
    assert "mine: a source cannot be used: http://127.0.0.1" in caplog.text
    wrong = urls(server, "/a.jsonl", sha256="0" * 64)
    large = urls(server, "/a.jsonl", bytes=10**18)
    corpus = write([urls(server, "/gone.jsonl"), wrong], at_hand=["*.jsonl.zst"])
    end = "prepare_data.py mine --from-dir DIR, with gone.jsonl or a.jsonl or *.jsonl.zst in it"
    with pytest.raises(UserError) as raised:
        list(corpus.documents())
    for part in (
        "mine: no source can be used: (1) http://127.0.0.1",
        "404",
        "(2) http",
        "a.jsonl: the answer has another sha256",
        end,
    ):
        assert part in str(raised.value)
    assert not list(Path().rglob("*a.jsonl*"))
    server.asked.clear()
    with pytest.raises(UserError, match=r"needs 1 EB and has .* free - free some space"):
        list(write([large]).documents())
    assert server.asked == []


def test_with_a_limit_only_the_files_that_it_needs_are_downloaded(server, write):
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]
    corpus = write(sources, limit=2)
    assert list(corpus.documents()) == ["a one", "a two"]
    assert [path for path, _ in server.asked] == ["/a.jsonl"]
    assert corpus.about["documents_limit"] == 2
    assert [Path(source["path"]).name for source in corpus.sources()] == ["a.jsonl"]


def test_a_part_downloads_its_own_files_alone(server, write):
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]
    assert list(write(sources, part=(2, 2)).documents()) == ["b one"]
    assert [path for path, _ in server.asked] == ["/b.jsonl"]
    with pytest.raises(
        UserError, match=r"--part: 3 parts need as many files, .* has 2 - take fewer"
    ):
        list(write(sources, part=(1, 3)).documents())


def test_files_at_hand_need_no_network(server, write):
    folder = Path("hand")
    (folder / "deep").mkdir(parents=True)
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]

    def read(sources, **more):
        return list(write(sources, from_dir=folder, **more).documents())

    (folder / "deep" / "own.jsonl").write_bytes(lines("own"))
    assert read(sources, at_hand=["*.jsonl"]) == ["own"]
    (folder / "deep" / "a.jsonl").write_bytes(lines("copied"))
    with pytest.raises(UserError, match="has 1 of the 2 files of mine - get the others, or"):
        read(sources, at_hand=["*.jsonl"])
    (folder / "b.jsonl").write_bytes(lines("too"))
    assert read(sources) == ["copied", "too"]
    assert [read(sources, part=(number, 2)) for number in (1, 2)] == [["copied"], ["too"]]
    with pytest.raises(UserError, match=r"deep/a.jsonl has another sha256 than the file of the re"):
        read([urls(server, "/a.jsonl", sha256="0" * 64)])
    assert server.asked == []


def test_a_copy_of_a_whole_data_set_gives_the_files_of_the_recipes_folder(caplog):
    patterns, names = ["v1/train-*", "v1/test-*"], ["v1/train-0", "v1/test-0"]
    deep, elsewhere = ["deep/v1/train-0", "deep/v1/test-0"], ["x/train-0", "y/test-0"]
    assert matching([*names, "v2/train-0"], patterns) == names
    assert matching(deep, patterns) == deep
    assert matching(elsewhere, patterns) == elsewhere
    assert matching(["v2-train-0", "a.txt"], patterns) == []
    Path("00.jsonl.zst").touch()  # of the Pile
    with pytest.raises(UserError, match=r"--from-dir: .* has no files of openwebtext2, which are"):
        at_hand("openwebtext2", read_recipe("openwebtext2"), Path())
    scrape = Path("scrapes_1_final.jsonl.zst")
    scrape.touch()
    assert at_hand("openwebtext2", read_recipe("openwebtext2"), Path()) == [scrape]
    assert f"openwebtext2: takes 1 files whose names fit, from {scrape}" in caplog.text


def test_gpt2s_files_are_downloaded_or_taken_from_files_at_hand(server, monkeypatch):
    contents = {"gpt2-vocab.json": b'{"a": 0}', "gpt2-merges.txt": b"#version: 0.2\n"}
    files = []
    for name, content in contents.items():
        server.files[f"/{name}"] = Shown(content)
        sha256 = hashlib.sha256(content).hexdigest()
        places = [f"{server.address}/gone/{name}", f"{server.address}/{name}"]
        facts = {"name": name, "bytes": len(content), "sha256": sha256, "urls": places}
        files.append(facts | {"names": [name.removeprefix("gpt2-")]})
    monkeypatch.setattr(recipes, "GPT2", Path("gpt2.yml"))
    recipes.GPT2.write_text(yaml.safe_dump({"files": files}))

    data = Path("data")
    printed = run(["--tokenizer-files", "-d", str(data)])
    assert printed == "\n".join(str(data / name) for name in contents)
    assert {name: (data / name).read_bytes() for name in contents} == contents
    server.files.clear()
    for name, content in contents.items():
        Path(name.removeprefix("gpt2-")).write_bytes(content)
    Path("hand").mkdir()  # they are in the folder above
    other = Path("other")
    run(["--tokenizer-files", "-d", str(other), "--from-dir", "hand"])
    assert {name: (other / name).read_bytes() for name in contents} == contents
    Path("merges.txt").write_bytes(b"other")
    with pytest.raises(UserError, match=r"gpt2-merges\.txt: cannot be had: neither .*hand nor"):
        run(
            [
                "--tokenizer-files",
                "-d",
                "third",
                "--from-dir",
                "hand",
            ]
        )


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
    Path("prepare.py").write_text(CODE)

    def command(*words):
        environment = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": "home",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
        }
        return forks.run(Path("prepare.py"), *words, cwd=tmp_path, env=environment)

    return command


def write_recipe(folder, **source):
    facts = {"about": "a test", "licence": "none", "sources": [{"tried": "no"} | source]}
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "recipes" / "mine.yml").write_text(yaml.safe_dump(facts))


def test_the_files_of_a_data_set_are_downloaded_at_one_commit(hub, prepare, tmp_path):
    write_recipe(tmp_path, hub=NAME, files=["data/train-*.jsonl"], count=2)
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    sources = TokenFile.open("data/mine/mine_text_document").meta["sources"]
    sums = [hashlib.sha256(FILES[f"data/train-{number}.jsonl"]).hexdigest() for number in (0, 1)]
    assert [source["sha256"] for source in sources] == sums
    [list_of_files] = Path("data/download/someone--texts").glob("listing-*.json")
    assert COMMIT in list_of_files.read_text()
    hub.shutdown()  # now there is no network
    done = prepare("mine", "--overwrite")
    assert done.returncode == 0, done.stderr


def test_a_data_set_that_only_lists_addresses_is_followed_but_not_out_of_its_folder(
    hub, prepare, tmp_path
):
    books = {"train/1.txt": b"one book", "train/2.txt": b"another"}
    base = f"{hub.address}/datasets/{NAME}/resolve/main/"
    list_source = {"hub": NAME, "address_list": "data/list.txt", "base": base}
    hub.show_dataset(NAME, {"data/list.txt": "\n".join(books).encode(), **books})
    write_recipe(tmp_path, **list_source, count=2)
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    assert len(TokenFile.open("data/mine/mine_text_document")) == 2
    hub.show_dataset(NAME, {"data/list.txt": b"../../../outside.txt"})
    write_recipe(tmp_path, **list_source)
    Path("home").rename(Path("used"))
    done = prepare("mine", "-d", "other")
    assert done.returncode == 1
    assert "lists '../../../outside.txt'" in done.stderr
    assert not list(Path().rglob("outside*"))


def test_any_data_set_is_read_as_a_stream(hub, prepare):
    keys = ["--text-key", "no", "--text-key", "text"]
    done = prepare("hf:someone/texts", "--documents", "2", *keys)
    assert done.returncode == 0, done.stderr
    tokens = TokenFile.open("data/texts/texts_text_document")
    assert (len(tokens), tokens.meta["documents_limit"]) == (2, 2)
    [source] = tokens.meta["sources"]
    assert (source["dataset"], source["split"], source["commit"]) == (NAME, "train", COMMIT)
    assert "validation-0.jsonl" not in {path.rpartition("/")[2] for path, _ in hub.asked}
    assert not Path("data/download").exists()
    for words, message in {
        "--revision v9": "hf:someone/texts: cannot be read (",
        "--text-key txt": "row 1: has no text under 'txt', it is {'meta': {",
    }.items():
        done = prepare("hf:someone/texts", *words.split(), "-d", "other")
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.strip().split("\n")) == 1, done.stderr
        assert not Path("other").exists()
