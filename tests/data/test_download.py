"""Downloads from a server that breaks connections, lies and sends other things than it should."""

import hashlib
import os
import random
import resource
import socketserver
import threading
from contextlib import contextmanager

import pytest

from megatron.data.corpora import download
from megatron.data.corpora.download import DownloadFault, Remote, fetch
from megatron.errors import UserError
from tests.servers import Shown, served

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def haste(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.001)
    monkeypatch.setattr(download, "TRIES", 3)


@pytest.fixture
def server():
    with served() as server:
        yield server


@pytest.fixture
def remote(server):
    return Remote(f"{server.address}/a.bin", "a.bin", len(CONTENT), SHA256)


def ranges(server):
    return [wanted for _, wanted in server.asked]


def test_a_broken_connection_is_continued_where_it_broke(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(location=f"{server.address}/elsewhere", status=[503, 429])
    server.files["/elsewhere"] = Shown(CONTENT, breaks=[100_000, 50_000])
    sizes = []
    fetch(remote, tmp_path / "a.bin", advance=sizes.append)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    continued = [wanted for path, wanted in server.asked if path == "/elsewhere"]
    assert continued == [None, "bytes=100000-", "bytes=150000-"]
    assert sum(sizes) == len(CONTENT)
    assert os.listdir(tmp_path) == ["a.bin"]
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000], ranges=False)
    fetch(remote, tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("known", [True, False])
def test_parts_of_two_versions_are_never_joined(server, remote, tmp_path, known):
    wanted = hashlib.sha256(OTHER).hexdigest()
    remote = Remote(remote.address, "a.bin", sha256=wanted if known else None)
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000, 0, 0, 0])
    with pytest.raises(DownloadFault, match=r"/a\.bin: .*IncompleteRead"):
        fetch(remote, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()
    server.files["/a.bin"] = Shown(OTHER)
    fetch(remote, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == OTHER
    assert any(ranges(server)) == known


def test_what_is_wrong_is_one_reason_and_no_file(server, remote, tmp_path):
    cases = [
        (Shown(OTHER), r"has the sha256 \w{12}…, not \w{12}…; what came was removed"),
        (Shown(CONTENT + b"x"), r"has 300,001 bytes, not 300,000"),
        (Shown(CONTENT[:-1]), r"has 299,999 bytes, not 300,000"),
        (Shown(status=[404]), r"/a\.bin: answers 404"),
        (Shown(status=[503] * 3), r"answers 503"),
        (Shown(location="file:///etc/passwd"), r"No connection adapters .*file:///etc"),
    ]
    for shown, reason in cases:
        server.files["/a.bin"] = shown
        with pytest.raises(DownloadFault, match=reason) as raised:
            fetch(remote, tmp_path / "a.bin")
        assert "\n" not in str(raised.value)
        assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a\.bin: cannot be written \(.*\) - "):
        fetch(remote, tmp_path / "file" / "a.bin")


def raw(status, body, *headers):
    """An answer byte for byte; the connection is closed after it."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


UNSOUND = [
    raw("200 OK", b"<html>", "Content-Length: 6", "Content-Type: text/html; charset=utf-8"),
    raw("200 OK", b"abc"),
    raw("200 OK", b"5\r\nabcde\r\n", "Transfer-Encoding: chunked"),
    raw("302 Found", b"", "Location: http://[::1", "Content-Length: 0"),
    raw("200 OK", b"abc", "Content-Length: 9"),
]


@contextmanager
def answering(answer):
    """The address of a server that gives this answer to everything."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_without_a_checksum_nothing_passes_that_may_be_another_file_or_a_part(tmp_path):
    for answer in UNSOUND:
        with answering(answer) as address, pytest.raises(DownloadFault, match=r"/a\.txt: "):
            fetch(Remote(f"{address}/a.txt", "a.txt"), tmp_path / "a.txt")
        assert not (tmp_path / "a.txt").exists()
    content = b"packed as it should be"
    answer = raw("200 OK", content, f"Content-Length: {len(content)}", "Content-Encoding: x-gzip")
    with answering(answer) as address:
        fetch(Remote(f"{address}/a.gz", "a.gz"), tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == content


def test_a_wrong_part_is_thrown_away_once(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT)
    for part in (b"damaged" + CONTENT[7:100_000], b"x" + CONTENT, CONTENT):
        (tmp_path / "a.bin.partial").write_bytes(part)
        fetch(remote, tmp_path / "a.bin")
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_disk_that_takes_no_more_is_one_message_and_what_came_is_kept(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"a\.bin: cannot be written \(File too large\) - rai"):
            fetch(remote, tmp_path / "a.bin")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "a.bin.partial").stat().st_size == 100_000
    fetch(remote, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert ranges(server)[-1] == "bytes=100000-"
