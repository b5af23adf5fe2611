"""Hashes are those under which results were published, and generated texts are up to date."""

from megatron.config import load
from megatron.config.document import README, readme
from megatron.config.schema import all_keys
from megatron.positions import options_of
from megatron.positions.layers import name_of_layers
from tests.config.small import SIZES, loaded
from tests.support import ROOT

CONFIGS = ROOT / "configs"
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
TURNING = "rotary, rotary, rotary"
PATTERNS = {
    "smollm3": [f"{TURNING}, none"],
    "rnope_swa": [f"{TURNING}, none", 128, 128, 128, None],
    "swan": [f"none, {TURNING}", None, 128, 128, 128],
    "gemma3": [f"{TURNING}, rotary, rotary, rotary (base: 1000000)", *[128] * 5, None],
}
"""Files in configs/pos_emb with layers that differ: the encodings, then the windows."""
SHAPES_NOTHING = "save=x log_interval=7 num_gpus=3 eval_lengths=64 attention_backend=eager"
SHAPES = (
    "seed=1 optimizer.params.lr=1 pos_emb=alibi num_layers=3 pos_emb_args.base=9 data_path=a"
    " train_data_paths=d/a,d/b train_data_paths=d/b,d/a valid_data_paths=d/c train_epochs=2"
    " weight_by_num_documents=true&train_data_paths=d/a"
)


def test_files_have_their_published_hashes(monkeypatch):
    monkeypatch.chdir("/")
    for file, expected in PUBLISHED.items():
        assert load([CONFIGS / file]).hash == expected, file
    for file, expected in OVER_125M.items():
        assert load([CONFIGS / "125M.yml", CONFIGS / file]).hash == expected, file


def test_the_hash_is_of_what_shapes_the_model():
    base = load([], [*SIZES, "hidden_size=72"])
    # This value is in published result rows: change it only with a note in docs/experiments.md.
    assert base.hash == "a60ccbb0de77"
    base = loaded()
    for word in SHAPES_NOTHING.split(" "):
        assert loaded(word).hash == base.hash, word
    hashes = {loaded(*words.split("&")).hash for words in SHAPES.split(" ")}
    assert len(hashes | {base.hash}) == 1 + len(SHAPES.split(" "))
    written = ["pos_emb_args={base: 1e4, rotary_pct: 1}", "lr_decay_iters=0"]
    assert loaded(*written, "optimizer.params.eps=1e-8").hash == base.hash  # defaults written out
    assert loaded("train_data_paths=d/a").hash == loaded("train_data_paths=/e/a").hash


def test_every_shipped_part_says_an_encodings_defaults():
    base = CONFIGS / "125M.yml"
    for path in sorted(CONFIGS.glob("pos_emb/*.yml")):
        config = load([base, path])
        assert config.notes == ()
        options = options_of(config.position.pos_emb)
        if path.stem in PATTERNS:
            facts = [name_of_layers(config.position), *config.attention.window_layers]
            assert facts == PATTERNS[path.stem]
            continue
        assert config.position.pos_emb == path.stem
        if path.stem == "rope_pp":  # its options are in rotary.yml, and it needs heads_per_query
            continue
        assert set(config.position.pos_emb_args) == set(options) - {"max_positions"}
        has_defaults = all(option.default is not option.empty for option in options.values())
        if has_defaults:  # all but mep, whose file is an example
            assert load([base], [f"pos_emb={path.stem}"]).hash == config.hash


def test_the_readme_of_the_configurations_is_up_to_date_and_complete():
    assert README.read_text(encoding="utf-8") == readme(), "run: make docs"
    for key in all_keys():
        assert key.info.description, f"{key.name} has no text under it"
