"""Downloads from a server that breaks connections, lies and sends other things than it should."""

import gzip
import hashlib
import os
import random
import resource
import signal
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from megatron.data.corpora.download import DownloadFault, Patience, Remote, fetch
from megatron.errors import UserError
from tests.servers import Shown, served
from tests.support import ROOT

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HASTE = Patience(tries=3, first_tries=2, pause=0.001, longest_pause=0.002, silence=5)


@pytest.fixture
def server():
    with served() as server:
        yield server


@pytest.fixture
def remote(server):
    return Remote(f"{server.address}/a.bin", "a.bin", len(CONTENT), SHA256)


def ranges(server):
    return [wanted for _, wanted in server.asked]


def nothing_is_left(folder):
    return not any(folder.iterdir())


def test_a_broken_connection_is_continued_where_it_broke(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000, 50_000])
    sizes = []
    fetch(remote, tmp_path / "a.bin", HASTE, sizes.append)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=100000-", "bytes=150000-"]
    assert sum(sizes) == len(CONTENT)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_server_that_cannot_continue_sends_all_again(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000], ranges=False)
    sizes = []
    fetch(remote, tmp_path / "a.bin", HASTE, sizes.append)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert sum(sizes) == len(CONTENT)


def test_another_process_continues_and_patience_ends(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000, 0, 0, 0])
    with pytest.raises(DownloadFault, match=r"/a\.bin: ends after 100,000 of 300,000 bytes"):
        fetch(remote, tmp_path / "a.bin", HASTE)
    assert not (tmp_path / "a.bin").exists()
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert ranges(server)[-1] == "bytes=100000-"


@pytest.mark.parametrize("tag", [None, '"the same"', 'W/"weak"'])
@pytest.mark.parametrize("known", [True, False])
def test_parts_of_two_versions_are_never_joined(server, remote, tmp_path, tag, known):
    if tag == '"the same"' and not known:
        pytest.skip("a server that lies about its versions is found by a sha256 alone")
    wanted = hashlib.sha256(OTHER).hexdigest()
    remote = Remote(remote.address, "a.bin", sha256=wanted if known else None)
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000, 0, 0, 0], tag=tag)
    with pytest.raises(DownloadFault):
        fetch(remote, tmp_path / "a.bin", HASTE)
    server.files["/a.bin"] = Shown(OTHER, tag=tag)
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == OTHER


def test_a_part_of_another_address_is_not_continued(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(OTHER, breaks=[100_000, 0, 0, 0], tag='"1"')
    with pytest.raises(DownloadFault):
        fetch(remote, tmp_path / "a.bin", HASTE)
    server.files["/b.bin"] = Shown(CONTENT, tag='"1"')
    fetch(Remote(f"{server.address}/b.bin", "a.bin"), tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


WRONG = {
    "wrong bytes": (Shown(OTHER), r"has the sha256 \w{12}…, not \w{12}…; what came was removed"),
    "too long": (Shown(CONTENT + b"x"), r"has 300,001 bytes, not 300,000"),
    "too short": (Shown(CONTENT[:-1]), r"has 299,999 bytes, not 300,000"),
    "says less": (Shown(CONTENT, length=299_999), r"has 299,999 bytes, not 300,000"),
    "says more": (Shown(CONTENT, length=300_001), r"has 300,001 bytes, not 300,000"),
    "gone": (Shown(status=[404]), r"/a\.bin: answers 404 \(is not there\)"),
    "forbidden": (Shown(status=[403]), r"answers 403 \(needs rights\)"),
    "busy for long": (Shown(status=[503] * 3), r"answers 503"),
    "to a file": (Shown(location="file:///etc/passwd"), r"No connection adapters .*file:///etc"),
    "in a circle": (Shown(location="/a.bin"), r"Exceeded 30 redirects"),
}


def raw(status, body, *headers):
    """An answer byte for byte; the connection is closed after it."""
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


CHUNKED = raw("200 OK", b"5\r\nabcde\r\n", "Transfer-Encoding: chunked", 'ETag: "1"')
REST = ("206 Partial Content", b"fg", 'ETag: "1"', "Content-Length: 2")
UNSOUND = {
    "packed": (
        [raw("200 OK", b"abc", "Content-Length: 3", "Content-Encoding: gzip")],
        r"/a\.txt: sends the file packed \(gzip\), unasked",
    ),
    "a part that nobody asked for": (
        [raw("206 Partial Content", b"ab", "Content-Range: bytes 0-1/9", "Content-Length: 2")],
        r"/a\.txt: sends a part of the file, unasked",
    ),
    "a page of a network that wants a login": (
        [raw("200 OK", b"<html>", "Content-Length: 6", "Content-Type: text/html; charset=utf-8")],
        r"/a\.txt: answers with a web page instead of the file",
    ),
    "no end that could be recognised": (
        [raw("200 OK", b"abc")],
        r"/a\.txt: does not say how long the file is, so a part could pass for all",
    ),
    "a length that is no number": (
        [raw("200 OK", b"abc", "Content-Length: -3")],
        r"/a\.txt: does not say how long the file is",
    ),
    "chunks without an end": ([CHUNKED], r"ends after 5 of an unknown number of bytes"),
    "less than what is missing": (
        [CHUNKED, raw(*REST, "Content-Range: bytes 5-6/9"), raw("404 Gone", b"")],
        r"/a\.txt: answers 404",
    ),
    "an address that is none": (
        [raw("302 Found", b"", "Location: http://[::1", "Content-Length: 0")],
        r"/a\.txt: Invalid IPv6 URL",
    ),
}


@contextmanager
def answering(answers):
    """The address of a server that gives these answers in turn, the last one for ever."""
    left = list(answers)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("case", UNSOUND)
def test_without_a_checksum_nothing_passes_that_may_be_another_file_or_a_part(case, tmp_path):
    answers, reason = UNSOUND[case]
    with answering(answers) as address, pytest.raises(DownloadFault, match=reason):
        fetch(Remote(f"{address}/a.txt", "a.txt"), tmp_path / "a.txt", HASTE)
    assert not (tmp_path / "a.txt").exists()


def test_a_packed_file_may_be_called_packed_by_its_server(tmp_path):
    content = gzip.compress(b"text")
    length = f"Content-Length: {len(content)}"
    answer = raw("200 OK", content, length, "Content-Encoding: x-gzip")
    with answering([answer]) as address:
        fetch(Remote(f"{address}/a.gz", "a.gz"), tmp_path / "a.gz", HASTE)
    assert (tmp_path / "a.gz").read_bytes() == content


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_reason_and_no_file(server, remote, tmp_path, case):
    shown, reason = WRONG[case]
    server.files["/a.bin"] = Shown(**vars(shown) | {"status": list(shown.status)})
    with pytest.raises(DownloadFault, match=reason) as raised:
        fetch(remote, tmp_path / "a.bin", HASTE)
    assert "\n" not in str(raised.value)
    assert nothing_is_left(tmp_path)


def test_a_size_that_is_too_large_ends_in_patience_where_no_size_is_known(server, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, length=400_000)
    with pytest.raises(DownloadFault, match=r"ends after 300,000 of 400,000|not as long"):
        fetch(Remote(f"{server.address}/a.bin", "a.bin"), tmp_path / "a.bin", HASTE)
    assert not (tmp_path / "a.bin").exists()


def test_a_busy_server_is_asked_again(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, status=[503, 429])
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_redirect_is_followed_and_continued(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(location=f"{server.address}/elsewhere")
    server.files["/elsewhere"] = Shown(CONTENT, breaks=[100_000])
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert ("/elsewhere", "bytes=100000-") in server.asked


def test_a_wrong_part_is_thrown_away_once(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT, breaks=[100_000, 0, 0, 0])
    with pytest.raises(DownloadFault):
        fetch(remote, tmp_path / "a.bin", HASTE)
    part = tmp_path / "a.bin.partial"
    part.write_bytes(b"damaged" + part.read_bytes()[7:])  # by a disk, or a loss of power
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_no_server_and_no_place_are_one_message(tmp_path):
    with served() as server:
        address = f"{server.address}/a.bin"
    with pytest.raises(DownloadFault, match=r"/a\.bin: .*Connection refused"):
        fetch(Remote(address, "a.bin"), tmp_path / "a.bin", HASTE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a\.bin: cannot be written \(.*\) - "):
        fetch(Remote(address, "a.bin"), tmp_path / "file" / "a.bin", HASTE)


def test_a_disk_that_takes_no_more_is_one_message_and_what_came_is_kept(server, remote, tmp_path):
    server.files["/a.bin"] = Shown(CONTENT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            UserError, match=r"a\.bin: cannot be written \(File too large\) - raise"
        ):
            fetch(remote, tmp_path / "a.bin", HASTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin.partial").stat().st_size == 100_000
    fetch(remote, tmp_path / "a.bin", HASTE)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert ranges(server)[-1] == "bytes=100000-"


CODE = """
import sys
from pathlib import Path
from megatron.data.corpora.download import Patience, Remote, fetch
remote = Remote(sys.argv[1], "a.bin", sha256=sys.argv[3] or None)
fetch(remote, Path(sys.argv[2]), Patience(tries=5, pause=0.001))
"""


def kill_while_downloading(forks, server, folder, seed, known):
    """Kill four downloads, each after a random number of packets; then let one come to its end."""
    draw = random.Random(seed)
    script = folder / "fetch.py"
    script.write_text(CODE)
    words = (script, f"{server.address}/a.bin", folder / "a.bin", SHA256 if known else "")
    for _ in range(4):
        waiting, go_on = server.pause_after(draw.randrange(8))
        process = forks.start(*words, log=folder / "log")
        assert waiting.wait(10), (folder / "log").read_text()
        time.sleep(draw.random() * 0.02)  # what the client does with the last packets
        os.kill(process, signal.SIGKILL)
        assert forks.wait(process) == -signal.SIGKILL
        go_on.set()
        assert not (folder / "a.bin").exists()
    server.hook = lambda: None
    process = forks.start(*words, log=folder / "log")
    assert forks.wait(process) == 0, (folder / "log").read_text()
    assert (folder / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("known", [True, False])
def test_a_download_that_was_killed_is_continued(server, forks, tmp_path, known):
    server.files["/a.bin"] = Shown(CONTENT)
    kill_while_downloading(forks, server, tmp_path, 0, known)
    assert any(ranges(server))
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "fetch.py", "log"]


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
def test_downloads_that_were_killed_four_times_are_the_same_bytes(server, forks, tmp_path, seed):
    server.files["/a.bin"] = Shown(CONTENT)
    kill_while_downloading(forks, server, tmp_path, seed, known=bool(seed % 2))


SEVERAL = """
import sys
from pathlib import Path
from megatron.data.corpora.sources import Local, Source
source = Source(urls=[sys.argv[1]], tried="here")
Local(source, Path(sys.argv[2])).all_files("mine")
"""


def test_ctrl_c_does_not_wait_for_a_server_that_is_silent(server, tmp_path):
    server.files["/a.bin"] = Shown(bytes(3_000_000))  # many packets
    silent, ended = server.pause_after(0)
    # A process of its own: threads are waited for where Python ends.
    words = [sys.executable, "-c", SEVERAL, f"{server.address}/a.bin", str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert silent.wait(20)
        time.sleep(0.5)  # the client takes what came, and waits for more
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=40)  # the server is still silent then
    ended.set()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in message
