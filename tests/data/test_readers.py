"""Files of text, packed and in archives: what is read, left out, counted and refused."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow
import pytest
import zstandard
from lm_dataformat import Archive
from pyarrow import parquet

from megatron.data import readers
from megatron.data.readers import MB, Files, Keep, Limits
from megatron.errors import UserError
from tests.support import run

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


def test_folders_are_read_in_the_order_of_their_names(caplog):
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
    Path("deep/loop").symlink_to("..")
    Path("folder").mkdir()
    Path("folder/linked").symlink_to("../deep")
    corpus = Files("c", ["folder", ".", "b.txt"])
    assert list(corpus.documents()) == ["3", "1", "2"]
    assert "files of other kinds are read as plain text, one document each: 1, such" in caplog.text
    assert "--input: 4 files are given twice, and read once" in caplog.text
    for content in (b"\xff\xfea\x00", b"text\x00text"):
        Path("a.rst").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.rst is neither UTF-8 text nor of a kind that is"):
            Files("c", ["."])


def test_a_folder_that_cannot_be_read_is_named(monkeypatch):
    Path("texts/closed").mkdir(parents=True)
    Path("texts/a.txt").write_text("a")
    scandir = os.scandir

    def refused(folder):  # chmod does not stop root
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(
        UserError, match=r"^texts/closed: the folder cannot be read \(Permission de"
    ):
        Files("c", ["texts"])


def test_a_damaged_file_is_an_error_and_not_a_shorter_corpus():
    tar = packed({"a.txt": b"one", "b.txt": b"two"})
    samples = [f'{{"text": "sample {number}"}}'.encode() for number in range(1000)]
    dictionary = zstandard.train_dictionary(1000, samples)
    with_dictionary = zstandard.ZstdCompressor(dict_data=dictionary).compress(lines(TEXTS))
    cases = [
        ("c.jsonl.gz", gzip.compress(lines(TEXTS))[:-20], "is cut off or damaged (Compressed file"),
        ("c.jsonl.zst", zstandard.compress(lines(TEXTS))[:-20], "inside its last zstd frame"),
        ("c.jsonl.zst", with_dictionary, "was packed with a dictionary"),
        ("c.parquet", table(TEXTS)[:-20], "cannot be read as a table"),
        ("c.parquet", table([None]), "row 1: has no text under 'text', it is {'text': None} - say"),
        ("c.json", b"[" * 10**5, "cannot be read as JSON in UTF-8 (maximum recursion"),
        ("c.tar", tar[:1024], "is cut off or damaged as a tar archive (empty header)"),
        ("c.tar", tar[:1100], "is cut off or damaged as a tar archive (truncated header)"),
        ("c.tar", tar[:1024] + b"x" + tar[1025:], "as a tar archive (bad checksum)"),
        ("c.tar", tar + tar, "goes on after the end of the archive"),
    ]
    for name, content, message in cases:
        with pytest.raises(UserError) as caught:
            read(name, content)
        assert f"{name}: " in str(caught.value)
        assert message in str(caught.value)


def test_files_in_archives_are_read_in_their_order():
    members = {
        "00.jsonl": LINES,
        "deep/01.jsonl.zst": zstandard.compress(LINES),
        "02.tar.gz": gzip.compress(packed({"in.jsonl": LINES})),
        "03.parquet": table(["row"]),
        "notes": "naïve".encode(),
    }
    expected = [*["one", "two"] * 3, "row", "naïve"]
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
    documents, corpus = read("c.jsonl", LINES + b'"bare"', keep=Keep("meta.set", "B"))
    assert documents == ["two"]
    assert corpus.skips == {"not meta.set = B": 2}


def test_a_file_that_changes_while_it_is_read_is_named():
    content = gzip.compress(packed({"a.txt": b"one"})) + b"\0" * 2000  # after it gzip reads no more
    path = Path("c.tar.gz")
    _, corpus = read(path, content)
    sha256 = hashlib.sha256(content).hexdigest()
    assert corpus.sources() == [{"path": str(path), "bytes": len(content), "sha256": sha256}]
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"--input: .*c\.tar\.gz was changed while it was read - w"):
        corpus.sources()
    path.unlink()
    with pytest.raises(UserError, match=r"--input: .*c\.tar\.gz cannot be read \(No such file"):
        list(corpus.documents())


def test_documents_and_files_are_as_large_as_the_limits_at_most(monkeypatch):
    for pack, suffix in ((gzip.compress, ".gz"), (zstandard.compress, ".zst")):
        content = pack(b'"12345678"\n"123456789"\n')
        path = f"c.jsonl{suffix}"
        assert read(path, content, limits=Limits(document=11))[0][1] == "123456789"
        with pytest.raises(UserError, match=r":2: is longer than 1e-05 MB, which would fill"):
            read(path, content, limits=Limits(document=10))
    content = packed({"a.txt.zst": zstandard.compress(b"a" * 9000)})
    with pytest.raises(UserError, match=r"c\.tar: a\.txt\.zst: is longer than 0\.005 MB"):
        read("c.tar", content, limits=Limits(document=5000))

    monkeypatch.setattr(readers, "FREE", MB // 10)
    bomb = zstandard.compress(b'"a"\n' * 20_000)
    archive = zstandard.compress(packed({f"{number}.jsonl.zst": bomb for number in range(9)}))
    with pytest.raises(UserError, match=r"100 times its size - it is no text; raise --max-unpack"):
        read("c.tar.zst", archive, limits=Limits(ratio=100))
    for texts in (["a" * MB], ["a" * 1000] * 1000):  # the second is a dictionary of one word
        with pytest.raises(
            UserError, match=r"c\.parquet: unpacks to more than .* 10 times its size"
        ):
            read("c.parquet", table(texts), limits=Limits(ratio=10))
    documents, _ = read("c.tar.zst", archive, limits=Limits(ratio=100_000))
    assert len(documents) == 180_000


MEASURE = """
import sys
from pathlib import Path
from prepare_data import main

def peak():  # not ru_maxrss, which begins with that of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

before = peak()
status = main(sys.argv[1:])
print((peak() - before) // 1000)
sys.exit(status)
"""


def test_a_bomb_is_refused_in_little_memory():
    path = Path("c.jsonl.zst")
    path.write_bytes(zstandard.compress(b'{"text": "' + b"a" * 200 * MB + b'"}\n', 19))
    words = ["--input", path, "--name", "c", "-d", "data", "--max-document-mb", 5]
    done = run("-c", MEASURE, *words, cwd=Path(), timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path}:1: is longer than 5 MB, which would fill the memory")
    assert int(done.stdout.split()[-1]) < 120  # MB
    assert not Path("data").exists()
