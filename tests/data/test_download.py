"""Downloads from a server that breaks connections, lies and sends other things than it should."""

import hashlib
import os
import random
from pathlib import Path

import pytest

from megatron.data.corpora.download import DownloadFault, Remote, fetch
from megatron.errors import UserError
from tests.servers import Shown, served

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr("time.sleep", lambda _: None)


@pytest.fixture
def server():
    with served() as server:
        yield server


@pytest.fixture
def remote(server):
    return Remote(f"{server.address}/a.bin", "a.bin", len(CONTENT), SHA256)


def test_a_broken_connection_is_continued_where_it_broke(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(location=f"{server.address}/elsewhere")
    server.files["/elsewhere"] = Shown(CONTENT, breaks=[100_000, 50_000])
    fetch(remote, Path("a.bin"))
    assert Path("a.bin").read_bytes() == CONTENT
    assert server.asked[-1] == ("/elsewhere", "bytes=150000-")
    assert os.listdir(tmp_path) == ["a.bin"]


def test_what_an_earlier_process_left_is_continued_if_its_sum_is_right(server, remote):
    server.files["/a.bin"] = Shown(CONTENT)
    for part in (CONTENT[:100_000], CONTENT):
        Path("a.bin.partial").write_bytes(part)
        fetch(remote, Path("a.bin"))
        assert Path("a.bin").read_bytes() == CONTENT
    for part in (b"damaged" + CONTENT[7:100_000], CONTENT + b"x"):
        Path("a.bin.partial").write_bytes(part)
        with pytest.raises(DownloadFault):
            fetch(remote, Path("a.bin"))
        fetch(remote, Path("a.bin"))  # what was wrong is gone
        assert Path("a.bin").read_bytes() == CONTENT
    # Without a sum nothing shows a wrong joint, so nothing is continued.
    Path("a.bin.partial").write_bytes(OTHER[:100_000])
    fetch(remote._replace(sha256=None), Path("a.bin"))
    assert Path("a.bin").read_bytes() == CONTENT


def test_what_is_wrong_is_one_reason_and_no_file(server, remote):
    unknown = remote._replace(bytes=None, sha256=None)
    cases = [
        (remote, Shown(OTHER), r"/a\.bin: the answer has another sha256"),
        (remote, Shown(CONTENT[:-1]), r"Consistency check failed: file should be of size 300000"),
        (remote, Shown(status=[404]), r"404"),
        (remote, Shown(location="file:///etc/passwd"), r"unsupported protocol"),
        (unknown, Shown(b" <!DOCTYPE html><html>"), r"the answer is a web page"),
        (unknown, Shown(b"abc", length=9), r"/a\.bin: "),
    ]
    for file, shown, reason in cases:
        server.files["/a.bin"] = shown
        with pytest.raises(DownloadFault, match=reason) as raised:
            fetch(file, Path("a.bin"))
        assert "\n" not in str(raised.value)
        assert not Path("a.bin").exists()
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"a\.bin: cannot be written \(.*\) - "):
        fetch(remote, Path("file/a.bin"))
