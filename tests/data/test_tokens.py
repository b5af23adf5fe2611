"""Token files in the format of GPT-NeoX and Megatron-Core: read, written, and what is refused."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data import token_index
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter, verify
from megatron.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "corpus_text_document"


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
    Path(f"{prefix}.idx").write_bytes(index)
    content = b"".join(np.array(ids, dtype).tobytes() for ids in sequences)
    Path(f"{prefix}.bin").write_bytes(content)
    return prefix


def documents_of(tokens):
    return [tokens.read(document).tolist() for document in range(len(tokens))]


def same_bytes(first, second):
    for suffix in (".bin", ".idx"):
        assert Path(f"{first}{suffix}").read_bytes() == Path(f"{second}{suffix}").read_bytes()


def test_the_reference_file_and_each_number_type_are_read_and_written_byte_for_byte():
    tokens = TokenFile(str(GOLDEN))
    assert (len(tokens), tokens.tokens, tokens.dtype, tokens.meta) == (600, 171109, np.uint16, {})
    assert (tokens.sizes.dtype, tokens.sizes.sum()) == (np.int32, 171109)
    same_bytes(write("again", documents_of(tokens)), GOLDEN)
    codes = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
    documents = [[1, 2, 3], [], [127]]
    for code, dtype in codes.items():
        theirs = write_bytes(f"theirs{code}", documents, range(4), dtype, code)
        assert TokenFile(theirs).dtype == dtype
        assert documents_of(TokenFile(theirs)) == documents
        same_bytes(write(f"ours{code}", documents, dtype), theirs)


def test_a_document_is_read_from_any_token_on_here_and_in_a_worker():
    write("c", [[1, 2, 3], [], [4, 5], np.arange(50_000)])
    tokens = TokenFile("c")
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    for opened in (tokens, pickle.loads(pickled)):
        assert opened.sizes.tolist() == [3, 0, 2, 50_000]
        assert opened.read(0, 1).tolist() == [2, 3]
        assert opened.read(0, 1, 1).tolist() == [2]
        assert opened.read(1).tolist() == []
        assert opened.read(2, 1, 10).tolist() == [5]


def test_documents_may_have_several_sequences_and_more_tokens_than_an_int32_counts():
    sequences = [[1, 2], [3], [], [4, 5, 6], [7]]
    tokens = TokenFile(write_bytes("c", sequences, [0, 2, 2, 4, 5]))
    assert documents_of(tokens) == [[1, 2, 3], [], [4, 5, 6], [7]]
    # GPT-NeoX merges files without ending a document.
    assert documents_of(TokenFile(write_bytes("d", sequences, [0]))) == sequences

    long = 2**31 - 1
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 2, 2)
    Path("e.idx").write_bytes(header + struct.pack("<iiqqqq", long, 9, 0, long, 0, 2))
    with Path("e.bin").open("wb") as file:
        file.seek(long + 3)
        file.write(bytes([1, 2, 3, 4, 5, 6]))
    tokens = TokenFile("e")
    assert (tokens.sizes.dtype, tokens.sizes.tolist()) == (np.int64, [2**31 + 8])
    assert tokens.read(0, 2**31 + 4).tolist() == [3, 4, 5, 6]


def test_a_damaged_index_is_recognised_wherever_the_damage_is(monkeypatch):
    """Which message each field of the header has is asked of the command (tests/bad_inputs)."""
    for firsts in ((1, 3), (0, 2, 1, 3), (0, 1, 2, 4)):
        write_bytes("c", [[1, 2], [3], [4]], firsts)
        with pytest.raises(
            UserError, match="has a document index that does not rise from 0 to the num"
        ):
            TokenFile("c")
    monkeypatch.setattr(token_index, "PIECE", 2)
    write_bytes("c", [[1], [2], [3], [4], [5]], range(6))
    whole = Path("c.idx").read_bytes()
    for sequence in range(5):
        for place in (34 + 4 * sequence + 3, 34 + 5 * 4 + 8 * sequence):
            damaged = bytearray(whole)
            damaged[place] ^= 0x80
            Path("c.idx").write_bytes(damaged)
            with pytest.raises(UserError, match="has lengths and pointers that disagree"):
                TokenFile("c")


def test_a_flipped_byte_in_either_file_is_noticed():
    write("c", [[1, 2], [3]], meta={"corpus": "mine"})
    contents = {suffix: Path(f"c.{suffix}").read_bytes() for suffix in ("bin", "idx")}
    sums = {suffix: hashlib.sha256(content).hexdigest() for suffix, content in contents.items()}
    facts = {"corpus": "mine", "documents": 2, "tokens": 3, "sha256": sums}
    assert TokenFile("c").meta == facts
    for suffix, whole in contents.items():
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            Path(f"c.{suffix}").write_bytes(flipped)
            with pytest.raises(UserError, match=r"c\.(bin|idx|json): "):
                TokenFile("c")
        Path(f"c.{suffix}").write_bytes(whole)
    assert verify("c").endswith(
        "c: 2 documents, 3 tokens are undamaged (sha256 and range of uint16)"
    )
    assert verify(GOLDEN).endswith("are undamaged (range of uint16; PREFIX.json has no sha256)")


def test_the_tokenizer_that_wrote_a_file_is_told_from_another():
    ours = build_tokenizer("CharLevelTokenizer")
    writer = {"type": "HFTokenizer", "hash": "123456789abc", "vocab_size": 4096}
    for documents, meta, message in (
        ([[511]], {}, None),
        ([[1, 2]], {"tokenizer": writer | {"hash": ours.hash}}, None),
        ([[1, 2]], {"tokenizer": writer}, "written by HFTokenizer 123456789abc with a vocabulary"),
    ):
        tokens = TokenFile(write("c", documents, meta=meta, overwrite=True))
        if message is None:
            tokens.check_tokenizer(ours)
            continue
        with pytest.raises(UserError, match=message):
            tokens.check_tokenizer(ours)
    tokens = TokenFile(write("c", [[512]], overwrite=True))
    tokens.check_tokenizer(ours)
    with pytest.raises(UserError, match="has token 512, but the vocabulary ends at 511"):
        tokens.read(0)


def test_the_end_of_documents_is_found_and_a_single_document_needs_its_card():
    card = {"tokenizer": {"hash": "a", "vocab_size": 512, "eod": 0}}
    for documents, meta, end in (
        ([[1, 0], [0], [2, 0]], {}, 0),
        ([[1, 0]], card, 0),
        ([[1, 0]], {}, None),
        ([[5, 6], [5, 7]], {}, None),
        ([[5, 6], [5, 6]], card, None),  # another token than the card names
    ):
        write("c", documents, meta=meta, overwrite=True)
        assert TokenFile("c").end_of_documents() == end


def test_a_fault_while_writing_leaves_the_old_file_and_nothing_else():
    def interrupted():
        yield [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("c", interrupted())
    assert list(Path().iterdir()) == []
    write("c", [[1, 2]], meta={"corpus": "old"})
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    for documents, overwrite, message in (
        ([[]], True, "no tokens to write"),
        ([[1], [70000]], True, "token 70000 does not fit uint16"),
        ([[1], [-1]], True, "token -1 does not fit uint16"),
        ([[1]], False, r"c\.idx: exists already - choose another name, or add --ov"),
    ):
        with pytest.raises(UserError, match=message):
            write("c", documents, overwrite=overwrite)
        assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    tokens = TokenFile(write("c", [[3]], overwrite=True))
    assert (tokens.read(0).tolist(), tokens.meta) == ([3], {})
