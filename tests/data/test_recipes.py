"""Corpora of recipes: which files are taken, from where, and what is said where none can be had."""

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
import zstandard

from megatron.config.load import load
from megatron.data.corpora import recipe as recipes
from megatron.data.corpora import tokenizer_files
from megatron.data.corpora.catalogue import HUB, corpus_names, listing, named
from megatron.data.corpora.corpus import Followed
from megatron.data.corpora.download import Patience
from megatron.data.corpora.from_recipe import FromRecipe, Wishes, at_hand
from megatron.data.corpora.recipe import read_recipe, recipe_names
from megatron.data.corpora.shape import articles
from megatron.data.corpora.sources import matching
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from prepare_data import _parser, run
from tests.servers import Shown, served

ROOT = Path(__file__).parents[2]
HASTE = Patience(tries=2, first_tries=1, pause=0.001)
NEWCOMERS = ["openwebtext2", "github", "arxiv"]


def lines(*texts, part="ArXiv"):
    entries = [{"text": text, "meta": {"pile_set_name": part}} for text in texts]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


@pytest.fixture
def server():
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

    def corpus(sources, wishes=None, **more):
        facts = {"about": "a test", "licence": "none", "sources": sources} | more
        (folder / "mine.yml").write_text(yaml.safe_dump(facts))
        return FromRecipe("mine", read_recipe("mine"), tmp_path / "data", wishes, patience=HASTE)

    return corpus


def urls(server, *paths, **more):
    return {"urls": [server.address + path for path in paths], "tried": "not tried"} | more


def test_every_shipped_recipe_can_be_read_and_no_source_claims_to_be_tried():
    assert {*NEWCOMERS, "pile", "enwik8", "wikitext103", "pg19", "c4"} <= set(recipe_names())
    assert {"slimpajama", "fineweb-edu", "stdlib", "environment"} <= set(corpus_names())
    shown = listing().split("\n")
    assert [line.split(" ")[0] for line in shown] == corpus_names()
    for name in recipe_names():
        [line] = [line for line in shown if line.startswith(f"{name} ")]
        recipe = read_recipe(name)
        assert line.count("(not tried)") == len(recipe.sources)
        assert recipe.about in line
    assert run(["--list"]) == listing()


def test_redpajama_and_the_pile_are_told_apart():
    for name in ("github", "arxiv"):
        assert "RedPajama's" in read_recipe(name).is_not
        assert "do not compare with KERPLE's table" in read_recipe(f"{name}-redpajama").is_not


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/data").glob("*.yml")), ids=lambda p: p.stem
)
def test_every_data_file_is_of_a_corpus_that_can_be_prepared(path):
    config = load([ROOT / "configs/125M.yml", path], ["pos_emb=rotary"])
    name = path.stem
    assert name in corpus_names()
    assert config.data.data_path == f"data/{name}/{name}_text_document"
    assert f"python prepare_data.py {name}" in path.read_text(encoding="utf-8")


def test_files_are_downloaded_once_and_shared(server, write, tmp_path):
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl")])
    assert list(corpus.documents()) == ["a one", "a two", "b one"]
    shown = list(server.files.values())
    sums = [hashlib.sha256(one.content).hexdigest() for one in shown]
    assert [source["sha256"] for source in corpus.sources()] == sums
    assert isinstance(corpus, Followed)
    assert [size for _, size, _ in corpus.identity()] == [len(one.content) for one in shown]
    digest = hashlib.sha256(recipes.recipe_path("mine").read_bytes()).hexdigest()
    assert corpus.about == {"recipe": {"name": "mine", "sha256": digest}}
    server.asked.clear()
    again = write([urls(server, "/a.jsonl", "/b.jsonl")], keep={"meta.pile_set_name": "Github"})
    assert list(again.documents()) == ["b one"]
    assert server.asked == []
    kept = tmp_path / "data" / "download" / "127.0.0.1"
    assert sorted(os.listdir(kept)) == ["a.jsonl", "b.jsonl"]


def test_the_next_source_is_taken_and_the_log_says_why(server, write, caplog):
    corpus = write([urls(server, "/gone.jsonl"), urls(server, "/b.jsonl")])
    assert list(corpus.documents()) == ["b one"]
    [record] = caplog.records
    where = f"{server.address}/gone.jsonl"
    reason = f"mine: the next source is taken: {where}: answers 404 (is not there)"
    assert record.getMessage() == reason


def test_where_no_source_is_left_each_reason_is_said(server, write, tmp_path):
    wrong = urls(server, "/a.jsonl", sha256="0" * 64)
    corpus = write([urls(server, "/gone.jsonl"), wrong], at_hand=["*.jsonl.zst"])
    with pytest.raises(UserError) as raised:
        list(corpus.documents())
    message = str(raised.value)
    assert message.startswith("mine: no source can be used: (1) http://127.0.0.1")
    assert "answers 404" in message
    assert "(2) " in message
    assert "a.jsonl has the sha256" in message
    end = "prepare_data.py mine --from-dir DIR, with gone.jsonl or a.jsonl or *.jsonl.zst in it"
    assert message.endswith(end)
    assert not list(tmp_path.rglob("*a.jsonl*"))


def test_with_a_limit_only_the_files_that_it_needs_are_downloaded(server, write, tmp_path):
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl")], Wishes(documents=2))
    assert list(corpus.documents()) == ["a one", "a two"]
    assert [path for path, _ in server.asked] == ["/a.jsonl"]
    assert corpus.about["documents_limit"] == 2
    assert corpus.fraction() == 1
    assert len(corpus.sources()) == 1
    assert len(corpus.identity()) == 2


def test_a_disk_that_is_too_small_is_known_before_a_byte_comes(server, write):
    corpus = write([urls(server, "/a.jsonl", bytes=10**18)])
    with pytest.raises(UserError, match=r"needs 1 EB and has .* free - free some space"):
        list(corpus.documents())
    assert server.asked == []


def test_a_limit_needs_no_room_for_all_files(server, write):
    """As of PG-19, of whose 28,602 books only the size of all together is known."""
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl", bytes=10**18)], Wishes(documents=1))
    assert list(corpus.documents()) == ["a one"]


def test_parts_are_picked_and_have_a_name_of_their_own(server, write):
    sets = {"key": "meta.pile_set_name", "values": ["ArXiv", "Github", "Gutenberg (PG-19)"]}
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl")], Wishes(part="Github"), sets=sets)
    assert list(corpus.documents()) == ["b one"]
    assert (corpus.name, corpus.about["set"]) == ("mine-Github", "Github")
    books = write([urls(server, "/a.jsonl")], Wishes(part="Gutenberg (PG-19)"), sets=sets)
    assert books.name == "mine-Gutenberg_PG_19"
    with pytest.raises(
        UserError, match=r"mine-Gutenberg_PG_19: no entry has Gutenberg \(PG-19\) u"
    ):
        list(books.documents())
    with pytest.raises(UserError, match="--set: mine has no part 'github' - did you mean Github"):
        write([urls(server, "/a.jsonl")], Wishes(part="github"), sets=sets)
    with pytest.raises(UserError, match="--set: mine has no parts to pick - leave it away"):
        write([urls(server, "/a.jsonl")], Wishes(part="Github"))


def test_files_at_hand_need_no_network(server, write, tmp_path):
    folder = tmp_path / "hand"
    (folder / "deep").mkdir(parents=True)
    sources = [urls(server, "/a.jsonl", "/b.jsonl")]
    more = {"at_hand": ["*.jsonl"]}
    with pytest.raises(UserError, match=r"has no files of mine, which are a.jsonl or b.jsonl"):
        list(write(sources, Wishes(from_dir=folder)).documents())
    with pytest.raises(UserError, match=r"--from-dir: .*none is no folder - give the one"):
        list(write(sources, Wishes(from_dir=tmp_path / "none")).documents())
    (folder / "deep" / "own.jsonl").write_bytes(lines("own"))
    assert list(write(sources, Wishes(from_dir=folder), **more).documents()) == ["own"]
    (folder / "deep" / "a.jsonl").write_bytes(lines("copied"))
    with pytest.raises(UserError, match="has 1 of the 2 files of mine - get the others, or"):
        list(write(sources, Wishes(from_dir=folder), **more).documents())
    (folder / "b.jsonl").write_bytes(lines("too"))
    assert list(write(sources, Wishes(from_dir=folder)).documents()) == ["copied", "too"]
    one = [urls(server, "/a.jsonl", sha256="0" * 64)]
    with pytest.raises(
        UserError, match=r"deep/a.jsonl has another sha256 than the file of the reci"
    ):
        list(write(one, Wishes(from_dir=folder)).documents())
    assert server.asked == []


def test_a_limit_names_only_the_files_at_hand_that_were_read(server, write, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(f"{name} one", f"{name} two"))
    wishes = Wishes(from_dir=tmp_path, documents=2)
    corpus = write([urls(server, "/a.jsonl", "/b.jsonl")], wishes)
    assert list(corpus.documents()) == ["a one", "a two"]
    assert [Path(entry["path"]).name for entry in corpus.sources()] == ["a.jsonl"]
    again = write([urls(server, "/a.jsonl", "/b.jsonl")], wishes)
    assert again.sources() == corpus.sources()


WIKITEXT = ["wikitext-103-raw-v1/train-0.parquet", "wikitext-103-raw-v1/test-0.parquet"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*WIKITEXT, "wikitext-2-raw-v1/train-0.parquet"], WIKITEXT),
        ([f"deep/{name}" for name in WIKITEXT], [f"deep/{name}" for name in WIKITEXT]),
        (["x/train-0.parquet", "y/test-0.parquet"], ["x/train-0.parquet", "y/test-0.parquet"]),
        (["wikitext-2-raw-v1-train-0.parquet", "a.txt"], []),
    ],
)
def test_a_copy_of_a_whole_data_set_gives_the_files_of_the_recipes_folder(names, expected):
    patterns = ["wikitext-103-raw-v1/train-*.parquet", "wikitext-103-raw-v1/test-*.parquet"]
    assert matching(names, patterns) == expected


@pytest.mark.parametrize(
    ("name", "files", "taken"),
    [
        ("openwebtext2", ["00.jsonl.zst", "29.jsonl.zst", "val.jsonl.zst"], []),  # the Pile's
        ("openwebtext2", ["github.jsonl.zst.tar"], []),
        ("openwebtext2", ["scrapes_1_final.jsonl.zst"], ["scrapes_1_final.jsonl.zst"]),
        ("pg19", ["train/1.txt", "validation/2.txt", "README.txt"], ["train/1.txt"]),
    ],
)
def test_files_of_other_corpora_are_not_taken_for_a_recipes(tmp_path, caplog, name, files, taken):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    if not taken:
        with pytest.raises(UserError, match=f"--from-dir: .* has no files of {name}, which are"):
            at_hand(name, read_recipe(name), tmp_path)
        return
    assert at_hand(name, read_recipe(name), tmp_path) == [tmp_path / file for file in taken]
    assert f"{name}: takes 1 files whose names fit, from {tmp_path / taken[0]}" in caplog.text


def test_an_archive_of_lm_dataformat_is_read_from_its_tar(server, write, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, text in (("2011-01", "web one"), ("2011-02", "web two")):
            packed = zstandard.compress(lines(text) + b"no JSON\n" * (text == "web two"))
            member = tarfile.TarInfo(f"{name}.jsonl.zst")
            member.size = len(packed)
            archive.addfile(member, io.BytesIO(packed))
    server.files["/a.jsonl.zst.tar"] = Shown((tmp_path / "a.tar").read_bytes())
    source = urls(server, "/a.jsonl.zst.tar")
    with pytest.raises(UserError, match="is not JSON"):
        list(write([source]).documents())
    corpus = write([source], Wishes(skip_bad=True))
    assert list(corpus.documents()) == ["web one", "web two"]
    assert sum(corpus.skips.values()) == corpus.skipped == 1
    assert corpus.about["skip_bad"] is True


def test_a_recipe_that_is_none_is_explained(server, write):
    with pytest.raises(UserError, match=r"mine\.yml: .*needs hub with files, .* mend the recipe"):
        write([{"tried": "not tried"}])
    with pytest.raises(UserError, match=r"mine\.yml: .*needs packages or sources"):
        write([])
    with pytest.raises(UserError, match=r"sha256: is for a source of one file"):
        write([urls(server, "/a.jsonl", "/b.jsonl", sha256="0" * 64)])


def test_rows_that_are_lines_become_articles():
    rows = ["", " = One = \n", "", " text \n", " = = Part = = \n", " more \n", " = Two = \n", "x\n"]
    expected = [" = One = \n text \n = = Part = = \n more \n", " = Two = \nx\n"]
    beginning = read_recipe("wikitext103").article
    assert beginning is not None
    assert list(articles(rows, beginning)) == expected


def test_one_text_is_cut_between_characters(server, write, tmp_path):
    text = "ab€def"  # the cut after 3 bytes is inside of the euro sign
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", text)
    server.files["/a.zip"] = Shown((tmp_path / "a.zip").read_bytes())
    corpus = write([urls(server, "/a.zip")], cut_bytes=[3, 3, 2])
    assert list(corpus.documents()) == ["ab€", "d", "ef"]
    corpus = write([urls(server, "/a.zip")], cut_bytes=[3, 3, 2])
    assert list(corpus.documents()) == ["ab€", "d", "ef"]
    own = tmp_path / "own"
    own.mkdir()
    shutil.move(tmp_path / "a.zip", own)
    corpus = write([urls(server, "/a.zip")], Wishes(from_dir=own), cut_bytes=[3, 3, 2])
    assert list(corpus.documents()) == ["ab€", "d", "ef"]
    assert os.listdir(own) == ["a.zip"]


def test_an_archive_of_another_size_is_refused(server, write, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a", "text")
    server.files["/a.zip"] = Shown((tmp_path / "a.zip").read_bytes())
    with pytest.raises(UserError, match=r"a\.zip: holds 4 bytes, not 5 - it is another file"):
        list(write([urls(server, "/a.zip")], cut_bytes=[5]).documents())
    server.files["/b.zip"] = Shown(b"no archive")
    with pytest.raises(UserError, match=r"b\.zip: is no zip archive of one file"):
        list(write([urls(server, "/b.zip")], cut_bytes=[5]).documents())


def test_the_command_prepares_a_corpus_and_its_card_names_the_recipe(server, write, tmp_path):
    write([urls(server, "/a.jsonl", "/b.jsonl")])
    words = ["mine", "-d", str(tmp_path / "data"), "--vocab-size", "300"]
    assert "mine: 3 documents" in run(words)
    tokens = TokenFile.open(tmp_path / "data/mine/mine_text_document")
    assert tokens.meta["recipe"]["name"] == "mine"
    server.asked.clear()
    assert run(words).startswith("already prepared\n")
    with pytest.raises(UserError, match="exists already, prepared with another part or limit"):
        run([*words, "--documents", "3"])
    assert server.asked == []


def test_a_corpus_whose_downloads_were_removed_is_not_downloaded_again(
    server, write, tmp_path, caplog
):
    write([urls(server, "/a.jsonl", "/b.jsonl")])
    words = ["mine", "-d", str(tmp_path / "data"), "--vocab-size", "300"]
    run(words)
    shutil.rmtree(tmp_path / "data/download")
    server.asked.clear()
    assert run(words).startswith("already prepared\n")
    assert "mine: not all of its downloads are here, so the tokens are not compared" in caplog.text
    assert server.asked == []


@pytest.fixture
def tokenizer(server, monkeypatch, tmp_path):
    """Two files of a tokenizer on the server, described as GPT-2's are."""
    contents = {"gpt2-vocab.json": b'{"a": 0}', "gpt2-merges.txt": b"#version: 0.2\n"}
    files = []
    for name, content in contents.items():
        server.files[f"/{name}"] = Shown(content)
        sha256 = hashlib.sha256(content).hexdigest()
        places = [f"{server.address}/gone/{name}", f"{server.address}/{name}"]
        facts = {"name": name, "bytes": len(content), "sha256": sha256, "urls": places}
        files.append(facts | {"names": [name.removeprefix("gpt2-")]})
    monkeypatch.setattr(tokenizer_files, "GPT2", tmp_path / "gpt2.yml")
    (tmp_path / "gpt2.yml").write_text(yaml.safe_dump({"files": files}))
    return contents


def test_one_command_brings_the_tokenizers_files(server, tokenizer, tmp_path, caplog):
    data = tmp_path / "data"
    printed = run(["--tokenizer-files", "-d", str(data)])
    assert printed == "\n".join(str(data / name) for name in tokenizer)
    assert {name: (data / name).read_bytes() for name in tokenizer} == tokenizer
    server.asked.clear()
    (data / "gpt2-merges.txt").write_bytes(b"my own")
    run(["--tokenizer-files", "-d", str(data)])
    assert server.asked == []
    assert (data / "gpt2-merges.txt").read_bytes() == b"my own"
    assert "gpt2-merges.txt: is not GPT-2's own file; it is used as it is" in caplog.text


def test_the_tokenizers_files_are_taken_from_files_at_hand(server, tokenizer, tmp_path):
    hand = tmp_path / "hand"
    hand.mkdir()
    (hand / "vocab.json").write_bytes(tokenizer["gpt2-vocab.json"])
    (hand / "merges.txt").write_bytes(b"others")
    words = ["--tokenizer-files", "-d", str(tmp_path / "data"), "--from-dir"]
    with pytest.raises(UserError, match=r"gpt2-merges\.txt: is not here, .* nothing is downloaded"):
        run([*words, str(hand)])
    assert os.listdir(tmp_path / "data") == ["gpt2-vocab.json"]
    (tmp_path / "merges.txt").write_bytes(tokenizer["gpt2-merges.txt"])
    run([*words, str(hand)])
    assert (tmp_path / "data/gpt2-merges.txt").read_bytes() == tokenizer["gpt2-merges.txt"]
    assert server.asked == []
    with pytest.raises(UserError, match="--from-dir: none is no folder - give the one"):
        run([*words, "none"])


def test_tokenizer_files_that_cannot_be_had_are_one_message(server, tokenizer, tmp_path):
    del server.files["/gpt2-merges.txt"]
    with pytest.raises(UserError, match=r"gpt2-merges\.txt: cannot be downloaded: .*answers 404"):
        run(["--tokenizer-files", "-d", str(tmp_path / "data")])
    assert os.listdir(tmp_path / "data") == ["gpt2-vocab.json"]


def test_the_shipped_checksums_are_those_of_openais_files():
    vocab, merges = tokenizer_files.described()
    assert (vocab.bytes, vocab.sha256[:8], vocab.sha256[-4:]) == (1_042_301, "19613966", "6783")
    assert (merges.bytes, merges.sha256[:8], merges.sha256[-4:]) == (456_318, "1ce16647", "adc5")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stdlib", "--documents", "3"], "stdlib: is made from what is installed - leave"),
        (["openwebtext2", "--documents", "0"], "--documents: 0 is no corpus - use 1 or more"),
        (["openwebtext2", "--set", "ArXiv"], "--set: openwebtext2 has no parts to pick"),
        (["openwebtext2", "--split", "train"], "--split: is not for the corpus openwebtext2"),
        (["openwebtext2", "--from-dir", "none"], "--from-dir: none is no folder"),
        (["--input", "x", "--name", "y", "--documents", "3"], "--documents: is not for --input"),
        (["hf:owner", "--vocab-size", "300"], "hf:owner: is no name of a data set - write hf:"),
        (["hf:a/b", "--set", "x"], "--set: is not for a data set of the hub"),
        (["hf:a/b", "--vocab-size", "300"], "hf:a/b: huggingface.co cannot be reached - start"),
    ],
)
def test_wrong_words_are_one_message_and_nothing_is_written(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        run([*words] if "--vocab-size" in words else [*words, "--vocab-size", "300"])
    assert str(raised.value).startswith(message)
    assert not list(tmp_path.iterdir())


def test_a_name_of_the_catalogue_is_a_corpus(tmp_path):
    assert named("openwebtext2", tmp_path).name == "openwebtext2"


def test_the_commands_of_the_page_about_data_are_known(tmp_path):
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python prepare_data\.py (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        options = _parser().parse_args(shlex.split(command))
        if options.corpus and not options.corpus.startswith(HUB):
            assert options.corpus in corpus_names()
        if options.set:
            sets = read_recipe(options.corpus).sets
            assert sets is not None
            assert options.set in sets.values
