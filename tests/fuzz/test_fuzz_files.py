"""Token files, archives and tables from random and damaged bytes."""

import gzip
import io
import struct
import tarfile
from itertools import count

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.readers import Files
from megatron.data.tokens import verify
from tests.fuzz.settings import fuzzed, works_or_says_why

NUMBERS = st.one_of(st.integers(0, 5), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]))
SIZES = st.lists(st.integers(-3, 5), max_size=4)
LINE = b'{"text": "some text", "meta": {"a": [1, 2.5, null]}}\n'
numbered = count()


@fuzzed
@given(
    numbers=st.tuples(NUMBERS, st.integers(0, 255), NUMBERS, NUMBERS),
    sizes=SIZES,
    offsets=st.lists(st.integers(-8, 16), max_size=4),
    ids=st.binary(max_size=24),
    sidecar=st.one_of(st.none(), st.binary(max_size=30)),
)
def test_an_index_of_any_fields(tmp_path, numbers, sizes, offsets, ids, sidecar):
    prefix = tmp_path / f"c{next(numbered)}"
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", *numbers)
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(offsets)}q", *offsets)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(ids)
    if sidecar is not None:
        prefix.with_suffix(".json").write_bytes(sidecar)
    works_or_says_why(lambda: verify(prefix))


def tar():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in ("../a.jsonl", "b.txt", "c" * 120):
            member = tarfile.TarInfo(name)
            member.size = len(LINE)
            archive.addfile(member, io.BytesIO(LINE))
    return content.getvalue()


PACKED = {
    ".jsonl": LINE * 3,
    ".jsonl.gz": gzip.compress(LINE * 3),
    ".jsonl.zst": zstandard.compress(LINE * 3) * 2,
    ".tar": tar(),
    ".tar.gz": gzip.compress(tar()),
    ".tar.zst": zstandard.compress(tar()),
}


@pytest.mark.parametrize("suffix", PACKED)
@fuzzed
@given(
    changes=st.dictionaries(st.integers(0, 4000), st.integers(0, 255), max_size=3),
    length=st.one_of(st.just(0), st.integers(0, 200), st.integers(0, 9000)),
)
def test_an_archive_with_changed_bytes_and_a_cut(tmp_path, suffix, changes, length):
    content = bytearray(PACKED[suffix])
    for place, value in changes.items():
        content[place % len(content)] = value
    path = tmp_path / f"c{suffix}"
    path.write_bytes(content[: length or None])
    corpus = Files("c", [path])
    works_or_says_why(lambda: list(corpus.documents()))
