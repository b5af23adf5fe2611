"""The generated texts are complete and up to date, and every shipped file loads."""

from pathlib import Path

import pytest

from megatron.config import load
from megatron.config.document import README, help_text, readme
from megatron.config.keys import all_keys
from megatron.config.schema import KEYS
from megatron.positions import options_of
from megatron.positions.layers import name_of_layers

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COMPLETE = sorted(CONFIGS.glob("*.yml"))
PARTS = sorted(CONFIGS.glob("pos_emb/*.yml")) + sorted(CONFIGS.glob("data/*.yml"))


def test_the_readme_of_the_configurations_is_up_to_date():
    assert README.read_text(encoding="utf-8") == readme(), "run: make docs"


@pytest.mark.parametrize("text", [help_text(), readme()])
def test_every_key_is_explained(text):
    for key in all_keys():
        assert key.name in text
        assert key.info.description, f"{key.name} has no text under it"
        assert key.info.description.split()[0] in text


def test_every_key_belongs_to_one_section():
    names = [key.name.split(".")[0] for key in all_keys()]
    assert set(names) == set(KEYS)
    assert len({key.name for key in all_keys()}) == len(names)


TURNING = "rotary, rotary, rotary"
PATTERNS = {
    "smollm3": [f"{TURNING}, none"],
    "rnope_swa": [f"{TURNING}, none", 128, 128, 128, None],
    "swan": [f"none, {TURNING}", None, 128, 128, 128],
    "gemma3": [f"{TURNING}, rotary, rotary, rotary (base: 1000000)", *[128] * 5, None],
}
"""Files in configs/pos_emb with layers that differ: the encodings, then the windows."""


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.name)
def test_every_shipped_file_loads_in_silence(path):
    config = load([path])
    assert config.notes == ()
    assert load([path]).hash == config.hash


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_part_loads_over_a_model(path):
    config = load([CONFIGS / "125M.yml", path])
    assert config.notes == ()
    if path.stem in PATTERNS:
        expected = PATTERNS[path.stem]
        found = [name_of_layers(config.position), *config.attention.window_layers]
        assert found == expected
    elif path.parent.name == "pos_emb":
        assert config.position.pos_emb == path.stem
        assert set(config.position.pos_emb_args) == set(options_of(path.stem)) - {"max_positions"}
    else:
        assert config.data.data_path == f"data/{path.stem}/{path.stem}_text_document"


def test_the_files_of_an_encoding_say_its_defaults():
    for path in (path for path in PARTS if path.parent.name == "pos_emb"):
        if path.stem in PATTERNS:
            continue  # they name encodings of layers
        if any(option.default is option.empty for option in options_of(path.stem).values()):
            continue  # mep: its file is an example, because there is no default to say
        assert (
            load([CONFIGS / "125M.yml", path]).hash
            == load([CONFIGS / "125M.yml"], [f"pos_emb={path.stem}"]).hash
        )


def test_mep_is_complete_and_the_recipe_of_the_papers():
    config = load([CONFIGS / "mep.yml"])
    config.require_for("train")
    config.require_for("evaluate")
    config.check_batch(devices=1)
    training, optimizer = config.training, config.optimizer
    assert training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps == 32
    assert (training.train_iters, optimizer.lr, optimizer.betas, optimizer.weight_decay) == (
        50000,
        6e-4,
        (0.9, 0.999),
        0,
    )
    assert (optimizer.lr_schedule, optimizer.warmup, optimizer.gradient_clipping) == (
        "neox-2022",
        0.01,
        1.0,
    )
    assert (config.precision.dtype, config.model.no_weight_tying, config.position.pos_emb) == (
        "bf16",
        True,
        "mep_free",
    )
    assert config.evaluation.eval_lengths == (512, 1024, 2048, 4096, 8192, 16384)


def test_mep_is_the_125M_recipe_with_data_and_encoding():
    alone = load([CONFIGS / "mep.yml"])
    parts = ["125M", "data/openwebtext2", "pos_emb/mep_free"]
    assert load([CONFIGS / part for part in parts], ["seed=1235"]).hash == alone.hash
