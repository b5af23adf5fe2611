"""Corpora of recipes and of the hub: which files are taken, from where, and what is refused."""

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron.config.load import load
from megatron.data.corpora import recipes
from megatron.data.corpora.recipes import at_hand, corpus_names, matching, named, read_recipe
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.files import ROOT
from prepare_data import HUB, _parser, run
from tests.servers import COMMIT, served

NAME = "someone/texts"


def lines(*texts, part="ArXiv"):
    entries = [{"text": text, "n": 1, "meta": {"pile_set_name": part}} for text in texts]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


FILES = {
    "data/train-0.jsonl": lines("first", "second"),
    "data/train-1.jsonl": lines("third", part="Github"),
    "data/validation-0.jsonl": lines("held out"),
}
TRAIN = {"hub": NAME, "files": ["data/train-*.jsonl"], "count": 2}


@pytest.fixture
def hub():
    with served() as server:
        server.show_dataset(NAME, FILES)
        yield server


CODE = """
import sys
from pathlib import Path
from prepare_data import main
from megatron.data.corpora import recipes
recipes.RECIPES = Path("recipes")
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] + ["--vocab-size", "300"]))
"""
"""Recipes of the current folder, and a tokenizer that needs no file."""


@pytest.fixture
def prepare(hub, forks, tmp_path):
    """Run the command where this hub is the only one."""
    Path("prepare.py").write_text(CODE)
    Path("recipes").mkdir()

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


def write_recipe(**facts):
    facts = {"about": "a test", "licence": "none"} | facts
    Path("recipes/mine.yml").write_text(yaml.safe_dump(facts))


def test_every_shipped_recipe_has_a_data_file_and_says_what_it_is_not(tmp_path):
    names = corpus_names()
    shown = run(["--list"]).partition("\n\n")[0].split("\n")
    assert [line.split(" ")[0] for line in shown] == names
    assert sorted(path.stem for path in (ROOT / "configs/data").glob("*.yml")) == names
    for name in names:
        path = ROOT / f"configs/data/{name}.yml"
        config = load([ROOT / "configs/125M.yml", path], ["pos_emb=rotary"])
        assert named(name, tmp_path).name == name
        assert config.data.data_path == f"data/{name}/{name}_text_document"
    for name in ("github", "arxiv"):
        assert read_recipe(name).keep.keys() == {"meta.pile_set_name"}
        assert "do not compare with KERPLE's table" in read_recipe(f"{name}-redpajama").is_not


def test_the_commands_of_the_page_about_data_are_known():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python prepare_data\.py (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        options = _parser().parse_args(shlex.split(command))
        if options.corpus and not options.corpus.startswith(HUB):
            assert options.corpus in corpus_names()


def test_the_files_of_a_data_set_are_downloaded_once_at_one_commit(hub, prepare):
    write_recipe(**TRAIN)
    path = f"/datasets/{NAME}/resolve/{COMMIT}/data/train-0.jsonl"
    hub.breaks[path] = [40]
    done = prepare("mine")
    assert done.returncode == 0, done.stderr
    assert hub.breaks[path] == []  # after a broken connection it is asked for once more
    card = TokenFile("data/mine/mine_text_document").meta
    digest = hashlib.sha256(Path("recipes/mine.yml").read_bytes()).hexdigest()
    assert card["recipe"] == {"name": "mine", "sha256": digest}
    sums = [hashlib.sha256(FILES[f"data/train-{number}.jsonl"]).hexdigest() for number in (0, 1)]
    assert [source["sha256"] for source in card["sources"]] == sums
    assert card["documents"] == 3
    hub.asked.clear()
    write_recipe(**TRAIN, keep={"meta.pile_set_name": "Github"})
    done = prepare("mine", "-d", "data", "--overwrite")
    assert "mine: 1 documents" in done.stdout
    assert not [place for place, _ in hub.asked if "/resolve/" in place]
    hub.shutdown()  # now there is no network
    hub.server_close()
    done = prepare("mine")
    assert "the existing tokens were not compared with the files online" in done.stderr
    done = prepare("mine", "--overwrite")
    assert f"hf:{NAME}: cannot be read (" in done.stderr
    assert "--from-dir DIR, with data/train-*.jsonl in it" in done.stderr
    done = prepare("mine", "--overwrite", "--from-dir", "data/download/someone--texts")
    assert done.returncode == 0, done.stderr


def test_with_a_limit_only_the_files_that_it_needs_are_downloaded(hub, prepare):
    def downloaded():
        return {path.rpartition("/")[2] for path, _ in hub.asked if "/resolve/" in path}

    write_recipe(**TRAIN)
    done = prepare("mine", "--documents", "2")
    assert done.returncode == 0, done.stderr
    assert downloaded() == {"train-0.jsonl"}
    card = TokenFile("data/mine/mine_text_document").meta
    assert (card["documents_limit"], len(card["sources"])) == (2, 1)
    write_recipe(**TRAIN | {"count": 3})
    done = prepare("mine", "-d", "third")
    assert f"hf:{NAME}: has 2 of the 3 files - " in done.stderr
    write_recipe(by_hand="wget it")
    done = prepare("mine", "-d", "third")
    assert "mine: is not on the hub - wget it; then try again" in done.stderr
    assert not Path("third").exists()


def test_files_at_hand_need_no_network(monkeypatch, caplog):
    monkeypatch.setattr(recipes, "RECIPES", Path("recipes"))
    Path("recipes").mkdir()
    folder = Path("hand")
    (folder / "deep").mkdir(parents=True)

    def read():
        return list(named("mine", Path("data"), from_dir=folder).documents())

    write_recipe(**TRAIN, at_hand=["*.jsonl"])
    with pytest.raises(UserError, match=r"--from-dir: hand has no files of mine \(data/"):
        read()
    (folder / "deep" / "own.jsonl").write_bytes(lines("own"))
    assert read() == ["own"]
    assert "mine: using 1 files with matching names" in caplog.text
    (folder / "deep" / "train-0.jsonl").write_bytes(lines("copied"))
    with pytest.raises(UserError, match="has 1 of the 2 files - get the other files, or"):
        read()
    (folder / "train-1.jsonl").write_bytes(lines("too"))
    assert read() == ["copied", "too"]


def test_a_copy_of_a_whole_data_set_gives_the_files_of_the_recipes_folder():
    patterns, names = ["v1/train-*", "v1/test-*"], ["v1/train-0", "v1/test-0"]
    deep, elsewhere = ["deep/v1/train-0", "deep/v1/test-0"], ["x/train-0", "y/test-0"]
    assert matching([*names, "v2/train-0"], patterns) == names
    assert matching(deep, patterns) == deep
    assert matching(elsewhere, patterns) == elsewhere
    assert matching(["v2-train-0", "a.txt"], patterns) == []
    scrape = Path("scrapes_1_final.jsonl.zst")
    for path in (scrape, Path("00.jsonl.zst")):  # the second is the Pile's
        path.touch()
    assert at_hand("openwebtext2", read_recipe("openwebtext2"), Path()) == [scrape]


def test_gpt2s_files_are_downloaded_and_must_be_openais(monkeypatch):
    contents = {"vocab.json": b'{"a": 0}', "merges.txt": b"#version: 0.2\n"}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name: name)
    with pytest.raises(
        UserError, match=r"its vocab\.json is not OpenAI's file - copy GPT-2's vocab"
    ):
        recipes.gpt2_files(Path("data"))
    sums = {
        f"gpt2-{name}": (name, hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    monkeypatch.setattr(recipes, "GPT2_FILES", sums)
    paths = recipes.gpt2_files(Path("data"))
    assert [path.read_bytes() for path in paths] == list(contents.values())
    paths[0].write_bytes(b"mine")
    assert recipes.gpt2_files(Path("data"))[0].read_bytes() == b"mine"


def test_any_data_set_is_read_as_a_stream(hub, prepare):
    keys = ["--text-key", "no", "--text-key", "text"]
    done = prepare("hf:someone/texts", "--documents", "2", *keys)
    assert done.returncode == 0, done.stderr
    tokens = TokenFile("data/texts/texts_text_document")
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
