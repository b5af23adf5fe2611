"""A user's own encoding in place of a sweep's, with its rows, and whether these fit."""

import json

import pytest

from megatron.errors import UserError
from megatron.sweeps.cells import load_sweep
from tests.support import ROOT
from tests.sweeps.conftest import WARM

pytestmark = pytest.mark.usefixtures("own_registry")
SWEEP = """
settings: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32, train_iters: 2,
  save_interval: 100, eval_interval: 0, eval_lengths: [32, 64], data_path: "task:induction"}
grid: {pos_emb: [alibi, rotary], seed: [1]}
exclude: [{pos_emb: alibi}]
entry: {seed: [2]}
evaluate: {task: {protocol: task, windows: 4}}
"""
ENTRY = """
from megatron.positions import register
from megatron.positions.base import DistanceBias

@register("near_tokens")
class NearTokens(DistanceBias):
    def log_kernel(self, distance):
        return -distance.expand(self.shape.heads, -1)
"""


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "small.yml"
    path.write_text(SWEEP)
    return path


@pytest.fixture
def entry(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENTRY)
    return path


def test_an_entry_is_trained_placed_and_checked(sweep, entry, forks, tmp_path):
    folder = tmp_path / "runs"
    words = (sweep, "--entry", entry)
    done = forks.run(WARM, "run", *words, "--folder", folder)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("mine "))
    assert line.split()[1].endswith("¹")  # one seed
    assert "induction: mine, alibi" in done.stdout

    results = (folder / "results.jsonl").read_text()
    rows = [json.loads(row) for row in results.splitlines()]
    assert [(row["pos_emb"], row["seed"], row["length"]) for row in rows] == [
        ("near_tokens", 2, 32),
        ("near_tokens", 2, 64),
    ]
    beside = entry.with_suffix(".jsonl")
    beside.write_text(results)
    assert forks.run(WARM, "check", *words).stdout.endswith("2 rows of 1 cells follow the rules\n")

    stray = rows[0] | {"config_hash": "0123456789ab"}
    del stray["checksum"]
    beside.write_text("\n".join([*results.splitlines()[1:], json.dumps(stray)]) + "\n")
    wrong = forks.run(WARM, "check", *words)
    assert wrong.returncode == 1
    assert f"mine-2: lacks rows of configuration {rows[0]['config_hash']}" in wrong.stderr
    assert "rows of other configurations" in wrong.stderr
    longer = rows[0] | {"length": 128}
    del longer["checksum"]
    beside.write_text("\n".join([*results.splitlines()[1:], json.dumps(longer)]) + "\n")
    wrong = forks.run(WARM, "check", *words)
    assert "mine-2: lacks rows of configuration" in wrong.stderr
    assert "rows of other configurations or lengths" in wrong.stderr
    beside.write_text(results)
    entry.write_text(ENTRY.replace("-distance", "-2 * distance"))  # other code than the rows'
    assert "mine-2: lacks rows of configuration" in forks.run(WARM, "check", *words).stderr


def test_rows_of_another_text_are_named(tmp_path, forks):
    """Committed rows of rotary, as if they were those of an entry."""
    entry = tmp_path / "mine.yml"
    entry.write_text("pos_emb: rotary\n")
    rows = (ROOT / "docs/results/tasks/needle.jsonl").read_text().splitlines()
    row = json.loads(next(row for row in rows if '"pos_emb": "rotary"' in row))
    del row["checksum"]  # that of the text which is replaced
    entry.with_suffix(".jsonl").write_text(json.dumps(row | {"text": "0123456789abcdef"}) + "\n")
    done = forks.run(WARM, "check", "atlas", "--entry", entry)
    assert done.returncode == 1
    assert f"task:needle at {row['length']}: not the atlas's text - prepare its data" in done.stderr


def test_yaml_takes_the_keys_of_an_encoding_only(sweep, tmp_path):
    entry = tmp_path / "slow.yml"
    entry.write_text("pos_emb: rotary\npos_emb_args: {base: 500000}\n")
    cells = load_sweep(sweep, entry=entry).cells
    assert [(cell.name, cell.config.position.pos_emb_args["base"]) for cell in cells] == [
        ("slow-2", 500000),
    ]
    assert cells[0].folder.parent.name == "small-slow"
    entry.write_text("pos_emb: rotary\nhidden_size: 64\n")
    with pytest.raises(UserError, match=r"slow\.yml: has hidden_size - an entry is one encoding"):
        load_sweep(sweep, entry=entry)


def test_an_entry_has_a_name_of_its_own(sweep, tmp_path):
    entry = tmp_path / "rotary.yml"
    entry.write_text("pos_emb: rotary\npos_emb_args: {base: 500000}\n")
    with pytest.raises(UserError, match="--entry: rotary is an encoding of ours - rename"):
        load_sweep(sweep, entry=entry)
    assert load_sweep(sweep, entry=ROOT / "configs/pos_emb/rotary.yml").cells  # more seeds of ours


def test_a_sweep_without_seeds_for_entries_takes_none(sweep, entry):
    sweep.write_text(SWEEP.replace("entry: {seed: [2]}", ""))
    with pytest.raises(UserError, match="--entry: this sweep takes none"):
        load_sweep(sweep, entry=entry)


def test_two_encodings_in_a_file_are_no_entry(sweep, entry):
    entry.write_text(ENTRY + ENTRY.replace("near_tokens", "others").replace("NearT", "OtherT"))
    with pytest.raises(UserError, match=r"mine\.py: has others - an entry is one encoding"):
        load_sweep(sweep, entry=entry)
