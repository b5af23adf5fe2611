"""The hash of every shipped configuration is the one under which results were published."""

from pathlib import Path

import pytest

from megatron.config import load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Recorded before the configuration was reorganised; rows in docs/results carry such hashes.
PUBLISHED = {
    "125M.yml": "4655c5f6a4b5",
    "350M.yml": "29a5b734fbca",
    "mep.yml": "d989ad22836d",
}
OVER_125M = {
    "data/arxiv.yml": "da0348890fae",
    "data/github.yml": "a697a35433b8",
    "data/openwebtext2.yml": "6bf9065d03e3",
    "data/stdlib.yml": "7a325bf5caa9",
    "pos_emb/alibi.yml": "3773ee5fc581",
    "pos_emb/bam.yml": "27e50e5daca1",
    "pos_emb/cable.yml": "330bf1a6a688",
    "pos_emb/fire.yml": "d989186dcb1c",
    "pos_emb/gaussian.yml": "29556bf13930",
    "pos_emb/kerple_log.yml": "1ade29d2c140",
    "pos_emb/kerple_power.yml": "e69d9ebf6204",
    "pos_emb/learned.yml": "904d7e57d8a1",
    "pos_emb/mep.yml": "f506896bbfa0",
    "pos_emb/mep_free.yml": "90e17d02310b",
    "pos_emb/mep_param.yml": "8807b598f23c",
    "pos_emb/mep_param_t5.yml": "d53c691e1770",
    "pos_emb/none.yml": "097189399170",
    "pos_emb/randomized.yml": "ab87f818f94d",
    "pos_emb/rotary.yml": "4655c5f6a4b5",
    "pos_emb/sandwich.yml": "0c909fd58ac1",
    "pos_emb/sinusoidal.yml": "71c21c18ff3b",
    "pos_emb/t5.yml": "1246b1efb11d",
    "pos_emb/tanh.yml": "08b82894b895",
    "pos_emb/xpos.yml": "f1440cf4890e",
}


@pytest.mark.parametrize(("file", "expected"), PUBLISHED.items())
def test_a_complete_file_has_its_published_hash(file, expected):
    assert load([CONFIGS / file]).hash == expected


@pytest.mark.parametrize(("file", "expected"), OVER_125M.items())
def test_a_part_over_125M_has_its_published_hash(file, expected):
    assert load([CONFIGS / "125M.yml", CONFIGS / file]).hash == expected


@pytest.mark.parametrize("folder", ["configs", "/"])
def test_the_hash_is_the_same_from_every_folder(folder, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent / folder)
    files = [CONFIGS / "125M.yml", CONFIGS / "data/github.yml"]
    assert load(files).hash == OVER_125M["data/github.yml"]
