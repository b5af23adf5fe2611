import gzip
import json
from pathlib import Path

import pytest
import zstandard
from datasets import Dataset
from lm_dataformat import Archive

from megatron.data.readers.files import Files, Keep, is_text
from megatron.data.readers.unpack import CHUNK
from megatron.errors import UserError

TEXTS = ["first\ndocument", "", "zweites Dokument: äöü", "x" * 3_000_000]


def lines(texts, key="text"):
    return "".join(
        json.dumps({key: text, "meta": {}}, ensure_ascii=False) + "\n" for text in texts
    ).encode()


def read(*paths, key="text"):
    return list(Files("mine", paths, key).documents())


WRITERS = {
    "c.jsonl": lambda path: path.write_bytes(lines(TEXTS)),
    "c.json.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS))),
    "c.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS))),
    "c.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(lines(TEXTS))),
    "c.parquet": lambda path: Dataset.from_dict({"text": TEXTS}).to_parquet(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_its_documents_back(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == TEXTS


def test_an_arrow_file_gives_its_documents_back(tmp_path):
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved" / "data-00000-of-00001.arrow") == TEXTS


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "c.txt").write_bytes("\ufeffone\n\ntwö\n".encode())
    assert read(tmp_path / "c.txt") == ["one\n\ntwö\n"]


def test_archives_of_lm_dataformat_are_read_whole(tmp_path):
    archive = Archive(str(tmp_path))
    for text in TEXTS:
        archive.add_data(text, meta={"set": "mine"})
    archive.commit()
    assert read(next(tmp_path.glob("*.jsonl.zst"))) == TEXTS


def test_every_frame_of_a_zst_file_is_read(tmp_path):
    frames = b"".join(zstandard.compress(lines([text])) for text in TEXTS)
    (tmp_path / "c.jsonl.zst").write_bytes(frames)
    assert read(tmp_path / "c.jsonl.zst") == TEXTS


def test_folders_are_read_in_the_order_of_their_names(tmp_path):
    for name, text in (
        ("b.txt", "2"),
        ("a.txt", "1"),
        ("deep/c.jsonl", '{"text": "3"}\n'),
        (".hidden", "0"),
        (".git/in_a_hidden_folder", "0"),
        ("deep/__pycache__/c.pyc", "0"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert read(tmp_path) == ["1", "2", "3"]


def test_json_lines_may_hold_bare_strings_paragraphs_blank_lines_and_no_last_newline(tmp_path):
    (tmp_path / "c.jsonl").write_text(
        '\ufeff"bare"\n\n{"text": ["one", "two"]}\r\n{"text": "end"}', encoding="utf-8"
    )
    assert read(tmp_path / "c.jsonl") == ["bare", "one\n\ntwo", "end"]


def test_the_text_may_be_under_another_key(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(lines(["a"], "content"))
    assert read(tmp_path / "c.jsonl", key="content") == ["a"]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude42"}\n')
    assert read(tmp_path / "c.jsonl") == ["a\ufffdb 🙂"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a"',
            "c.jsonl:2: is not JSON (Expecting ',' delimiter, column 13) - mend or remove the line",
        ),
        (b'{"text": "\xff"}', "c.jsonl:2: is not UTF-8 - convert the file"),
        (
            b'{"txt": "a", "id": 1}',
            'c.jsonl:2: has the keys txt, id, expected {"text": "..."} - say which one holds',
        ),
        (b"{}", "c.jsonl:2: has the keys (none), expected"),
        (b"[1]", "c.jsonl:2: is not an object, expected"),
        (b'{"text": 7}', "c.jsonl:2: 'text' is int, not text - choose another with --text-key"),
        (b'{"text": null}', "c.jsonl:2: 'text' is NoneType, not text"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, message):
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "c.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "c.jsonl.gz",
            lambda data: data[:-20],
            "is cut off or damaged (Compressed file ended before",
        ),
        ("c.jsonl.gz", lambda data: b"plain", "is cut off or damaged (Not a gzipped file"),
        (
            "c.jsonl.zst",
            lambda data: data[:-20],
            "is cut off inside its last zstd frame - copy it again",
        ),
        ("c.jsonl.zst", lambda data: b"plain text", "is damaged or not zstd"),
        ("c.parquet", lambda data: data[:-20], "cannot be read as parquet"),
    ],
)
def test_a_damaged_file_is_an_error_and_not_a_shorter_corpus(tmp_path, name, damage, message):
    path = tmp_path / name
    WRITERS[name](path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        read(path)
    assert f"{path}: {message}" in str(caught.value)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "c.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"c\.txt: is not UTF-8 \(byte 3\) - convert the file"):
        read(tmp_path / "c.txt")


def test_a_table_without_the_column_says_which_it_has(tmp_path):
    Dataset.from_dict({"content": ["a"]}).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c\.parquet: row 1: has the keys content, expected"):
        read(tmp_path / "c.parquet")


def test_files_that_cannot_be_read_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(
        UserError,
        match=r"there is no .*none\.txt \(looked from .* - give existing files or folders",
    ):
        Files("mine", [tmp_path / "none.txt"])
    with pytest.raises(UserError, match="is empty - give one with files in it"):
        Files("mine", [tmp_path])
    (tmp_path / "c.bin").write_bytes(b"\x93NUMPY\x00")
    for given in (tmp_path, tmp_path / "c.bin"):
        with pytest.raises(
            UserError,
            match=r"c\.bin is neither UTF-8 text nor of a kind .* - use \.jsonl, \.jsonl\.gz",
        ):
            Files("mine", [given])


def test_text_of_an_unknown_kind_is_one_document_and_the_log_says_so(tmp_path, caplog):
    (tmp_path / "a.rst").write_text("Title\n=====\nnaïve", encoding="utf-8")
    (tmp_path / "b.rst").write_text("")
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "c.txt").write_text("plain")
    assert read(tmp_path) == ["free", "Title\n=====\nnaïve", "", "plain"]
    assert caplog.messages == [
        "--input: files of other kinds are read as plain text, one document each: 3 "
        f"(.rst, no suffix), such as {tmp_path}/LICENSE"
    ]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfea\x00", b"text\x00text", "ü".encode()[:1], b"a" * CHUNK + b"\xff"],
    ids=["UTF-16", "NUL", "cut inside a letter", "Latin-1 far inside"],
)
def test_what_is_not_utf8_text_is_not_taken_for_text(tmp_path, content):
    (tmp_path / "a.rst").write_bytes(content)
    with pytest.raises(
        UserError, match=r"a\.rst is neither UTF-8 text nor of a kind .* - use \.jsonl"
    ):
        Files("mine", [tmp_path])


def test_a_letter_across_two_chunks_is_text(tmp_path):
    path = tmp_path / "a.rst"
    path.write_bytes(b"a" * (CHUNK - 1) + "ü".encode())
    assert is_text(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.rst").write_text("a")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"a\.rst cannot be read \(Permission denied\) - check its"):
        Files("mine", [tmp_path / "a.rst"])


def test_sources_tell_what_was_read(tmp_path):
    path = tmp_path / "c.txt"
    path.write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert Files("mine", [path]).sources() == [{"path": str(path), "bytes": 3, "sha256": abc}]


def test_only_the_entries_of_one_component_are_kept(tmp_path):
    entries = [
        {"text": "code", "meta": {"pile_set_name": "Github"}},
        {"text": "paper", "meta": {"pile_set_name": "ArXiv"}},
        {"text": "no meta"},
        "bare",
        {"text": "odd", "meta": "ArXiv"},
    ]
    lines = tmp_path / "pile.jsonl"
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    table = tmp_path / "pile.parquet"
    Dataset.from_list(entries[:3]).to_parquet(table)
    keep = Keep("meta.pile_set_name", "ArXiv")
    for path in (lines, table):
        assert list(Files("mine", [path], keep=keep).documents()) == ["paper"]
        assert len(list(Files("mine", [path]).documents())) >= 3
