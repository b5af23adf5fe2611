"""Hashes are those under which results were published, and generated texts are up to date."""

import yaml

from megatron.config import load
from megatron.config.schema import all_keys
from megatron.positions import options_of
from megatron.positions.layers import name_of_layers
from megatron.report.document import README, readme
from tests.config.small import SIZES, loaded
from tests.support import ROOT

CONFIGS = ROOT / "configs"
PUBLISHED = yaml.safe_load((ROOT / "tests/config/hashes.yml").read_text(encoding="utf-8"))
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
    " train_data_paths=d/a,d/b train_data_paths=d/b,d/a valid_data_paths=d/c"
    " weight_by_num_documents=true&train_data_paths=d/a window=8 window=9 window_layers=8"
)


def test_files_have_their_published_hashes(monkeypatch):
    monkeypatch.chdir("/")
    for file, expected in PUBLISHED["files"].items():
        assert load([CONFIGS / file]).hash == expected, file
    for file, expected in PUBLISHED["over_125M"].items():
        assert load([CONFIGS / "125M.yml", CONFIGS / file]).hash == expected, file


def test_the_hash_is_of_what_shapes_the_model():
    base = load([], [*SIZES, "hidden_size=72"])
    # This value is in published result rows: change it only with a note in docs/experiments.md.
    assert base.hash == "a60ccbb0de77"
    stages = "seq_length_schedule=[{until: 3, seq_length: 16}, [32, 6]]"
    small = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    for words in (stages, "seq_length_schedule=[[16, 3], [32, 6]]"):  # as before stages had keys
        assert load([], [*small, words]).hash == "37e80631a7db"
    base = loaded()
    for word in SHAPES_NOTHING.split(" "):
        assert loaded(word).hash == base.hash, word
    hashes = {loaded(*words.split("&")).hash for words in SHAPES.split(" ")}
    assert len(hashes | {base.hash}) == 1 + len(SHAPES.split(" "))
    rounded = "float32_matmul_precision=high"  # acts on float32 products alone
    assert loaded(rounded).hash != base.hash
    assert loaded(rounded, "precision=bf16").hash == loaded("precision=bf16").hash
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
