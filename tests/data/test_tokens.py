"""Token files in the format of GPT-NeoX and Megatron-Core: read, written, and what is refused."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data import token_index
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter, verify
from megatron.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "corpus_text_document"
CORE = os.environ.get("MEGATRON_CORE", "")
needs_core = pytest.mark.skipif(
    not CORE,
    reason="MEGATRON_CORE names no folder: pip install --no-deps --target FOLDER megatron-core",
)


@pytest.fixture
def golden(tmp_path):
    """A copy of the reference's files that may be damaged."""
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{GOLDEN}{suffix}", tmp_path / f"corpus{suffix}")
    return tmp_path / "corpus"


def write(prefix, documents, dtype=np.uint16, **options):
    with TokenWriter(prefix, dtype, **options) as writer:
        for ids in documents:
            writer.add(ids)
    return prefix


def write_bytes(prefix, sequences, firsts, dtype=np.uint16, code=8):
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


def documents_of(tokens):
    return [tokens.read(document).tolist() for document in range(len(tokens))]


def fault(prefix):
    with pytest.raises(UserError) as caught:
        TokenFile.open(prefix)
    message = str(caught.value)
    assert "\n" not in message
    assert " - " in message  # what - how to fix
    return message


def test_the_reference_file_is_read_and_written_byte_for_byte(tmp_path):
    tokens = TokenFile.open(GOLDEN)
    assert (len(tokens), tokens.tokens, tokens.dtype, tokens.meta) == (600, 171109, np.uint16, {})
    assert tokens.sizes.dtype == np.int32
    assert tokens.sizes.sum() == 171109
    write(tmp_path / "again", documents_of(tokens))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == Path(f"{GOLDEN}{suffix}").read_bytes()
    codes = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
    documents = [[1, 2, 3], [], [127]]
    for code, dtype in codes.items():
        theirs = write_bytes(tmp_path / f"theirs{code}", documents, range(4), dtype, code)
        assert TokenFile.open(theirs).dtype == dtype
        assert documents_of(TokenFile.open(theirs)) == documents
        ours = write(tmp_path / f"ours{code}", documents, dtype)
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


def test_a_document_is_read_from_any_token_on_here_and_in_a_worker(tmp_path):
    write(tmp_path / "c", [[1, 2, 3], [], [4, 5], np.arange(50_000)])
    tokens = TokenFile.open(tmp_path / "c")
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    for opened in (tokens, pickle.loads(pickled)):
        assert opened.sizes.tolist() == [3, 0, 2, 50_000]
        assert opened.read(0, 1).tolist() == [2, 3]
        assert opened.read(0, 1, 1).tolist() == [2]
        assert opened.read(1).tolist() == []
        assert opened.read(2, 1, 10).tolist() == [5]
    for suffix in (".bin", ".idx"):
        os.remove(tmp_path / f"c{suffix}")
    assert tokens.read(0).tolist() == [1, 2, 3], "a deleted file stays readable"


def test_documents_may_have_several_sequences(tmp_path):
    sequences = [[1, 2], [3], [], [4, 5, 6], [7]]
    tokens = TokenFile.open(write_bytes(tmp_path / "c", sequences, [0, 2, 2, 4, 5]))
    assert documents_of(tokens) == [[1, 2, 3], [], [4, 5, 6], [7]]
    # As GPT-NeoX's merging of files leaves it: no document was ended.
    assert documents_of(TokenFile.open(write_bytes(tmp_path / "d", sequences, [0]))) == sequences


def test_ids_beyond_2_to_the_31_tokens_are_read(tmp_path):
    # One document of two sequences, with more tokens than an int32 counts.
    long = 2**31 - 1
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 2, 2)
    (tmp_path / "d.idx").write_bytes(header + struct.pack("<iiqqqq", long, 9, 0, long, 0, 2))
    with (tmp_path / "d.bin").open("wb") as file:
        file.seek(long + 3)
        file.write(bytes([1, 2, 3, 4, 5, 6]))
    tokens = TokenFile.open(tmp_path / "d")
    assert (tokens.sizes.dtype, tokens.sizes.tolist()) == (np.int64, [2**31 + 8])
    assert tokens.read(0, 2**31 + 4).tolist() == [3, 4, 5, 6]


def test_a_damaged_or_foreign_index_is_recognised(golden, tmp_path, monkeypatch):
    path = golden.with_suffix(".idx")
    whole = path.read_bytes()
    damages = {
        "is not a whole GPT-NeoX index file (it starts with b'' and has 0 bytes)": b"",
        "is not a whole GPT-NeoX index file": whole[:20],
        "has format version 2 and dtype code 8, but only version 1": (
            whole[:9] + struct.pack("<Q", 2) + whole[17:]
        ),
        "is cut off: 6021 bytes instead of the 12042 of 600 documents": whole[:6021],
        "is too long: 12043 bytes instead of the 12042": whole + b"\x00",
        "has no documents": whole[:18] + struct.pack("<QQ", 0, 0),
        "its lengths and pointers disagree: sequence 1 begins at": (
            whole[:34] + struct.pack("<i", 5) + whole[38:]
        ),
    }
    for message, content in damages.items():
        path.write_bytes(content)
        assert f"{path}: {message}" in fault(golden)
    for documents, entries in [(2**63, 2**64 - 1), (2**64 - 1, 0), (600, 2**63), (601, 600)]:
        path.write_bytes(whole[:18] + struct.pack("<QQ", documents, entries) + whole[34:])
        assert f"{path}: " in fault(golden)
    path.write_bytes(whole)
    os.truncate(golden.with_suffix(".bin"), 342208)
    assert "corpus.bin: is cut off: 342208 bytes, but its .idx expects 342218" in fault(golden)

    for firsts in ((1, 3), (0, 2, 1, 3), (0, 1, 2, 4)):
        write_bytes(tmp_path / "c", [[1, 2], [3], [4]], firsts)
        assert "its document index does not rise from 0 to the number of" in fault(tmp_path / "c")
    write_bytes(tmp_path / "c", [[]], [0, 1])
    assert "c.bin: has no tokens" in fault(tmp_path / "c")
    monkeypatch.setattr(token_index, "PIECE", 2)
    write_bytes(tmp_path / "c", [[1], [2], [3], [4], [5]], range(6))
    whole = (tmp_path / "c.idx").read_bytes()
    for sequence in range(5):
        for place in (34 + 4 * sequence + 3, 34 + 5 * 4 + 8 * sequence):
            damaged = bytearray(whole)
            damaged[place] ^= 0x80
            (tmp_path / "c.idx").write_bytes(damaged)
            assert f"disagree: sequence {sequence} begins at byte" in fault(tmp_path / "c")


def test_a_prefix_that_is_none_is_explained(golden):
    folder = golden.parent
    message = fault(folder / "none")
    assert f"there are no token files {folder}/none.bin and {folder}/none.idx" in message
    assert f"(looked from {Path.cwd()}) - make them with prepare_data.py" in message
    assert f"leave the suffix away: {golden}" in fault(f"{golden}.idx")
    assert f"it is a folder: give the prefix in it, such as {golden}" in fault(folder)
    os.remove(f"{golden}.bin")
    assert f"{golden}.bin is missing, its partner exists" in fault(golden)


def test_a_card_that_is_none_is_refused(golden):
    facts = {"documents": 600, "tokens": 171109}
    card = golden.with_suffix(".json")
    wrong = [
        {"tokenizer": 3},
        {"tokenizer": {"vocab_size": -1}},
        {"sources": [3]},
        {"corpus": "\x1b[2J"},
        {"sha256": "ab"},
    ]
    for text in ["{", "[]", "{}", *(json.dumps(facts | change) for change in wrong)]:
        card.write_text(text)
        assert "does not describe a token file (" in fault(golden)
    card.write_text(json.dumps({"documents": 1, "tokens": 2}))
    assert "describes 1 documents and 2 tokens, the .idx 600 and 171109" in fault(golden)


def test_a_flipped_byte_in_either_file_is_noticed(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]], meta={"corpus": "mine"})
    contents = {suffix: (tmp_path / f"c.{suffix}").read_bytes() for suffix in ("bin", "idx")}
    sums = {suffix: hashlib.sha256(content).hexdigest() for suffix, content in contents.items()}
    meta = TokenFile.open(tmp_path / "c").meta
    assert meta == {"corpus": "mine", "documents": 2, "tokens": 3, "sha256": sums}
    for suffix, whole in contents.items():
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            (tmp_path / f"c.{suffix}").write_bytes(flipped)
            with pytest.raises(UserError, match=r"c\.(bin|idx|json): "):
                TokenFile.open(tmp_path / "c")
        (tmp_path / f"c.{suffix}").write_bytes(whole)
    assert verify(tmp_path / "c").endswith(
        "c: 2 documents, 3 tokens are whole (sha256 and vocabulary)"
    )
    assert verify(GOLDEN).endswith("tokens are whole (vocabulary; PREFIX.json has no sha256)")


def test_the_tokenizer_that_wrote_a_file_is_told_from_another(tmp_path):
    ours = build_tokenizer("CharLevelTokenizer")
    for name, fingerprint in (("same", ours.hash), ("other", "123456789abc")):
        meta = {"tokenizer": {"type": "HFTokenizer", "hash": fingerprint, "vocab_size": 4096}}
        write(tmp_path / name, [[1, 2]], meta=meta)
    write(tmp_path / "fits", [[511]])
    write(tmp_path / "over", [[512]])
    for name in ("same", "fits"):
        TokenFile.open(tmp_path / name).check_tokenizer(ours)
    for name, message in (
        ("other", "written by HFTokenizer 123456789abc with a vocabulary of 4096, but the config"),
        ("over", "holds token 512, but the vocabulary of CharLevelTokenizer ends at 511"),
    ):
        with pytest.raises(UserError, match=message):
            TokenFile.open(tmp_path / name).check_tokenizer(ours)


def test_an_id_that_no_vocabulary_has_is_refused_wherever_it_stands(tmp_path):
    card = {"tokenizer": {"vocab_size": 7}}
    for dtype, misfit, meta in ((np.int32, -1, {"corpus": "c"}), (np.uint16, 7, card)):
        ids = [[1, 2], [3, 4], [5, misfit]]
        write(tmp_path / "c", ids, dtype, meta=meta, overwrite=True)
        tokens = TokenFile.open(tmp_path / "c")
        assert tokens.read(2, 0, 1).tolist() == [5]
        for opened in (tokens, pickle.loads(pickle.dumps(tokens))):
            with pytest.raises(UserError, match=rf"c\.bin: document 2 holds token {misfit}, but"):
                opened.read(2)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    tokens = TokenFile.open(write(tmp_path / "c", [np.arange(60_000)]))
    os.truncate(tmp_path / "c.bin", 20)
    with pytest.raises(UserError, match=r"c\.bin: was changed while it was read: it has 20 bytes"):
        tokens.read(0)


def test_the_end_of_documents_is_found_and_a_single_document_needs_its_card(tmp_path):
    card = {"tokenizer": {"hash": "a", "vocab_size": 512, "eod": 0}}
    for documents, meta, end in (
        ([[1, 0], [0], [2, 0]], {}, 0),
        ([[1, 0]], card, 0),
        ([[1, 0]], {}, None),
        ([[5, 6], [5, 7]], {}, None),
        ([[5, 6], [5, 6]], card, None),  # another token than the card names
    ):
        write(tmp_path / "c", documents, meta=meta, overwrite=True)
        assert TokenFile.open(tmp_path / "c").end_of_documents() == end


def test_a_fault_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    def interrupted():
        yield [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", interrupted())
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "c", [[1, 2]], meta={"corpus": "old"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for documents, dtype, overwrite, message in (
        ([[]], np.uint16, True, "no tokens to write"),
        ([[1], [70000]], np.uint16, True, "token 70000 does not fit uint16"),
        ([[1], [-1]], np.uint16, True, "token -1 does not fit uint16"),
        ([[1]], np.uint16, False, r"c\.idx: exists already - choose another name, or add --ov"),
    ):
        with pytest.raises(UserError, match=message):
            write(tmp_path / "c", documents, dtype, overwrite=overwrite)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    tokens = TokenFile.open(write(tmp_path / "c", [[3]], overwrite=True))
    assert (tokens.read(0).tolist(), tokens.meta) == ([3], {})


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
    env = {**os.environ, "PYTHONPATH": CORE}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_core
def test_megatron_core_reads_and_writes_the_same_files(tmp_path):
    for dtype in ("uint16", "int32"):
        core(WRITE, str(tmp_path / f"theirs{dtype}"), dtype)
        tokens = TokenFile.open(tmp_path / f"theirs{dtype}")
        documents = documents_of(tokens)
        assert (tokens.dtype, documents) == (dtype, [[1, 2, 3], [4, 5, 6], [127]])
        write(tmp_path / f"ours{dtype}", documents, dtype)
        read = core(READ, str(tmp_path / f"ours{dtype}"))
        assert read == f"{dtype} [0, 1, 2, 3] [[1, 2, 3], [4, 5, 6], [127]]"
        ours, theirs = tmp_path / f"ours{dtype}.bin", tmp_path / f"theirs{dtype}.bin"
        assert ours.read_bytes() == theirs.read_bytes()
