import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron import files
from megatron.data.corpora.catalogue import CORPORA
from megatron.data.corpora.stdlib import StandardLibrary
from megatron.data.prepare import prepare
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.folder_lock import owned_folder
from prepare_data import run

ROOT = Path(__file__).parents[2]
TEXTS = ["the cat sat on the mat\n", "", "naïve — 日本語 🙂", "def f(x):\n    return x\n" * 50]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def small_stdlib(monkeypatch):
    monkeypatch.setitem(CORPORA, "stdlib", lambda: StandardLibrary(limit=12))


def own(text, folder, *more):
    return run(
        ["--input", str(text), "--name", "mine", "-d", str(folder), "--vocab-size", "300", *more]
    )


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def yaml_lines(summary):
    return dict(
        line.strip().split(": ") for line in summary.split("in your YAML:\n")[1].split("\n")
    )


def test_stdlib_becomes_token_files_with_a_tokenizer_and_a_sidecar(tmp_path, small_stdlib):
    summary = run(["-d", str(tmp_path), "stdlib", "--vocab-size", "400"])
    prefix = tmp_path / "stdlib" / "stdlib_text_document"
    tokens = TokenFile.open(prefix)
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "stdlib" / "tokenizer.json")
    documents = [document for document in StandardLibrary(limit=12).documents() if document]
    assert len(tokens) == len(documents)
    for index, document in enumerate(documents):
        assert tokens.read(index)[-1] == tokenizer.eod
        assert tokenizer.decode(tokens.read(index)[:-1].tolist()) == document
    assert tokens.dtype == np.uint16
    assert tokens.meta["corpus"] == "stdlib"
    assert tokens.meta["tokenizer"]["hash"] == tokenizer.hash
    assert (tokens.meta["tokenizer"]["vocab_size"], tokens.meta["tokenizer"]["eod"]) == (400, 0)
    assert tokens.meta["sources"][0]["files"] == 12
    tokens.check_tokenizer(tokenizer)
    assert f"stdlib: {len(tokens):,} documents, {tokens.tokens:,} tokens (uint16)" in summary
    assert "400 entries, trained on this text" in summary
    assert yaml_lines(summary) == {
        "data_path": str(prefix),
        "tokenizer_type": "HFTokenizer",
        "vocab_file": str(tmp_path / "stdlib" / "tokenizer.json"),
    }


def test_preparing_the_same_again_is_quick_and_changes_nothing(tmp_path, small_stdlib):
    first = run(["stdlib", "-d", str(tmp_path), "--vocab-size", "300"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (
        run(["stdlib", "-d", str(tmp_path), "--vocab-size", "300"]) == "already prepared\n" + first
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_two_preparations_give_the_same_bytes(tmp_path, text):
    for folder in ("one", "two"):
        own(text, tmp_path / folder)
    files = [everything(tmp_path / folder) for folder in ("one", "two")]
    cards = [json.loads(found.pop("mine/mine_text_document.json")) for found in files]
    for card in cards:
        del card["date"], card["command"]
    assert files[0] == files[1]
    assert cards[0] == cards[1]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl.zst"])
def test_documents_keep_their_order_and_those_without_text_are_left_out(tmp_path, text, suffix):
    if suffix == ".txt":
        inputs = [tmp_path / f"{index}.txt" for index in range(len(TEXTS))]
        for path, document in zip(inputs, TEXTS, strict=True):
            path.write_text(document)
    else:
        zstandard = pytest.importorskip("zstandard")
        inputs = [tmp_path / "in.jsonl.zst"]
        inputs[0].write_bytes(zstandard.compress(text.read_bytes()))
    words = ["--input", *map(str, inputs), "--name", "m", "-d", str(tmp_path)]
    summary = run([*words, "-t", "CharLevelTokenizer"])
    tokens = TokenFile.open(tmp_path / "m" / "m_text_document")
    got = [tokens.read(index).astype(np.uint8).tobytes() for index in range(len(tokens))]
    assert got == [document.encode() + b"\0" for document in TEXTS if document]
    assert "left out, blank document: 1\n" in summary
    assert tokens.meta["blank"] == 1


def test_documents_of_white_space_are_kept_and_counted(tmp_path):
    paths = [tmp_path / name for name in ("a.rst", "b.rst", "c.rst")]
    for path, content in zip(paths, ("text", " \n\n", ""), strict=True):
        path.write_text(content)
    words = ["--input", *map(str, paths), "--name", "m", "-d", str(tmp_path)]
    summary = run([*words, "-t", "CharLevelTokenizer"])
    assert "m: 2 documents" in summary
    assert "left out, blank document: 1\n" in summary
    assert "documents of white space only, kept: 1\n" in summary


def test_gpt2_files_are_used_as_given_with_gpt_neox_spellings(tmp_path, text):
    model = json.loads(train_tokenizer(TEXTS, 270))["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(model["vocab"]))
    merges.write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
    )
    options = [
        "-d",
        str(tmp_path),
        "-t",
        "GPT2BPETokenizer",
        "--vocab_file",
        str(vocab),
        f"--merge_file={merges}",
    ]
    summary = run([*options, "--input", str(text), "--name", "my_text", "--workers", "2"])
    assert yaml_lines(summary) == {
        "data_path": str(tmp_path / "my_text" / "my_text_text_document"),
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(vocab),
        "merge_file": str(merges),
    }
    assert not (tmp_path / "my_text" / "tokenizer.json").exists()


def test_what_was_prepared_from_something_else_is_kept_unless_overwritten(tmp_path, text):
    own(text, tmp_path / "data")
    before = everything(tmp_path / "data")
    other = tmp_path / "other.txt"
    other.write_text("other text")
    with pytest.raises(
        UserError, match="exists already, prepared from other sources - take another --name or -d"
    ):
        own(other, tmp_path / "data")
    with pytest.raises(UserError, match="exists already, prepared with another tokenizer - take"):
        own(text, tmp_path / "data", "--vocab-size", "290")
    with pytest.raises(
        UserError, match="prepared with another tokenizer and from other sources - take"
    ):
        run(
            [
                "--input",
                str(other),
                "--name",
                "mine",
                "-d",
                str(tmp_path / "data"),
                "-t",
                "CharLevelTokenizer",
            ]
        )
    assert everything(tmp_path / "data") == before
    own(other, tmp_path / "data", "--overwrite")
    assert len(TokenFile.open(tmp_path / "data" / "mine" / "mine_text_document")) == 1


def test_a_damaged_earlier_result_is_named_and_made_anew_with_overwrite(tmp_path, text):
    own(text, tmp_path)
    path = tmp_path / "mine" / "mine_text_document.bin"
    os.truncate(path, 10)
    with pytest.raises(
        UserError, match=r"mine_text_document\.bin: is cut off: 10 bytes.*\(with --overwrite\)"
    ):
        own(text, tmp_path)
    own(text, tmp_path, "--overwrite")
    assert path.stat().st_size > 10


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": ""}\n'])
@pytest.mark.parametrize("kind", ["HFTokenizer", "CharLevelTokenizer"])
def test_an_input_without_text_is_an_error_that_leaves_nothing(tmp_path, content, kind):
    (tmp_path / "in.jsonl").write_text(content)
    before = everything(tmp_path)
    with pytest.raises(
        UserError, match="mine: the input has no documents with text in them - nothing was written"
    ):
        run(
            [
                "--input",
                str(tmp_path / "in.jsonl"),
                "--name",
                "mine",
                "-d",
                str(tmp_path / "a" / "b"),
                "-t",
                kind,
            ]
        )
    assert everything(tmp_path) == before
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_in_the_middle_leaves_everything_as_it_was(tmp_path, text, overwrite):
    if overwrite:
        own(text, tmp_path / "data")
    before = everything(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    for kind in ("HFTokenizer", "CharLevelTokenizer"):
        with pytest.raises(UserError, match=r"bad\.jsonl:2: is not JSON"):
            run(
                [
                    "--input",
                    str(bad),
                    "--name",
                    "mine",
                    "-d",
                    str(tmp_path / "data"),
                    "-t",
                    kind,
                    "--overwrite",
                ]
            )
    bad.unlink()
    assert everything(tmp_path) == before
    assert (tmp_path / "data").exists() == overwrite


def test_a_full_disk_at_the_end_leaves_everything_as_it_was(tmp_path, text, monkeypatch):
    own(text, tmp_path / "data")
    before = everything(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("quite another text " * 50)

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(
        UserError, match="No space left on device - check permissions and free space"
    ):
        own(other, tmp_path / "data", "--overwrite")
    other.unlink()
    assert everything(tmp_path) == before


def test_a_wrong_tokenizer_is_found_before_anything_is_written(tmp_path, text):
    empty = tmp_path / "empty.json"
    empty.write_text("")
    with pytest.raises(UserError, match=r"vocab_file: .*empty\.json is empty"):
        run(
            [
                "--input",
                str(text),
                "--name",
                "m",
                "-d",
                str(tmp_path / "d"),
                "--vocab-file",
                str(empty),
            ]
        )
    assert not (tmp_path / "d").exists()


def test_a_folder_that_cannot_be_made_is_explained(tmp_path, text):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError,
        match=r"file.*: Not a directory - check permissions and free space, or choose -d DIR",
    ):
        own(text, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "what is to be prepared? - name a corpus (--list shows them), or give --input FILE",
        ),
        (["stdlib", "--input", "x.txt"], "what is to be prepared?"),
        (["stdlib", "--name", "x"], "--name: is not for the corpus stdlib - leave it away"),
        (["--input", "x.txt"], "--name: is missing - with --input give the corpus a name"),
        (["--input", "x.txt", "--name", "a/b"], "--name: 'a/b' cannot be a folder's name"),
        (["--input", "x.txt", "--name", ".."], "--name: '..' cannot be a folder's name"),
        (["--input", "x.txt", "--name", "x"], "--input: there is no x.txt"),
        (["stdlib", "--workers", "0"], "--workers: 0 cannot work - use 1 or more"),
        (["stdlib", "-t", "BPE"], "tokenizer_type: there is no 'BPE'"),
        (["stdlib", "-t", "GPT2BPETokenizer"], "vocab_file: GPT2BPETokenizer needs one"),
        (
            ["stdlib", "-t", "CharLevelTokenizer", "--vocab-size", "9"],
            "--vocab-size: is for a tokenizer that is trained",
        ),
        (
            ["stdlib", "-t", "HFTokenizer", "--merge-file", "m"],
            "--merge-file: HFTokenizer has none - leave it away",
        ),
        (["stdlib", "--vocab-size", "100"], "vocab_size: 100 cannot hold the 256 bytes"),
    ],
)
def test_wrong_commands_are_explained(tmp_path, arguments, message, small_stdlib):
    with pytest.raises(UserError) as caught:
        run([*arguments, "-d", str(tmp_path / "data")])
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_its_summary_and_its_faults_as_one_line(tmp_path, text):
    def command(*arguments):
        call = [sys.executable, str(ROOT / "prepare_data.py"), "-d", "./data", *arguments]
        return subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)

    good = command("--input", text.name, "--name", "mine", "--vocab-size", "300")
    assert good.returncode == 0, good.stderr
    assert yaml_lines(good.stdout.rstrip())["data_path"] == "data/mine/mine_text_document"
    shutil.rmtree(tmp_path / "data")
    bad = command("--input", "gone.jsonl", "--name", "mine")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("--input: there is no gone.jsonl (looked from ")
    assert bad.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_second_preparation_of_one_name_is_refused_while_the_first_works(tmp_path, text):
    folder = tmp_path / "data" / "mine"
    message = rf"-d: {folder} is in use by process \d+ on .* - wait .* or choose another folder"
    with owned_folder(folder, "-d"):
        before = everything(tmp_path)
        with pytest.raises(UserError, match=message):
            own(text, tmp_path / "data")
        with pytest.raises(UserError, match=message):
            own(text, tmp_path / "data", "--overwrite")
        assert everything(tmp_path) == before
    own(text, tmp_path / "data")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "mine_text_document.bin",
        "mine_text_document.idx",
        "mine_text_document.json",
        "tokenizer.json",
    }


def test_a_corpus_that_appears_meanwhile_is_not_replaced(tmp_path, text, monkeypatch):
    data = tmp_path / "data"
    own(text, tmp_path / "other")
    encode = prepare._encode

    def slow(*words):
        encode(*words)
        shutil.copytree(tmp_path / "other" / "mine", data / "mine", dirs_exist_ok=True)
        (data / "mine" / "tokenizer.json").write_text("theirs")

    monkeypatch.setattr(prepare, "_encode", slow)
    with pytest.raises(
        UserError, match=r"mine_text_document\.idx: exists already - choose another"
    ):
        own(text, data, "--vocab-size", "290")
    expected = everything(tmp_path / "other" / "mine") | {"tokenizer.json": b"theirs"}
    assert everything(data / "mine") == expected
    own(text, data, "--overwrite")
    assert (data / "mine" / "tokenizer.json").read_text() != "theirs"
