"""Keys that name corpora: how they are written, what contradicts what, what counts for the hash."""

import pytest

from megatron.config import load
from megatron.errors import UserError
from tests.config.small import SIZES, fault, loaded

BLEND = ["train_data_paths=[d/a, d/b]", "valid_data_paths=[d/c]"]
RUN = ["train_iters=5", "save=runs/x"]


def test_a_blend_is_plain_yaml(tmp_path):
    file = tmp_path / "blend.yml"
    file.write_text(
        "train_data_paths: [data/github_text_document, data/arxiv_text_document]\n"
        "train_data_weights: [2, 1]\n"
        "valid_data_paths: data/heldout_text_document\n"
        "train_iters: 5\nsave: runs/x\n"
    )
    config = load([file], SIZES)
    data = config.data
    assert data.train_data_paths == ("data/github_text_document", "data/arxiv_text_document")
    assert data.train_data_weights == (2.0, 1.0)
    assert data.valid_data_paths == ("data/heldout_text_document",)
    config.require_for("train")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [*BLEND, "data_path=d/x"],
            "data_path: d/x beside train_data_paths; one corpus whose parts split divides is"
            " data_path, whole corpora for each part are train_data_paths, valid_data_paths,"
            " test_data_paths; drop one kind, such as with data_path=null",
        ),
        (
            [*BLEND, "train_data_weights=[1, 2, 3]"],
            "train_data_weights: 3 weights for the 2 corpora of train_data_paths; give one for"
            " each",
        ),
        (["valid_data_weights=[1]"], "valid_data_weights: 1 weights for the 0 corpora of"),
        ([*BLEND, "train_data_weights=[1, -2]"], "train_data_weights: must be > 0, got -2"),
        ([*BLEND, "train_data_weights=[0, 0]"], "train_data_weights: must be > 0, got 0"),
        (
            ["train_data_paths=[d/a, d/../d/a]"],
            "train_data_paths: d/../d/a stands there twice; give it once, with a larger weight",
        ),
        (
            ["train_data_paths=[d/a]", "test_data_paths=[d/a]"],
            "test_data_paths: d/a is trained on too (train_data_paths), so a loss there says"
            " nothing of new text; prepare text that is held out",
        ),
        (
            ["train_data_paths=[d/a.bin]"],
            "train_data_paths: d/a.bin is a file; give the prefix d/a",
        ),
        (
            ["weight_by_num_documents=true"],
            "weight_by_num_documents: weighs the corpora of train_data_paths; give them",
        ),
        (
            [*BLEND, "weight_by_num_documents=true", "train_data_weights=[1, 2]"],
            "weight_by_num_documents and train_data_weights contradict each other; keep one",
        ),
        (
            [*BLEND, "train_epochs=2", "train_data_weights=[1, 2]"],
            "train_data_weights: cannot be combined with train_epochs; set train_iters",
        ),
        (
            ["train_epochs=2", "train_iters=100"],
            "train_iters and train_epochs contradict each other; keep one of them;"
            " train_epochs=null drops that of an earlier file",
        ),
    ],
)
def test_every_fault_of_corpora_is_one_line_that_says_what_to_write(words, line):
    assert fault(*words).startswith(line)


def test_training_needs_text_for_its_validations():
    config = loaded(BLEND[0], *RUN)
    with pytest.raises(UserError, match="valid_data_paths: not given; train_data_paths leaves no"):
        config.require_for("train")
    loaded(BLEND[0], *RUN, "eval_interval=0").require_for("train")
    with pytest.raises(UserError, match="data_path: not given"):
        loaded(BLEND[1], *RUN).require_for("train")


def test_train_epochs_stands_for_train_iters():
    loaded(*BLEND, "train_epochs=2", "save=runs/x").require_for("train")


def test_train_epochs_of_a_later_source_replaces_the_steps_of_an_earlier_file(tmp_path):
    """As configs/125M.yml has steps, and nobody should have to copy it."""
    file = tmp_path / "run.yml"
    file.write_text("train_iters: 50000\n")
    config = load([file], [*SIZES, *BLEND, "train_epochs=2"])
    assert (config.training.train_epochs, config.training.train_iters) == (2, 0)
    assert config.notes == (
        f"train_iters: 50000 of {file} is dropped, because a later source sets train_epochs: 2",
    )
    (tmp_path / "later.yml").write_text("train_epochs: 3\n")
    again = load([file, tmp_path / "later.yml"], [*SIZES, *BLEND])
    assert again.training.train_epochs == 3
    assert load([file], [*SIZES, *BLEND]).training.train_iters == 50000


def test_links_to_text_that_is_trained_on_are_no_other_text(tmp_path):
    (tmp_path / "a.bin").touch()
    (tmp_path / "b.bin").symlink_to("a.bin")
    words = [f"train_data_paths=[{tmp_path}/a]", f"valid_data_paths=[{tmp_path}/b]"]
    with pytest.raises(UserError, match=r"valid_data_paths: .*/b is trained on too"):
        loaded(*words)


def test_a_split_beside_whole_corpora_is_named_in_a_note():
    (note,) = loaded(*BLEND, "split=8,1,1").notes
    assert note.startswith("split: accepted, has no effect here")
    assert not loaded(*BLEND).notes


def test_corpora_and_weights_count_for_the_hash_and_folders_do_not():
    base = loaded(*BLEND)
    moved = loaded("train_data_paths=[/e/a, f/b]", "valid_data_paths=[g/c]")
    assert moved.hash == base.hash
    others = [
        loaded(*BLEND, word).hash
        for word in (
            *("train_data_weights=[1, 2]", "weight_by_num_documents=true", "train_epochs=2"),
            *("valid_data_paths=[d/e]", "test_data_paths=[d/e]", "train_data_paths=[d/b, d/a]"),
        )
    ]
    assert len({base.hash, *others}) == 7
    assert loaded(*BLEND, "train_data_weights=[1, 2]").hash == others[0]


def test_a_saved_blend_is_the_same_configuration(tmp_path):
    config = loaded(*BLEND, "train_data_weights=[1, 2]")
    config.save(tmp_path / "config.yml")
    again = load([tmp_path / "config.yml"])
    assert (again.flat(), again.hash) == (config.flat(), config.hash)
