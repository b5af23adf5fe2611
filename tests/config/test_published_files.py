"""All 30 files of KERPLE and all 777 of MEP load, and nothing about their mixtures is guessed."""

from collections import Counter

import pytest

from megatron.config import Config, load
from megatron.config.published_names import mixture_named
from megatron.errors import UserError
from megatron.positions import REGISTRY, options_of
from tests.published import KERPLE, MEP, Experiment, experiments, files_of, one_of_each, write_bases

ALL = [*experiments(MEP), *experiments(KERPLE)]
SOME = [*one_of_each(MEP), *one_of_each(KERPLE)]
# What the released code computes, whatever the name of the file says.
RELEASED = {
    "snope_norm_original_scaling__": ["exp", {"exp": 0.5}, "gaussian"],
    "snope_norm_original_scaling_": ["exp", {"exp": 0.5}, "gaussian"],
    "snope_kerplelog": ["gaussian", "exp", "t5", "kerple_log"],
}
SIZES = ["num_layers=1", "hidden_size=24", "num_attention_heads=12", "seq_length=16"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    write_bases(folder)
    return folder


def checked(one: Experiment, bases) -> Config:
    for position in ("evaluate", "train"):
        config = load(files_of(one, bases, position))
        assert config.position.pos_emb in REGISTRY
        assert config.optimizer.lr_schedule == "neox-2022"
        assert config.training.seed == one.seed
        assert config.precision.dtype == "bf16"
        length = 4096 if position == "evaluate" else {"train": 2048}[position]
        assert config.data.seq_length_val == length
        assert config.training.train_iters == (0 if position == "evaluate" else 50000)
    return config


def test_the_tables_are_as_large_as_what_was_published():
    assert len(list(experiments(MEP))) == len({one.stem for one in experiments(MEP)}) == 777
    assert len(list(experiments(KERPLE))) == 30


@pytest.mark.parametrize("one", SOME, ids=lambda one: one.stem)
def test_a_file_of_each_kind_loads_to_train_and_to_evaluate(one, bases):
    config = checked(one, bases)
    notes = [note for note in config.notes if note.startswith(f"pos_emb: {one.pos_emb} means")]
    if one.pos_emb in RELEASED:
        kernels = options_of(config.position.pos_emb)["kernels"].default
        assert [*kernels] == RELEASED[one.pos_emb]
        assert "only a file's name tells which" in notes[0]
        assert "tools/migrate_config.py" in notes[0]
        assert config.position.pos_emb_args == {}  # nothing is guessed from the file's name


@pytest.mark.campaign
def test_every_published_file_loads_to_train_and_to_evaluate(bases):
    for one in ALL:
        checked(one, bases)


def test_what_file_names_say_about_mixtures():
    found = Counter()
    for one in experiments(MEP):
        if one.pos_emb in RELEASED:
            named = mixture_named(one.stem, one.pos_emb)
            released = sorted(map(str, RELEASED[one.pos_emb]))
            if named.options is None:
                found["unknown"] += 1
            elif sorted(map(str, named.options["kernels"])) == released:
                found["released"] += 1
            else:
                found["another"] += 1
    assert found.total() == 576
    assert found["released"] == 70
    assert found["another"] + found["unknown"] == 506
    assert found["another"] == 222


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        (
            "ali_ali05_gaussian_all003_fp32_arxiv_1235",
            {"kernels": ["exp", {"exp": 0.5}, "gaussian"]},
        ),
        (
            "ali_05_tanh_gau_all004_fp32_openwebtext2_1235",
            {"kernels": ["exp", {"exp": 0.5}, "tanh", "gaussian"]},
        ),
        (
            "len1024_t5_kerplelog_gau_alibi_github_1239",
            {"kernels": ["t5", "kerple_log", "gaussian", "exp"]},
        ),
        ("medium_gaussian_kerplelog_arxiv_1235", {"kernels": ["gaussian", "kerple_log"]}),
        ("snope_gaussian_def05_hall_fp32_openwebtext2_1236", {"kernels": [{"gaussian": 0.5}]}),
        (
            "snope_ali_tanh025_gau025_fp32_openwebtext2_1235",
            {"kernels": ["exp", "tanh", "gaussian"], "weights": [0.5, 0.25, 0.25]},
        ),
    ],
)
def test_a_mixture_is_read_from_the_name(stem, options):
    assert mixture_named(stem, "snope_kerplelog").options == options
    mixture = [f"pos_emb_args={options}".replace("'", "")]
    assert load([], [*SIZES, "pos_emb=mep", *mixture]).position.pos_emb_args == options


@pytest.mark.parametrize(
    ("stem", "why"),
    [
        ("snope_kerplelog_github_1235", "it repeats pos-emb and names no kernels"),
        ("sigmoid_kerplelog_github_1235", "the released code has no sigmoid kernel"),
        ("alibi_slopes_h8_openwebtext2_1235", "slopes of this experiment are not in the released"),
        ("t5_kerplelog_nopara_github_1235", "its word 'nopara' is not known"),
        ("ali_all003_github_1235", "it names 1 kernels and says that they are 3"),
        ("fp32_github_1235", "it names no kernels"),
    ],
)
def test_a_name_that_cannot_be_read_gives_the_reason(stem, why):
    named = mixture_named(stem, "snope_kerplelog")
    assert named.options is None
    assert why in named.why_not


def test_a_recipe_of_2022_keeps_its_schedule_and_says_what_differs(bases):
    one = SOME[0]
    files = files_of(one, bases, "train")
    config = load(files)
    assert config.optimizer.lr_schedule == "neox-2022"
    said = [note for note in config.notes if note.startswith(("lr_schedule: ", "of 2022: "))]
    assert [note.split(" ")[:3] for note in said] == [
        ["lr_schedule:", "neox-2022,", "as"],
        ["of", "2022:", "positions,"],
        ["of", "2022:", "the"],
    ]
    assert load(files, ["lr_schedule=standard"]).optimizer.lr_schedule == "standard"
    in_fp32 = load(files, ["attention_softmax_in_fp32=true"]).notes
    assert not any("softmax is float32 here; the forks'" in note for note in in_fp32)


@pytest.mark.parametrize("words", [["precision=bf16"], ["fp16={enabled: true}"], ["bf16=true"]])
def test_files_of_today_keep_todays_schedule(words):
    config = load([], [*SIZES, *words])
    assert config.optimizer.lr_schedule == "standard"
    assert not any("2022" in note for note in config.notes)


def test_names_of_encodings_without_a_meaning_are_refused():
    with pytest.raises(UserError, match="no encoding is called 'kerple_power_b_'; did you mean"):
        load([], [*SIZES, "pos-emb=kerple_power_b_"])
