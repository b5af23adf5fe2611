"""Index files of GPT-NeoX and Megatron-Core: every number type, several sequences, large files."""

import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from megatron.data import token_index
from megatron.data.token_index import Stored, read_index, write_index
from megatron.data.tokens import TokenFile, TokenWriter
from megatron.errors import UserError

CORE = os.environ.get("MEGATRON_CORE", "")
needs_core = pytest.mark.skipif(
    not CORE,
    reason="MEGATRON_CORE names no folder: pip install --no-deps --target FOLDER megatron-core",
)


def write(prefix, sequences, firsts, dtype=np.uint16, code=8):
    """Both files byte by byte, as the format says; firsts: the document index."""
    lengths = [len(ids) for ids in sequences]
    pointers = [sum(lengths[:which]) * np.dtype(dtype).itemsize for which in range(len(lengths))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
    numbers = [np.array(lengths, np.int32), np.array(pointers, np.int64)]
    numbers.append(np.array(firsts, np.int64))
    index = header + b"".join(array.tobytes() for array in numbers)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    content = b"".join(np.array(ids, dtype).tobytes() for ids in sequences)
    prefix.with_name(prefix.name + ".bin").write_bytes(content)
    return prefix


CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def test_every_number_type_is_read_and_written_byte_for_byte(tmp_path):
    documents = [[1, 2, 3], [], [127]]
    for code, dtype in CODES.items():
        theirs = write(tmp_path / f"theirs{code}", documents, [0, 1, 2, 3], dtype, code)
        tokens = TokenFile.open(theirs)
        assert tokens.dtype == dtype
        assert [tokens.read(document).tolist() for document in range(3)] == documents
        with TokenWriter(tmp_path / f"ours{code}", dtype) as writer:
            for ids in documents:
                writer.add(ids)
        for suffix in (".bin", ".idx"):
            ours = (tmp_path / f"ours{code}{suffix}").read_bytes()
            assert ours == (tmp_path / f"theirs{code}{suffix}").read_bytes()


def test_a_wrong_index_is_named(tmp_path):
    cases = {
        ((0, 1, 2, 3), 7): "dtype code 7, but only version 1 and codes of whole numbers",
        ((1, 3), 8): "its document index does not rise from 0 to the number of sequences, 3",
        ((0, 2, 1, 3), 8): "its document index does not rise from 0",
        ((0, 1, 2, 4), 8): "its document index does not rise from 0",
        ((), 8): "has no documents - make it anew",
    }
    for (firsts, code), what in cases.items():
        write(tmp_path / "c", [[1, 2], [3], [4]], firsts, code=code)
        with pytest.raises(UserError, match=rf"c\.idx: .*{what}"):
            TokenFile.open(tmp_path / "c")


def test_damage_is_named_in_any_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "PIECE", 2)
    write(tmp_path / "c", [[1], [2], [3], [4], [5]], range(6))
    path = tmp_path / "c.idx"
    whole = path.read_bytes()
    lengths, pointers = 34, 34 + 5 * 4
    for sequence in range(5):
        for place in (lengths + 4 * sequence + 3, pointers + 8 * sequence):
            damaged = bytearray(whole)
            damaged[place] ^= 0x80
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"disagree: sequence {sequence} begins at byte"):
                TokenFile.open(tmp_path / "c")


@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_a_document_of_several_sequences_is_one(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "PIECE", piece)
    sequences = [[1, 2], [3], [], [4, 5, 6], [7]]
    write(tmp_path / "c", sequences, [0, 2, 2, 4, 5])  # the second document has none
    tokens = TokenFile.open(tmp_path / "c")
    assert tokens.sizes.tolist() == [3, 0, 3, 1]
    assert [tokens.read(which).tolist() for which in range(4)] == [[1, 2, 3], [], [4, 5, 6], [7]]
    assert tokens.read(0, 1).tolist() == [2, 3]


def test_an_index_in_which_no_document_was_ended_has_one_for_each_sequence(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]], [0])  # as GPT-NeoX's merging of files leaves it
    assert TokenFile.open(tmp_path / "c").sizes.tolist() == [2, 1]


def test_modes_of_a_multimodal_file_are_refused(tmp_path):
    write(tmp_path / "c", [[1], [2]], [0, 1, 2])
    with (tmp_path / "c.idx").open("ab") as file:
        file.write(b"\x00\x01")
    with pytest.raises(
        UserError, match=r"c\.idx: has a mode for each sequence.* - prepare the text"
    ):
        TokenFile.open(tmp_path / "c")


def test_ids_beyond_4_gib_and_2_to_the_31_tokens_are_read(tmp_path):
    # Three documents of 2^30 tokens and a short one, of which only a few ids are on the disk.
    long = 1 << 30
    lengths = array("i", [long, long, long, 5])
    write_index(tmp_path / "c.idx", np.dtype(np.uint16), lengths)
    with (tmp_path / "c.bin").open("wb") as file:
        for token, ids in {
            long - 2: [7, 8],
            3 * long - 2: [9, 10],
            3 * long: [1, 2, 3, 4, 5],
        }.items():
            file.seek(2 * token)
            file.write(np.array(ids, np.uint16).tobytes())
    tokens = TokenFile.open(tmp_path / "c")
    assert (tokens.tokens, (tmp_path / "c.bin").stat().st_size) == (3 * 2**30 + 5, 6 * 2**30 + 10)
    assert tokens.sizes.tolist() == list(lengths)
    assert tokens.read(0, long - 2).tolist() == [7, 8]
    assert tokens.read(2, long - 2).tolist() == [9, 10]
    assert tokens.read(3).tolist() == [1, 2, 3, 4, 5]


def test_a_document_of_more_than_2_to_the_31_tokens_is_one_of_several_sequences(tmp_path):
    long = 2**31 - 1
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 2, 2)
    rest = struct.pack("<iiqqqq", long, 9, 0, long, 0, 2)
    (tmp_path / "c.idx").write_bytes(header + rest)
    with (tmp_path / "c.bin").open("wb") as file:
        file.seek(long + 3)
        file.write(bytes([1, 2, 3, 4, 5, 6]))
    tokens = TokenFile.open(tmp_path / "c")
    assert (tokens.sizes.dtype, tokens.sizes.tolist()) == (np.int64, [2**31 + 8])
    assert tokens.read(0, 2**31 + 4).tolist() == [3, 4, 5, 6]


READ = """
import sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
tokens = IndexedDataset(sys.argv[1])
documents = [ids.tolist() for ids in tokens]
print(tokens.index.dtype.__name__, tokens.document_indices.tolist(), documents)
"""
WRITE = """
import sys, numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
prefix, dtype = sys.argv[1:]
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
builder.add_item(torch.tensor([1, 2, 3]))
builder.end_document()
builder.add_document(torch.tensor([4, 5, 6]), [2, 1])
builder.add_item(torch.tensor([127]))
builder.end_document()
builder.finalize(prefix + ".idx")
"""


def core(script, *words):
    """Run a script with Megatron-Core, whose package has the name of ours, in its own process."""
    command = [sys.executable, "-W", "ignore", "-c", script, *words]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": CORE},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.campaign
def test_an_index_of_100_million_documents_is_written_and_checked(tmp_path):
    count = 10**8
    lengths = array(
        "i", np.random.default_rng(0).integers(0, 2000, count, dtype=np.int32).tobytes()
    )
    write_index(tmp_path / "c.idx", np.dtype(np.uint16), lengths)
    index = read_index(Stored(tmp_path / "c.idx"))
    assert len(index.sizes) == count
    assert index.extent == 2 * int(np.frombuffer(lengths, np.int32).sum(dtype=np.int64))


def test_the_golden_file_of_the_reference_is_one_sequence_each():
    golden = Path(__file__).parents[1] / "golden" / "data" / "corpus_text_document.idx"
    index = read_index(Stored(golden))
    assert (len(index.sizes), index.extent) == (600, 342218)


@needs_core
def test_megatron_core_reads_and_writes_the_same_files(tmp_path):
    for dtype in ("uint16", "int32"):
        core(WRITE, str(tmp_path / f"theirs{dtype}"), dtype)
        tokens = TokenFile.open(tmp_path / f"theirs{dtype}")
        documents = [tokens.read(which).tolist() for which in range(len(tokens))]
        assert (tokens.dtype, documents) == (dtype, [[1, 2, 3], [4, 5, 6], [127]])
        with TokenWriter(tmp_path / f"ours{dtype}", dtype) as writer:
            for ids in documents:
                writer.add(ids)
        read = core(READ, str(tmp_path / f"ours{dtype}"))
        assert read == f"{dtype} [0, 1, 2, 3] [[1, 2, 3], [4, 5, 6], [127]]"
        ours, theirs = tmp_path / f"ours{dtype}.bin", tmp_path / f"theirs{dtype}.bin"
        assert ours.read_bytes() == theirs.read_bytes()
