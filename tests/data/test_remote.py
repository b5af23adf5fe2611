"""Token files at an address: they are copied once, and what is wrong names the address."""

import numpy as np
import pytest

from megatron.address import address_fault, is_address, without_secrets
from megatron.config import load
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError
from tests.servers import Shown, served

MODEL = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8"]
DOCUMENTS = [[number, number + 1, number + 2] for number in range(0, 300, 3)]


def write(prefix, documents=DOCUMENTS):
    meta = {"corpus": "mine", "tokenizer": {"type": "t", "hash": "h", "vocab_size": 400}}
    with TokenWriter(prefix, np.uint16, meta=meta, overwrite=True) as writer:
        for ids in documents:
            writer.add(ids)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "c")
    with served() as running:
        show(running, tmp_path)
        yield running


def show(server, folder):
    for suffix in (".bin", ".idx", ".json"):
        server.files[f"/c{suffix}"] = Shown((folder / f"c{suffix}").read_bytes())


def documents_of(tokens):
    return [tokens.read(document).tolist() for document in range(len(tokens))]


def test_files_are_copied_once_and_a_changed_file_anew(server, tmp_path):
    address = f"{server.address}/c"
    for _ in range(2):
        assert documents_of(TokenFile.open(address)) == DOCUMENTS
    copies = {path.name for path in (tmp_path / "cache").rglob("c.*")}
    assert copies == {"c.bin", "c.idx", "c.json"}
    write(tmp_path / "c", DOCUMENTS[::-1])
    show(server, tmp_path)
    assert documents_of(TokenFile.open(address)) == DOCUMENTS[::-1]
    del server.files["/c.json"]
    assert TokenFile.open(address).meta == {}


def test_what_is_wrong_at_an_address_leaves_no_copy(server, tmp_path):
    address = f"{server.address}/c"
    whole = server.files["/c.bin"]
    for wrong in (None, Shown(whole.content, breaks=[100]), Shown(bytes(len(whole.content)))):
        server.files["/c.bin"] = wrong or Shown(status=[404] * 9)
        with pytest.raises(UserError, match=r"/c cannot be read \(|c\.bin.*agree with the sha256"):
            TokenFile.open(address)
        assert not list((tmp_path / "cache").rglob("c.bin"))
    server.files["/c.bin"] = whole
    assert documents_of(TokenFile.open(address)) == DOCUMENTS


def test_addresses_that_cannot_be_used_are_explained_without_their_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKEN_CACHE", str(tmp_path))
    cases = {
        "nothing://bucket/c": "cannot be read (ValueError: Protocol not known: nothing)",
        "https://me:secret@host/c": "https://host/c is given with a name or password - leave",
        "s3://key:secret@bucket/c": "s3://bucket/c is given with a name or password - leave",
        "https://host/c?sig=secret": "https://host/c is given with a query (what follows ? or",
    }
    for where, message in cases.items():
        with pytest.raises(UserError) as caught:
            TokenFile.open(where)
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)
    for key in ("data_path", "train_data_paths"):
        with pytest.raises(UserError) as caught:
            load([], [*MODEL, f"{key}=https://me:secret@host/c"])
        assert f"{key}: https://host/c is given with a name or password" in str(caught.value)
        assert "secret" not in str(caught.value)
    assert is_address("hf://datasets/owner/name@rev/c")
    assert not is_address("data/c")
    assert address_fault("hf://datasets/owner/name@rev/c") is None
    assert without_secrets("https://a:b@host/c?d#e") == "https://host/c"
