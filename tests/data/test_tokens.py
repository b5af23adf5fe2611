import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenFile, TokenWriter, verify
from megatron.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "corpus_text_document"


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


def test_the_reference_file_has_the_documents_and_tokens_it_was_written_with():
    tokens = TokenFile.open(GOLDEN)
    assert (len(tokens), tokens.tokens, tokens.dtype, tokens.meta) == (600, 171109, np.uint16, {})
    assert tokens.sizes.dtype == np.int32
    assert tokens.sizes.sum() == 171109


def test_writing_the_reference_file_again_gives_the_same_bytes(tmp_path):
    tokens = TokenFile.open(GOLDEN)
    write(tmp_path / "again", [tokens.read(document) for document in range(len(tokens))])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"again{suffix}").read_bytes() == Path(f"{GOLDEN}{suffix}").read_bytes()


def test_a_document_is_read_from_any_token_on(tmp_path):
    write(tmp_path / "c", [[1, 2, 3], [], [4, 5]])
    tokens = TokenFile.open(tmp_path / "c")
    assert tokens.sizes.tolist() == [3, 0, 2]
    assert tokens.read(0).tolist() == [1, 2, 3]
    assert tokens.read(0, 1).tolist() == [2, 3]
    assert tokens.read(0, 1, 1).tolist() == [2]
    assert tokens.read(1).tolist() == []
    assert tokens.read(2, 1, 10).tolist() == [5]


def test_a_worker_process_maps_the_files_itself(tmp_path):
    write(tmp_path / "c", [np.arange(50_000)])
    pickled = pickle.dumps(TokenFile.open(tmp_path / "c"))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens == 50_000


def test_the_sidecar_keeps_what_the_writer_was_told(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]], meta={"corpus": "mine"})
    meta = TokenFile.open(tmp_path / "c").meta
    content = {suffix: (tmp_path / f"c.{suffix}").read_bytes() for suffix in ("bin", "idx")}
    digests = {suffix: hashlib.sha256(data).hexdigest() for suffix, data in content.items()}
    assert meta == {"corpus": "mine", "documents": 2, "tokens": 3, "sha256": digests}


def fault(prefix):
    with pytest.raises(UserError) as caught:
        TokenFile.open(prefix)
    message = str(caught.value)
    assert "\n" not in message
    assert " - " in message  # what - how to fix
    return message


DAMAGES = {
    "is not a whole GPT-NeoX index file (it starts with b'' and has 0 bytes)": lambda idx: b"",
    "is not a whole GPT-NeoX index file (it starts with b'\\x80PICKLE..'": lambda idx: (
        b"\x80PICKLE.." + idx
    ),
    "is in the older TNTIDX format": lambda idx: b"TNTIDX\x00\x00" + idx[8:],
    "is not a whole GPT-NeoX index file (it starts with b'MMIDIDX\\x00\\x00' and has 20 bytes)": (
        lambda idx: idx[:20]
    ),
    "has format version 2 and dtype code 8, but only version 1": lambda idx: (
        idx[:9] + struct.pack("<Q", 2) + idx[17:]
    ),
    "is cut off: 6021 bytes instead of the 12042 of 600 documents": lambda idx: idx[:6021],
    "is too long: 12043 bytes instead of the 12042": lambda idx: idx + b"\x00",
    "has no documents": lambda idx: idx[:18] + struct.pack("<QQ", 0, 0),
    "its lengths and pointers disagree: sequence 1 begins at": lambda idx: (
        idx[:34] + struct.pack("<i", 5) + idx[38:]
    ),
}


def test_an_index_whose_documents_are_all_empty_is_refused(tmp_path):
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    (tmp_path / "c.idx").write_bytes(header + struct.pack("<iqqq", 0, 0, 0, 1))
    (tmp_path / "c.bin").write_bytes(b"")
    assert "c.bin: has no tokens" in fault(tmp_path / "c")


def test_the_tokenizer_that_wrote_a_file_is_told_from_another(tmp_path):
    ours = build_tokenizer("CharLevelTokenizer")
    for name, fingerprint in (("same", ours.hash), ("other", "123456789abc")):
        meta = {"tokenizer": {"type": "HFTokenizer", "hash": fingerprint, "vocab_size": 4096}}
        write(tmp_path / name, [[1, 2]], meta=meta)
    TokenFile.open(tmp_path / "same").check_tokenizer(ours)
    with pytest.raises(
        UserError,
        match="written by HFTokenizer 123456789abc with a vocabulary of 4096, but the config",
    ):
        TokenFile.open(tmp_path / "other").check_tokenizer(ours)


def test_a_file_without_a_sidecar_must_fit_the_vocabulary(tmp_path):
    write(tmp_path / "fits", [[511]])
    write(tmp_path / "over", [[512]])
    TokenFile.open(tmp_path / "fits").check_tokenizer(build_tokenizer("CharLevelTokenizer"))
    with pytest.raises(
        UserError, match="holds token 512, but the vocabulary of CharLevelTokenizer ends at 511"
    ):
        TokenFile.open(tmp_path / "over").check_tokenizer(build_tokenizer("CharLevelTokenizer"))


def test_nothing_is_written_over_unless_asked(tmp_path):
    write(tmp_path / "c", [[1, 2]], meta={"corpus": "old"})
    with pytest.raises(
        UserError, match=r"c\.idx: exists already - choose another name, or add --overwrite"
    ):
        TokenWriter(tmp_path / "c", np.uint16)
    write(tmp_path / "c", [[3]], overwrite=True)
    tokens = TokenFile.open(tmp_path / "c")
    assert (tokens.read(0).tolist(), tokens.meta) == ([3], {})


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    def interrupted():
        yield [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_whole_numbers(tmp_path):
    with pytest.raises(UserError, match="tokens cannot be stored as float32 - use one of uint8"):
        TokenWriter(tmp_path / "c", np.float32)


def test_a_flipped_byte_in_either_file_is_noticed(tmp_path):
    write(tmp_path / "c", [[1, 2], [3]], meta={"corpus": "mine"})
    for suffix in (".bin", ".idx"):
        path = tmp_path / f"c{suffix}"
        whole = path.read_bytes()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(UserError, match=r"c\.(bin|idx|json): "):
                TokenFile.open(tmp_path / "c")
        path.write_bytes(whole)


def test_verify_says_what_was_compared(golden, tmp_path):
    assert verify(golden) == (
        f"{golden}: 600 documents, 171,109 tokens are whole (vocabulary; PREFIX.json has no sha256)"
    )
    write(tmp_path / "c", [[1, 2], [3]], meta={"corpus": "mine"})
    assert verify(tmp_path / "c").endswith(
        "c: 2 documents, 3 tokens are whole (sha256 and vocabulary)"
    )


def test_a_file_that_is_deleted_while_it_is_read_stays_readable(tmp_path):
    write(tmp_path / "c", [[1, 2]])
    tokens = TokenFile.open(tmp_path / "c")
    for suffix in (".bin", ".idx"):
        os.remove(tmp_path / f"c{suffix}")
    assert tokens.read(0).tolist() == [1, 2]


def test_a_prefix_that_is_none_is_explained(golden):
    folder = golden.parent
    message = fault(folder / "none")
    assert f"there are no token files {folder}/none.bin and {folder}/none.idx" in message
    assert f"(looked from {Path.cwd()}) - make them with prepare_data.py" in message
    assert f"leave the suffix away: {golden}" in fault(f"{golden}.idx")
    assert f"it is a folder: give the prefix in it, such as {golden}" in fault(folder)
    os.remove(f"{golden}.bin")
    assert f"{golden}.bin is missing, its partner exists" in fault(golden)


def test_a_damaged_index_is_recognised(golden):
    path = golden.with_suffix(".idx")
    whole = path.read_bytes()
    for message, damage in DAMAGES.items():
        path.write_bytes(damage(whole))
        assert f"{path}: {message}" in fault(golden)
    # counts that no file can have
    for documents, entries in [(2**63, 2**64 - 1), (2**64 - 1, 0), (600, 2**63), (601, 600)]:
        path.write_bytes(whole[:18] + struct.pack("<QQ", documents, entries) + whole[34:])
        assert f"{path}: " in fault(golden)


def test_a_bin_file_of_another_length_than_the_index_says_is_refused(golden):
    path = golden.with_suffix(".bin")
    for size, what in {342208: "cut off", 342220: "too long"}.items():
        os.truncate(path, size)
        assert f"{path}: is {what}: {size} bytes, but its .idx expects 342218" in fault(golden)


def test_a_card_that_is_none_is_refused(golden):
    facts = {"documents": 600, "tokens": 171109}
    card = golden.with_suffix(".json")
    wrong = [
        {"tokenizer": 3},
        {"tokenizer": {"vocab_size": -1}},
        {"tokenizer": {"hash": []}},
        {"sources": [3]},
        {"corpus": None},
        {"corpus": "\x1b[2J"},
        {"sha256": "ab"},
    ]
    for text in ["{", "[]", "{}", *(json.dumps(facts | change) for change in wrong)]:
        card.write_text(text)
        assert "does not describe a token file (" in fault(golden)
    card.write_text(json.dumps({"documents": 1, "tokens": 2}))
    assert "describes 1 documents and 2 tokens, the .idx 600 and 171109" in fault(golden)


def test_a_fault_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    write(tmp_path / "c", [[1, 2]], meta={"corpus": "old"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for documents, message in (
        ([[]], "no tokens to write"),
        ([[1], [70000]], "token 70000 does not fit uint16"),
        ([[1], [-1]], "token -1 does not fit uint16"),
    ):
        with pytest.raises(UserError, match=message):
            write(tmp_path / "c", documents, overwrite=True)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_id_that_no_vocabulary_has_is_refused_wherever_it_stands(tmp_path):
    card = {"tokenizer": {"vocab_size": 7}}
    for dtype, misfit, meta in ((np.int32, -1, {"corpus": "c"}), (np.uint16, 7, card)):
        ids = [[1, 2], [3, 4], [5, misfit]]
        write(tmp_path / "c", ids, dtype, meta=meta, overwrite=True)
        tokens = TokenFile.open(tmp_path / "c")
        assert tokens.read(1).tolist() == [3, 4]
        assert tokens.read(2, 0, 1).tolist() == [5]
        for opened in (tokens, pickle.loads(pickle.dumps(tokens))):
            with pytest.raises(UserError, match=rf"c\.bin: document 2 holds token {misfit}, but"):
                opened.read(2)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    write(tmp_path / "c", [np.arange(60_000)])
    tokens = TokenFile.open(tmp_path / "c")
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
