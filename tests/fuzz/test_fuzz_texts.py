"""Rows of results, tokenizers and checkpoints' facts from random JSON and YAML."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.checkpoints.manifest import read_record
from megatron.data.tokenizers.train import train_tokenizer
from megatron.report.page import page_of
from megatron.results.comparison import compared
from megatron.results.files import read_rows
from megatron.results.labels import kinds
from megatron.results.row import Row
from megatron.results.table import table
from tests.fuzz.settings import fuzzed, works_or_says_why
from tests.results.rows import rows

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from([10**400, -1, 0, "train_length", "\ud800"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(sorted(Row.__annotations__))


def shown(path):
    rows = read_rows([path])
    table(rows)
    compared(kinds(rows))


@fuzzed
@given(changes=st.dictionaries(KEYS, VALUES, max_size=3), removed=st.sets(KEYS, max_size=1))
@example(changes={"stride": None}, removed=set())
def test_a_row_of_any_values(tmp_path, changes, removed):
    row = rows("t5", {512: 9.0})[0] | changes
    remaining = {key: value for key, value in row.items() if key not in removed}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(remaining) + "\n")
    works_or_says_why(lambda: shown(path))


@fuzzed
@given(content=st.binary(max_size=200))
def test_any_bytes_as_results(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    works_or_says_why(lambda: page_of(read_rows([path])))


TOKENIZER = json.loads(train_tokenizer(["a b"], 257))


@fuzzed
@given(record=VALUES)
def test_any_facts_of_a_checkpoint(tmp_path, record):
    (tmp_path / "checkpoint.json").write_text(json.dumps(record))
    works_or_says_why(lambda: read_record(tmp_path))
