"""Damaged and hostile token files: every field of the index, the ids, PREFIX.json."""

import struct
from typing import Any

from tests.bad_inputs.case import Case

REMAKE = "copy both files again, or make them anew with prepare_data.py"
REMOVE = "remove it (the .bin and .idx work without), or " + REMAKE


def head(*numbers: int) -> bytes:
    """Version, code of the number type, documents, entries of the document index."""
    return b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", *numbers)


def rest(*numbers: int) -> bytes:
    """Of one document: its size and offset, and two entries of the document index."""
    return struct.pack("<iqqq", *numbers)


IDS = b"\x01\x00\x02\x00"
ONE = rest(2, 0, 0, 1)
GOOD = head(1, 8, 1, 2) + ONE
# PREFIX.idx, .bin and, where there is one, .json, and what is said of them.
TOKEN_FILES: dict[str, tuple[Any, ...]] = {
    "index-is-empty": (
        b"",
        IDS,
        "c.idx: is not a whole GPT-NeoX index file (it starts with b'' and has",
    ),
    "index-of-another-format": (
        b"TNTIDX\x00\x00" + b"\x00" * 40,
        IDS,
        "c.idx: is not a whole GPT-NeoX index file (it starts with b'TNTIDX",
    ),
    "index-of-version-2": (
        head(2, 8, 1, 2) + ONE,
        IDS,
        "c.idx: has format version 2 and dtype code 8, but only version 1",
    ),
    "index-of-too-many-documents": (
        head(1, 8, 2**63, 2) + ONE,
        IDS,
        (
            "c.idx: is cut off: 62 bytes instead of the 110680464442257309746 of "
            "9223372036854775808 documents - "
        )
        + REMAKE,
    ),
    "index-without-documents": (
        head(1, 8, 0, 0),
        IDS,
        "c.idx: has no documents - make it anew from an input with text in it",
    ),
    "index-is-cut": (
        GOOD[:-1],
        IDS,
        "c.idx: is cut off: 61 bytes instead of the 62 of 1 documents - " + REMAKE,
    ),
    "index-with-a-negative-size": (
        head(1, 8, 1, 2) + rest(-2, 0, 0, 1),
        IDS,
        "begins at byte 0 and has a length of -2, those before it end",
    ),
    "index-with-a-wrong-offset": (
        head(1, 8, 1, 2) + rest(2, 4, 0, 1),
        IDS,
        "begins at byte 4 and has a length of 2, those before it end at 0",
    ),
    "index-with-modes": (
        GOOD + b"\x00",
        IDS,
        "c.idx: is too long: 63 bytes instead of the 62 of 1 documents",
    ),
    "tokens-are-cut": (
        GOOD,
        b"\x01\x00",
        "c.bin: is cut off: 2 bytes, but its .idx expects 4 - " + REMAKE,
    ),
    "token-is-negative": (
        head(1, 3, 1, 2) + ONE,
        b"\x01\x00\xff\xff",
        (
            "c.bin: document 0 holds token -1, but the vocabulary ends at 32767 - "
            "the file is damaged or was prepared with another tokenizer: "
        )
        + REMAKE,
    ),
    "token-beyond-the-vocabulary": (
        GOOD,
        IDS,
        '{"documents": 1, "tokens": 2, "tokenizer": {"vocab_size": 2}}',
        (
            "c.bin: document 0 holds token 2, but the vocabulary ends at 1 - the "
            "file is damaged or was prepared with another tokenizer: "
        )
        + REMAKE,
    ),
    "sidecar-is-no-json": (GOOD, IDS, "{", "c.json: does not describe a token file (it is no JSON"),
    "sidecar-of-another-file": (
        GOOD,
        IDS,
        '{"documents": 2, "tokens": 2}',
        (
            "c.json: describes 2 documents and 2 tokens, the .idx 1 and 2 - it "
            "belongs to another file: remove it, or "
        )
        + REMAKE,
    ),
    "sidecar-with-another-sha256": (
        GOOD,
        IDS,
        '{"documents": 1, "tokens": 2, "sha256": {"bin": "00"}}',
        ("c.bin: does not agree with the sha256 in its .json, the file was damaged or changed - ")
        + REMAKE,
    ),
}
CASES: list[Case] = []
for name, (*contents, message) in TOKEN_FILES.items():
    files = dict(zip(("c.idx", "c.bin", "c.json"), contents, strict=False))
    CASES.append(Case(name, ["prepare_data.py", "--verify", "c"], message, files=files))
