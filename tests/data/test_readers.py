"""Files of text, packed and in archives: what is read, left out, counted and refused."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pyarrow
import pytest
import zstandard
from lm_dataformat import Archive
from pyarrow import parquet

from megatron.data import readers
from megatron.data.readers import Files
from megatron.errors import UserError

TEXTS = ["first\ndocument", "", "zweites Dokument: äöü", "x" * 3_000_000]
LINES = b'{"text": "one", "meta": {"set": "A"}}\n{"text": "two", "meta": {"set": "B"}}\n'


def lines(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def table(texts):
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), content)
    return content.getvalue()


def packed(members):
    """A tar archive of {name: contents or a TarInfo}."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, value in members.items():
            info = value if isinstance(value, tarfile.TarInfo) else tarfile.TarInfo(name)
            body = b"" if isinstance(value, tarfile.TarInfo) else value
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return content.getvalue()


def special(name, kind):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "/etc/passwd"
    return info


def read(name, content, **options):
    Path(name).write_bytes(content)
    corpus = Files("c", [name], **options)
    return list(corpus.documents()), corpus


def test_every_kind_of_file_gives_its_documents_back():
    frames = b"".join(zstandard.compress(lines([text])) for text in TEXTS)
    contents = {
        "c.jsonl": lines(TEXTS),
        "c.json.gz": gzip.compress(lines(TEXTS)),
        "c.jsonl.zst": frames,
        "c.parquet": table(TEXTS),
        "c.json": lines(TEXTS),
        "C.JSONL": b"\xef\xbb\xbf" + lines(TEXTS),
        "C.Ndjson.GZ": gzip.compress(lines(TEXTS)),
        "array.jsonl": json.dumps(TEXTS).encode(),
        "array.json.zst": zstandard.compress(
            json.dumps([{"text": t} for t in TEXTS], indent=1).encode()
        ),
    }
    for name, content in contents.items():
        assert read(name, content)[0] == TEXTS, name
    archive = Archive("lm")
    for text in TEXTS:
        archive.add_data(text, meta={"set": "mine"})
    archive.commit()
    [path] = Path("lm").glob("*.jsonl.zst")
    assert list(Files("c", [path]).documents()) == TEXTS


def test_entries_of_json_lines_are_read_as_lm_dataformat_writes_them():
    content = '\ufeff"bare"\n\n{"text": ["one", "two"]}\r\n{"text": "a\\ud800b \\ud83d\\ude42"}'
    assert read("c.jsonl", content.encode())[0] == ["bare", "one\n\ntwo", "a\ufffdb 🙂"]
    for entry in (b'{"text": ["one", 2]}', b"7", b'{"meta": "one"}'):
        with pytest.raises(UserError, match="has no text under 'text'"):
            read("c.jsonl", entry)
    beside = b'{"text": "one", "sum": ' + b"7" * 5000 + b', "mean": NaN}'
    assert read("c.jsonl", beside)[0] == ["one"]
    several = b'{"text": null, "body": "a"}\n{"body": "b", "text": "c"}'
    assert read("c.jsonl", several, keys=["text", "body"])[0] == ["a", "c"]
    assert read("c.txt", "\ufeffone\n\ntwö\n".encode())[0] == ["one\n\ntwö\n"]


def test_folders_are_read_in_the_order_of_their_names_and_no_file_twice():
    files = {
        "b.txt": "2",
        "a.rst": "1",
        "deep/c.jsonl": '{"text": "3"}\n',
        ".hidden": "0",
        ".git/in_a_hidden_folder": "0",
        "deep/__pycache__/c.pyc": "0",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)
    Path("folder").mkdir()
    Path("folder/linked").symlink_to("../deep")
    corpus = Files("c", ["folder", ".", "b.txt"])
    assert list(corpus.documents()) == ["3", "1", "2"]
    Path("a.rst").write_bytes(b"\xff\xfea\x00")
    with pytest.raises(UserError, match=r"a\.rst cannot be read \('utf-8' codec"):
        list(Files("c", ["."]).documents())


def test_a_damaged_file_is_an_error_and_not_a_shorter_corpus():
    tar = packed({"a.txt": b"one", "b.txt": b"two"})
    cases = [
        ("c.jsonl.gz", gzip.compress(lines(TEXTS))[:-20], "Compressed file ended before"),
        ("c.jsonl.gz", b"", "is empty, which no compressed file is"),
        ("c.jsonl.zst", zstandard.compress(lines(TEXTS))[:-20], "Compressed file ended before"),
        ("c.jsonl.zst", lines(TEXTS), "Unable to decompress Zstandard data"),
        ("c.parquet", table(TEXTS)[:-20], "Parquet"),
        (
            "c.parquet",
            table([None]),
            "row 1: has no text under 'text', it is {'text': None} - name",
        ),
        ("c.json", b"[" * 10**5, "cannot be read as JSON in UTF-8 (maximum recursion"),
        ("c.tar", tar[:1024], "empty header"),
        ("c.tar", tar[:1100], "truncated header"),
        ("c.tar", tar[:1024] + b"x" + tar[1025:], "bad checksum"),
    ]
    for name, content, message in cases:
        with pytest.raises(UserError) as caught:
            read(name, content)
        assert name in str(caught.value)
        assert message in str(caught.value)


def test_files_in_archives_are_read_in_their_order():
    members = {
        "00.jsonl": LINES,
        "deep/01.jsonl.zst": zstandard.compress(LINES),
        "02.tar.gz": gzip.compress(packed({"in.jsonl": LINES})),
        "notes": "naïve".encode(),
    }
    expected = [*["one", "two"] * 3, "naïve"]
    for suffix, pack in {
        ".tar": bytes,
        ".tgz": gzip.compress,
        ".tar.zst": zstandard.compress,
    }.items():
        assert read(f"c{suffix}", pack(packed(members)))[0] == expected


def test_nothing_of_an_archive_reaches_the_disk():
    members = {
        "../outside.txt": b"text",
        "/etc/absolute.txt": b"more",
        "link": special("link", tarfile.SYMTYPE),
        "pipe": special("pipe", tarfile.FIFOTYPE),
        "folder": special("folder", tarfile.DIRTYPE),
        "a/._hidden.txt": b"junk",
    }
    documents, corpus = read("c.tar", packed(members))
    assert documents == ["text", "more"]
    assert corpus.skips == {"link, device or hidden file in an archive": 3}
    assert [path.name for path in Path().rglob("*")] == ["c.tar"]


def test_only_the_entries_of_one_component_are_kept():
    assert read("c.jsonl", LINES, keys=["meta.set"])[0] == ["A", "B"]
    rows = pyarrow.table({"meta": [{"set": "A", "n": 1}], "meta.n": ["B"]})
    parquet.write_table(rows, "c.parquet")
    for key, text in (("meta.set", "A"), ("meta.n", "B")):
        assert list(Files("c", ["c.parquet"], [key]).documents()) == [text]
    documents, corpus = read("c.jsonl", LINES + b'"bare"', keep={"meta.set": "B"})
    assert documents == ["two"]
    assert corpus.skips == {"not {'meta.set': 'B'}": 2}


def test_the_sources_are_the_files_with_their_sums():
    _, corpus = read("c.jsonl", LINES)
    sha256 = hashlib.sha256(LINES).hexdigest()
    assert corpus.sources() == [{"path": "c.jsonl", "bytes": len(LINES), "sha256": sha256}]
    Path("c.jsonl").unlink()
    with pytest.raises(UserError, match=r"--input: c\.jsonl cannot be read \(No such file"):
        list(corpus.documents())


def test_what_would_fill_the_memory_is_refused(monkeypatch):
    for name, pack in (("c.jsonl.gz", gzip.compress), ("c.jsonl.zst", zstandard.compress)):
        content = pack(b'"12345678"\n"123456789"\n')
        monkeypatch.setattr(readers, "LONGEST", 12)
        assert read(name, content)[0][1] == "123456789"
        monkeypatch.setattr(readers, "LONGEST", 11)
        with pytest.raises(UserError, match=r":2: is longer than 0 MB and would fill"):
            read(name, content)
    content = packed({"a.txt.zst": zstandard.compress(b"a" * 9000)})
    with pytest.raises(UserError, match=r"c\.tar: a\.txt\.zst: is longer than"):
        read("c.tar", content)
