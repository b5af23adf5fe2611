"""Token files at an address: what is copied, kept and refused. The server breaks and lies."""

import hashlib
import importlib.util
import json
import multiprocessing
import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import numpy as np
import pytest

from megatron.address import address_fault, is_address, without_secrets
from megatron.config import load
from megatron.config.config import is_relative
from megatron.data import remote, remote_file
from megatron.data.tokens import TokenFile, TokenWriter, verify
from megatron.errors import UserError
from tools.inspect_data import main as inspect_data
from tools.merge_data import main as merge_data

MODEL = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8"]
DOCUMENTS = [[number, number + 1, number + 2] for number in range(0, 300, 3)]


class Server(ThreadingHTTPServer):
    """Files of a folder, with ranges and ETags, and one fault at a time.

    breaks: answers that end half way; asked: what was asked for
    """

    daemon_threads = True
    breaks = 0
    fault = ""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        server.asked.append((self.command, self.path, self.headers.get("Range")))
        path = server.folder / self.path.lstrip("/")
        if server.fault == "down":
            return self.send_error(503)
        if not path.is_file():
            return self.send_error(404)
        whole = path.read_bytes()
        content, status = whole, 200
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and server.fault != "no ranges":
            content, status = whole[int(wanted[1]) : int(wanted[2]) + 1], 206
        if server.fault == "short" and self.command == "GET":
            content = content[:-3]
        if server.fault == "wrong bytes" and self.path.endswith((".bin", ".idx")):
            content = bytes(len(content))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if server.fault != "no tag":
            self.send_header("ETag", f'"{hash(whole)}"')
        self.end_headers()
        if self.command == "HEAD":
            return None
        if server.breaks:
            server.breaks -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)
        self.close_connection = True
        return None


def write(folder, documents=DOCUMENTS, **options):
    meta = {"corpus": "mine", "tokenizer": {"type": "t", "hash": "h", "vocab_size": 400}}
    with TokenWriter(folder / "c_text_document", np.uint16, meta=meta, **options) as writer:
        for ids in documents:
            writer.add(ids)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "served"
    place.mkdir()
    write(place)
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_file, "WAIT", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def server(folder):
    with Server(folder) as running:
        yield running
        running.shutdown()


@pytest.fixture
def by_blocks(monkeypatch):
    """A small file is then read as a large one is."""
    monkeypatch.setattr(remote, "SMALL", 0)
    monkeypatch.setattr(remote, "BLOCK", 64)


def address(server):
    return f"{server.url}/c_text_document"


def documents_of(tokens):
    return [tokens.read(document).tolist() for document in range(len(tokens))]


def names(cache):
    """Files of the cache without the folders that stand for address and version."""
    found = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(path.name for path in found)


FILES = ["c_text_document.bin", "c_text_document.idx", "c_text_document.json"]


def test_a_small_file_is_copied_once(server, cache):
    tokens = TokenFile.open(address(server))
    assert documents_of(tokens) == DOCUMENTS
    assert (tokens.meta["corpus"], tokens.prefix.name) == ("mine", "c_text_document")
    assert names(cache) == FILES
    server.asked.clear()
    assert documents_of(TokenFile.open(address(server))) == DOCUMENTS
    assert {method for method, _, _ in server.asked} == {"HEAD"}


def test_a_large_file_is_read_by_blocks_that_are_kept(server, cache, by_blocks):
    tokens = TokenFile.open(address(server))
    assert tokens.read(50).tolist() == DOCUMENTS[50]
    ranges = [wanted for method, name, wanted in server.asked if wanted]
    assert ranges == ["bytes=256-319"]  # document 50 is at byte 300
    assert documents_of(tokens) == DOCUMENTS  # also those over the end of a block
    server.asked.clear()
    again = TokenFile.open(address(server))
    assert documents_of(again) == DOCUMENTS
    assert not [wanted for _, _, wanted in server.asked if wanted]
    assert "c_text_document.bin" not in names(cache)
    assert len(names(cache)) == 2 + -(-600 // 64)


def test_the_variable_copies_a_large_file_whole(server, cache, by_blocks, monkeypatch):
    monkeypatch.setenv("TOKEN_CACHE_WHOLE", "1")
    assert documents_of(TokenFile.open(address(server))) == DOCUMENTS
    assert names(cache) == FILES


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_other_protocols_are_read_too(protocol, folder, tmp_path, by_blocks):
    where = f"{protocol}://{folder}/c_text_document"
    if protocol == "memory":
        for path in folder.iterdir():
            with fsspec.open(f"memory://{path}", "wb") as file:
                file.write(path.read_bytes())
    assert documents_of(TokenFile.open(where)) == DOCUMENTS


def test_without_a_card_the_other_two_files_suffice(server, folder):
    (folder / "c_text_document.json").unlink()
    tokens = TokenFile.open(address(server))
    assert (documents_of(tokens), tokens.meta) == (DOCUMENTS, {})


def test_a_connection_that_breaks_is_tried_again(server, by_blocks):
    server.breaks = 2
    tokens = TokenFile.open(address(server))
    server.breaks = 3
    assert documents_of(tokens) == DOCUMENTS
    assert server.breaks == 0


@pytest.mark.parametrize("fault", ["down", "short"])
def test_a_connection_that_stays_broken_is_named_and_leaves_nothing(server, cache, fault):
    server.fault = fault
    with pytest.raises(UserError, match=r"c_text_document\.\w+: cannot be read \(.* - check the"):
        TokenFile.open(address(server))
    assert names(cache) == []


def test_a_block_that_stays_broken_is_named(server, by_blocks):
    tokens = TokenFile.open(address(server))
    server.breaks = 99
    with pytest.raises(UserError, match=r"c_text_document\.bin: cannot be read \(.* - check the"):
        tokens.read(0)
    server.breaks = 0
    assert tokens.read(0).tolist() == DOCUMENTS[0]


def test_a_server_without_ranges_is_named_and_can_be_used_whole(server, by_blocks, monkeypatch):
    server.fault = "no ranges"
    tokens = TokenFile.open(address(server))
    with pytest.raises(
        UserError, match=r"the server sends no parts of files - set TOKEN_CACHE_WHO"
    ):
        tokens.read(0)
    monkeypatch.setenv("TOKEN_CACHE_WHOLE", "1")
    assert documents_of(TokenFile.open(address(server))) == DOCUMENTS


def test_wrong_bytes_do_not_agree_with_the_card_and_are_not_kept(server, cache):
    server.fault = "wrong bytes"
    with pytest.raises(UserError, match=r"c_text_document\.idx: does not agree with the sha256"):
        TokenFile.open(address(server))
    assert names(cache) == ["c_text_document.json"]


def test_a_changed_file_is_named_while_it_is_read_and_new_when_it_is_opened(
    server, folder, by_blocks
):
    tokens = TokenFile.open(address(server))
    assert tokens.read(0).tolist() == [0, 1, 2]
    pickled = pickle.dumps(tokens)
    new = [[9, 9, 9], *DOCUMENTS[1:]]
    write(folder, new, overwrite=True)
    with pytest.raises(UserError, match=r"c_text_document\.bin: was changed since it was opened"):
        tokens.read(99)
    assert tokens.read(0).tolist() == [0, 1, 2]
    assert documents_of(TokenFile.open(address(server))) == new
    with pytest.raises(UserError, match=r"c_text_document: was changed since it was opened"):
        pickle.loads(pickled)


def test_a_damaged_block_of_the_cache_is_fetched_again(server, cache, by_blocks):
    documents_of(TokenFile.open(address(server)))
    blocks = sorted(path for path in cache.glob("*/*/blocks/*/*"))
    content = bytearray(blocks[0].read_bytes())
    content[5] ^= 1
    blocks[0].write_bytes(content)
    blocks[1].write_bytes(b"")
    blocks[2].unlink()
    server.asked.clear()
    assert documents_of(TokenFile.open(address(server))) == DOCUMENTS
    assert len([wanted for _, _, wanted in server.asked if wanted]) == 3


def test_a_copy_that_was_cut_is_made_again_and_a_damaged_one_says_how(server, cache):
    TokenFile.open(address(server))
    for name in FILES:
        (copied,) = cache.rglob(name)
        copied.write_bytes(copied.read_bytes()[:-3])
        assert documents_of(TokenFile.open(address(server))) == DOCUMENTS
    copied.write_bytes(bytes(copied.stat().st_size))
    with pytest.raises(UserError, match=f"are whole, remove {re.escape(str(copied.parent))}: "):
        TokenFile.open(address(server))


def test_the_blocks_of_the_cache_are_bounded(server, cache, by_blocks, monkeypatch):
    monkeypatch.setattr(remote, "CLEARED", 1)
    monkeypatch.setenv("TOKEN_CACHE_GB", str(3 * 68e-9))
    assert documents_of(TokenFile.open(address(server))) == DOCUMENTS
    assert len(list(cache.glob("*/*/blocks/*/*"))) == 3
    monkeypatch.setenv("TOKEN_CACHE_GB", "much")
    with pytest.raises(UserError, match="TOKEN_CACHE_GB: 'much' is no size - give a number of gig"):
        documents_of(TokenFile.open(address(server)))


def test_a_block_that_another_process_writes_stays(server, cache, by_blocks, monkeypatch):
    tokens = TokenFile.open(address(server))
    tokens.read(0)
    (block,) = (path for path in cache.rglob("blocks/*/*") if path.is_file())
    unfinished = block.with_name(".00000009.1.1.00000000.tmp")
    unfinished.write_bytes(b"half of it")
    monkeypatch.setenv("TOKEN_CACHE_GB", "0")
    remote._keep_bound()
    assert unfinished.exists()
    assert not block.exists()


def _read_all(where, answers):
    answers.put(documents_of(TokenFile.open(where)))


def test_processes_share_the_cache_after_a_fork_too(server, cache, by_blocks):
    tokens = TokenFile.open(address(server))
    tokens.read(0)  # there is a connection now
    forks = multiprocessing.get_context("fork")
    answers = forks.Queue()
    workers = [forks.Process(target=lambda: answers.put(documents_of(tokens)))]
    workers += [forks.Process(target=_read_all, args=(address(server), answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [DOCUMENTS] * 3
    for worker in workers:
        worker.join()
    assert len(names(cache)) == 2 + -(-600 // 64)


def test_verify_copies_all_of_it(server, by_blocks):
    assert verify(address(server)).endswith("300 tokens are whole (sha256 and vocabulary)")


def test_a_server_that_cannot_tell_contents_apart_is_warned_of(server, by_blocks, caplog):
    server.fault = "no tag"
    TokenFile.open(address(server))
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "neither ETag nor time: a change that keeps the size is not noticed" in warning


def test_missing_files_are_named(server, folder):
    (folder / "c_text_document.bin").unlink()
    with pytest.raises(
        UserError, match=r"there is no http://\S+c_text_document.bin - give the address"
    ):
        TokenFile.open(address(server))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("s3://bucket/c", "s3:// needs a package that is not installed - pip install s3fs"),
        ("gs://bucket/c", "gs:// needs a package that is not installed - pip install gcsfs"),
        ("nothing://bucket/c", "the protocol nothing:// is not known - use s3, gs, hf, https"),
        ("https://me:secret@host/c", "https://host/c is given with a name or password - leave"),
        ("s3://key:secret@bucket/c", "s3://bucket/c is given with a name or password - leave"),
        ("https://host/c?sig=secret", "https://host/c is given with a query (what follows ? or"),
    ],
)
def test_addresses_that_cannot_be_used_are_explained_without_their_secrets(where, message):
    package = message.rpartition("pip install ")[2]
    if package in ("s3fs", "gcsfs") and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError) as caught:
        TokenFile.open(where)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["data_path", "train_data_paths"])
def test_a_configuration_refuses_an_address_with_a_password(key):
    with pytest.raises(UserError) as caught:
        load([], [*MODEL, f"{key}=https://me:secret@host/c"])
    assert f"{key}: https://host/c is given with a name or password" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_is_no_relative_path():
    assert is_address("hf://datasets/owner/name@rev/c")
    assert not is_address("data/c")
    assert not is_relative("https://host/c")
    assert address_fault("hf://datasets/owner/name@rev/c") is None
    assert without_secrets("https://a:b@host/c?d#e") == "https://host/c"


def test_files_at_addresses_are_merged_and_counted(server, folder, by_blocks, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    write(mine, [[5, 6]])
    output = tmp_path / "both"
    assert merge_data([address(server), f"{mine}/c_text_document", "-o", str(output)]) == 0
    merged = TokenFile.open(output)
    assert documents_of(merged) == [*DOCUMENTS, [5, 6]]
    assert merged.meta["merged"][0]["prefix"] == address(server)
    source = merged.meta["sources"][0]
    content = (folder / "c_text_document.bin").read_bytes()
    assert source["path"] == f"{address(server)}.bin"
    assert source["sha256"] == hashlib.sha256(content).hexdigest()
    assert merge_data([address(server), address(server), "-o", str(tmp_path / "twice")]) == 1
    assert "is given twice" in capsys.readouterr().err
    assert inspect_data([address(server)]) == 0
    assert capsys.readouterr().out.startswith(f"{address(server)} (mine)\n")


def test_damage_at_the_address_names_the_address(server, folder):
    for name in ("c_text_document.json", "c_text_document.idx"):
        (folder / name).write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"^http://\S+c_text_document, as copied to this machine: "):
        TokenFile.open(address(server))
