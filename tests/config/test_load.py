"""Files and words become one checked configuration, and every fault is in one message."""

import contextlib

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.config import Config, load
from megatron.config.legacy import CORPORA, NAMES
from megatron.config.schema import PATHS, all_keys
from megatron.errors import UserError
from tests.config.small import FAULTS, SIZES, faults, loaded, write
from tests.support import ROOT

BLEND = ["train_data_paths=[d/a, d/b]", "valid_data_paths=[d/c]"]


def test_later_files_win_and_words_win_over_files(tmp_path):
    first = write(tmp_path / "one.yml", "seq-length: 128\nseed: 1\nhidden-size: 48\n")
    two = write(tmp_path / "two.yml", "seq_length: 256\nseed: 2\n")
    config = load([first, two.with_suffix("")], ["num_layers=2", "num_attention_heads=4", "seed=3"])
    assert (config.model.seq_length, config.training.seed, config.model.hidden_size) == (256, 3, 48)
    assert config.sources == (str(first), str(two), "command line")
    assert config.data.seq_length_val == 256  # follows seq_length


def test_python_words_trailing_commas_and_exponents_are_understood(tmp_path):
    text = '{ "no-weight-tying": True, "optimizer": {"params": {"lr": 6e-4, "eps": 1e-8,},}, }'
    config = load([write(tmp_path / "flow.yml", text)], [*SIZES, "warmup=1E-2"])
    assert config.model.no_weight_tying is True
    assert (config.optimizer.lr, config["optimizer.params.eps"]) == (0.0006, 1e-8)
    assert config.optimizer.warmup == 0.01


def test_a_file_replaces_a_mapping_and_a_word_with_dots_changes_one_entry(tmp_path):
    text = "optimizer: {type: AdamW, params: {lr: 1.0, betas: [0.5, 0.6]}}"
    first = write(tmp_path / "first.yml", text)
    second = write(tmp_path / "second.yml", "optimizer: {params: {lr: 2.0}}")
    optimizer = load([first], [*SIZES, "optimizer.params.lr=3e-4"]).optimizer.optimizer
    assert (optimizer.type, optimizer.params.betas) == ("AdamW", (0.5, 0.6))
    assert optimizer.params.lr == 3e-4
    optimizer = load([first, second], SIZES).optimizer.optimizer
    assert (optimizer.type, optimizer.params.betas) == ("Adam", (0.9, 0.999))
    assert optimizer.params.lr == 2.0
    assert loaded("pos_emb_args.base=5e5").position.pos_emb_args == {"base": 500000.0}


def test_every_path_of_the_user_is_read_as_a_shell_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setenv("DATA", "/data")
    for key in sorted(PATHS - {"pos_emb_file", *CORPORA}):
        file = write(tmp_path / "paths.yml", f"{key}: ~/${{DATA}}/x-$5")
        for config in (load([file], SIZES), load([], [*SIZES, f"{key}=~/$DATA/x-$5"])):
            assert config[key] == "/home/anna//data/x-$5"
    data = loaded("train_data_paths=[~/a, $DATA/b]", "valid_data_paths=$DATA/c,~/d").data
    assert data.train_data_paths == ("/home/anna/a", "/data/b")
    assert data.valid_data_paths == ("/data/c", "/home/anna/d")


def test_another_encoding_drops_the_options_of_the_earlier_one(tmp_path):
    file = write(tmp_path / "mep.yml", "pos_emb: mep_free\npos_emb_args: {weights: learned}")
    config = load([file], [*SIZES, "pos_emb=rotary"])
    assert config.position.pos_emb_args == {}
    assert any(note.startswith("pos_emb_args: ") for note in config.notes)
    assert load([file], [*SIZES, "pos_emb=mep_free"]).position.pos_emb_args != {}
    config = load([file], [*SIZES, "pos_emb_layers=[rotary, none]"])
    assert "pos_emb: mep_free is dropped, because command line replaces it" in config.notes


def test_a_word_for_a_text_key_is_taken_as_text():
    config = loaded("save=1235", "wandb_group=1e5", "load=null", "split=[90,5,5]")
    assert (config.checkpoint.save, config.checkpoint.load) == ("1235", None)
    assert (config.logging.wandb_group, config.data.split) == ("1e5", "90,5,5")
    assert loaded("eval_lengths=64,128").evaluation.eval_lengths == (64, 128)
    for folder in (
        "runs/exp #2",
        "runs/🙂",
        "#2",
        "a: b",
        "a: b: c",
        " a ",
        "- a",
        "@a",
        "true",
        "a' b",
    ):
        assert loaded(f"save={folder}").checkpoint.save == folder
    assert loaded("save='a b'").checkpoint.save == "a b"
    assert loaded("train_data_paths=a #1", BLEND[1]).data.train_data_paths == ("a #1",)
    assert faults("seed=1 #2") == ["seed: must be a whole number, got '1 #2'"]


def test_a_fault_of_a_file_is_reported_with_its_line(tmp_path):
    lines = ["num_layers: 2", "hidden_size: 32"]
    faulty = ("warmup:\u00a00.1", "warmup\uff1a0.1", "warmup:0.1")
    for above in range(3):
        for fault in faulty if above < 2 else (*faulty, "eval_lengths: [8"):
            text = "\n".join([*lines[:above], fault, *lines[above:]])
            file = write(tmp_path / "bad.yml", f"{text}\n\n")
            assert f"(line {above + 1}: " in faults(paths=(file,))[0]


def test_all_faults_come_in_one_message():
    words = ["hidden_size=100", "pos_emb=rotery", "num_layer=2", "seed=x", "lr=1"]
    with pytest.raises(UserError) as raised:
        load(["configs/125M.yml"], [*words, "optimizer.params.lrr=1"])
    assert str(raised.value) == (
        "bad configuration (configs/125M.yml, command line)\n"
        "  num_layer: no such key; did you mean num_layers?\n"
        "  lr: no such key; did you mean optimizer.params.lr?\n"
        "  seed: must be a whole number, got 'x'\n"
        "  optimizer.params.lrr: no such key; did you mean optimizer.params.lr?\n"
        "  hidden_size: 100 cannot be split over num_attention_heads = 12; try hidden_size = 96\n"
        "  pos_emb: no encoding is called 'rotery'; did you mean rotary?"
    )


def test_every_fault_says_what_is_wrong_and_what_to_write():
    for words, line in FAULTS["load"].items():
        assert faults(*words.split(";")) == [line]
    for words, line in FAULTS["of_blends"].items():
        assert faults(*BLEND, *words.split(";")) == [line]


def test_a_key_may_be_given_twice_with_one_value(tmp_path):
    """tests/bad_inputs has files that cannot be read."""
    file = write(tmp_path / "125M.yml", "seq-length: 64\nseq_length: 64\n")
    assert load([file], SIZES).model.seq_length == 64


def test_sections_cannot_be_changed_and_loading_does_not_move_the_random_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    config = loaded("pos_emb=kerple_log")
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(ValueError, match="frozen"):
        config.model.num_layers = 3


def test_training_and_evaluation_name_all_keys_that_are_missing():
    needs = {
        ("train",): ["data_path", "train_iters", "save"],
        ("train", BLEND[0], "train_iters=5", "save=x"): ["valid_data_paths"],
        ("train", "train_iters=0"): ["load"],  # KERPLE's and MEP's way to measure
        ("evaluate",): ["load"],
    }
    for (purpose, *words), keys in needs.items():
        with pytest.raises(UserError) as raised:
            loaded(*words).require_for(purpose)
        assert [line.split(":")[0] for line in str(raised.value).split("\n  ")[1:]] == keys
    loaded("data_path=a", "train_iters=1", "save=b").require_for("train")
    loaded("save=b").require_for("evaluate")
    assert loaded("train_iters=0").only_measures
    assert not loaded().only_measures


def test_a_split_beside_whole_corpora_and_links_to_trained_text_are_noticed(tmp_path):
    [note] = loaded(*BLEND, "split=8,1,1").notes
    assert note.startswith("split: accepted, has no effect here")
    (tmp_path / "a.bin").touch()
    (tmp_path / "b.bin").symlink_to("a.bin")
    words = [f"train_data_paths=[{tmp_path}/a]", f"valid_data_paths=[{tmp_path}/b]"]
    assert "is also used for training" in faults(*words)[0]


def test_a_saved_configuration_comes_back_exactly(tmp_path):
    words = ["pos_emb=mep_free", "pos_emb_args.weights=[0.2,0.3,0.5]", "precision=bf16"]
    config = loaded(*words, *BLEND, "optimizer.params.lr=1.1e-7")
    config.save(tmp_path / "config.yml")
    again = load([tmp_path / "config.yml"])
    assert (again, again.hash, again.flat()) == (config, config.hash, config.flat())
    assert again.notes == ()
    assert not again.chosen  # nobody chose these


def test_what_follows_a_key_of_a_checkpoint_follows_it_still(tmp_path):
    write(tmp_path / "checkpoint.json")
    file = tmp_path / "config.yml"
    loaded("train_iters=100").save(file)
    again = load([file], ["seq_length=128", "train_iters=150"])
    assert (again["seq_length_val"], again["max_position_embeddings"]) == (128, 128)
    assert again["lr_decay_iters"] == 150
    loaded("seq_length_val=256").save(file)
    assert load([file], ["seq_length=128"])["seq_length_val"] == 256


ORIGINS = {
    "seed: 2\nhidden_size: 96": {"seed": "command line", "hidden_size": "b.yml"},
    "checkpoint_factor: 5": {"save_interval": "b.yml"},
    "fp16: {enabled: true, type: bfloat16}": {
        "precision": "b.yml",
        "lr_schedule": "the recipe of 2022",
    },
    "optimizer: {params: {lr: 1.0e-4, weight_decay: 0.1}}": {
        "optimizer.params.lr": "b.yml",
        "optimizer.params.eps": None,  # the whole mapping is replaced
        "weight_decay": "b.yml",
    },
    "pos_emb: alibi": {"pos_emb": "b.yml", "pos_emb_args": None},
    "rotary_pct: 0.5": {"pos_emb_args": "b.yml"},
}


def test_every_key_knows_the_source_that_set_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "a.yml",
        "num_layers: 2\nhidden_size: 96\nnum_attention_heads: 4\nseq_length: 64\n"
        "optimizer: {params: {lr: 1.0e-3, eps: 1.0e-8}}\n"
        "pos_emb: rotary\npos_emb_args: {base: 500000}\n",
    )
    for text, expected in ORIGINS.items():
        write(tmp_path / "b.yml", text)
        origins = load(["a.yml", "b.yml"], ["seed=3"]).origins
        assert {key: origins.get(key) for key in expected} == expected
        assert origins["num_layers"] == "a.yml"
        assert "gradient_clipping" not in origins


KEYS = [*(key.name for key in all_keys()), *sorted(NAMES), "optimizer", "fp16", "optimizer.params"]
PLAIN = st.none() | st.booleans() | st.integers(-3, 2000) | st.floats(width=16)
WORDS = st.sampled_from(
    ["enabled", "type", "stage", "lr", "bfloat16", "rotary", "mep", "kernels", "0x1f", "1e-3", ""]
)
VALUES = st.recursive(
    PLAIN | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), st.text(max_size=12))
@example({"pos_emb_file": False, "pos_emb": []}, "")  # found once, and rarely drawn
def test_any_value_of_any_key_loads_or_is_a_fault(drawn, word):
    words = [f"{key}={yaml.safe_dump(value)}" for key, value in drawn.items()]
    with contextlib.suppress(UserError):
        config = loaded(*words)
        assert isinstance(config, Config)
        assert len(config.hash) == 12
    with contextlib.suppress(UserError):
        loaded(word)


def test_every_shipped_configuration_loads_in_silence():
    configs = ROOT / "configs"
    for path in configs.glob("*.yml"):
        assert load([path]).notes == ()
    config = load([configs / "mep.yml"])
    config.require_for("train")
    parts = ["125M", "data/openwebtext2", "pos_emb/mep_free"]
    assert load([configs / part for part in parts], ["seed=1235"]).hash == config.hash
