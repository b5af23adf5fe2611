"""All 30 files of KERPLE and all 777 of MEP load, and nothing about their mixtures is guessed."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import deepy
from megatron.config import load
from megatron.errors import UserError
from megatron.positions import REGISTRY, options_of
from tests.config.small import loaded
from tests.published import KERPLE, MEP, experiments, files_of, one_of_each, write_bases
from tools.explain_config import mixture_named

ALL = [*experiments(MEP), *experiments(KERPLE)]
SOME = [*one_of_each(MEP), *one_of_each(KERPLE)]
# What the released code computes, whatever the name of the file says.
RELEASED = {
    "snope_norm_original_scaling__": ["exp", {"exp": 0.5}, "gaussian"],
    "snope_norm_original_scaling_": ["exp", {"exp": 0.5}, "gaussian"],
    "snope_kerplelog": ["gaussian", "exp", "t5", "kerple_log"],
}
MIXTURES = yaml.safe_load(Path(__file__).with_name("mixtures.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    write_bases(folder)
    return folder


def checked(experiment, bases):
    for position, steps, length in (("evaluate", 0, 4096), ("train", 50000, 2048)):
        config = load(files_of(experiment, bases, position))
        assert config.position.pos_emb in REGISTRY
        assert (config.optimizer.lr_schedule, config.precision.dtype) == ("neox-2022", "bf16")
        assert (config.training.seed, config.training.train_iters) == (experiment.seed, steps)
        assert config.data.seq_length_val == length
    return config


def test_a_file_of_each_kind_loads_to_train_and_to_evaluate(bases):
    assert len({experiment.stem for experiment in experiments(MEP)}) == 777
    assert len(ALL) == 807
    for experiment in SOME:
        config = checked(experiment, bases)
        if experiment.pos_emb in RELEASED:
            kernels = options_of(config.position.pos_emb)["kernels"].default
            assert [*kernels] == RELEASED[experiment.pos_emb]
            assert config.position.pos_emb_args == {}  # nothing is guessed from the file's name


@pytest.mark.campaign
def test_every_published_file_loads_to_train_and_to_evaluate(bases):
    for experiment in ALL:
        checked(experiment, bases)


def test_mixtures_are_read_from_the_names_of_files():
    for stem, options in MIXTURES["named"].items():
        assert mixture_named(stem, "snope_kerplelog") == options
        words = f"pos_emb_args={options}".replace("'", "")
        assert loaded("pos_emb=mep", words).position.pos_emb_args == options
    for stem, why in MIXTURES["unknown"].items():
        assert mixture_named(stem, "snope_kerplelog") == why
    notes = Counter()
    for experiment in experiments(MEP):
        if experiment.pos_emb not in RELEASED:
            continue
        named = mixture_named(experiment.stem, experiment.pos_emb)
        released = sorted(map(str, RELEASED[experiment.pos_emb]))
        if isinstance(named, str):
            notes["unknown"] += 1
        else:
            is_released = sorted(map(str, named["kernels"])) == released
            notes["released" if is_released else "another"] += 1
    assert notes == {"released": 70, "another": 222, "unknown": 284}


def test_a_recipe_of_2022_keeps_its_schedule_and_says_what_differs(bases):
    files = files_of(SOME[0], bases, "train")
    notes = load(files).notes
    assert any(
        note.startswith("lr_schedule: neox-2022 is used because the files are from 2022")
        for note in notes
    )
    assert len([note for note in notes if note.startswith("of 2022: ")]) == 1
    assert load(files, ["lr_schedule=standard"]).optimizer.lr_schedule == "standard"
    for word in ("precision=bf16", "fp16={enabled: true}", "bf16=true"):
        assert loaded(word).optimizer.lr_schedule == "standard"


def test_deepy_makes_no_training_steps_an_evaluation(bases, monkeypatch):
    started = []

    def execve(_, command, environment):
        started.append(Path(command[2]).name)
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execve)
    for position in ("train", "evaluate"):
        with pytest.raises(SystemExit):
            deepy.main(["1.5", "train.py", *map(str, files_of(SOME[0], bases, position))])
    assert started == ["train.py", "evaluate.py"]


def test_the_width_of_llamas_mlp_is_that_of_the_published_models():
    """GPT-NeoX's files of Llama, whose models have these widths on Hugging Face."""
    for hidden, width, multiple, published in (
        (4096, 32768, 256, 11008),
        (8192, 86016, 4096, 28672),
    ):
        words = [f"hidden_size={hidden}", "num_attention_heads=32", f"intermediate_size={width}"]
        words += [f"mlp_multiple_of={multiple}", "activation=swiglu"]
        assert loaded(*words).model.intermediate_size == published
    with pytest.raises(UserError, match="mlp_multiple_of: needs intermediate_size"):
        loaded(*words, "activation=gelu")
