"""Where a run may start. What cannot work or would be lost is refused before the first step."""

import pytest

from megatron.config import load
from megatron.errors import UserError
from megatron.training.run import train
from tests.support import ROOT, run
from tests.training.conftest import copy_of, settings, tiny


def test_a_new_run_never_overwrites_an_old_one(grid, corpus, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    config = load([], tiny(f"data_path={corpus}", f"save={folder}", "train_iters=4"))
    with pytest.raises(
        UserError,
        match=r"save: .* holds a checkpoint of step 4 already - set load: .* to continue it",
    ):
        train(config, grid)


def test_another_model_is_not_continued(grid, corpus, trained, tmp_path):
    config = settings(corpus, copy_of(trained, tmp_path), "pos_emb=alibi", "num_layers=3")
    with pytest.raises(UserError) as fault:
        train(config, grid)
    for part in (
        "is another model",
        "num_layers: 2 there, 3 here",
        "pos_emb: 'mep_param' there, 'alibi' here",
    ):
        assert part in str(fault.value)


def test_text_of_another_tokenizer_is_not_continued_with(grid, corpus, trained, tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text() * 30)
    words = [
        "--input",
        tmp_path / "text.txt",
        "--name",
        "other",
        "-t",
        "HFTokenizer",
        "--vocab-size",
        300,
    ]
    assert run("prepare_data.py", *words, "-d", tmp_path).returncode == 0
    other = tmp_path / "other" / "other_text_document"
    more = ["tokenizer_type=HFTokenizer", "split=[1, 0, 0]"]
    config = settings(other, copy_of(trained, tmp_path), *more)
    with pytest.raises(
        UserError, match=r"load: .* learned with CharLevelTokenizer .* written by HFTokenizer"
    ):
        train(config, grid)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            ["pos_emb=learned", "seq_length_val=128"],
            "learned positions end at 64, so length 128 cannot be computed",
        ),
        (["split=[100, 0, 0]"], "leaves none for valid"),
    ],
)
def test_a_validation_that_cannot_be_is_refused_before_the_first_step(
    grid, corpus, tmp_path, how, message
):
    with pytest.raises(UserError, match=message):
        train(settings(corpus, tmp_path, "eval_interval=4", *how), grid)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_to_start_from_must_be_there(grid, corpus, tmp_path):
    config = load(
        [],
        tiny(
            f"data_path={corpus}", f"load={tmp_path / 'gone'}", f"save={tmp_path}", "train_iters=4"
        ),
    )
    with pytest.raises(UserError, match=r"checkpoint: no folder .*gone"):
        train(config, grid)


def test_a_save_folder_that_cannot_be_made_is_refused_before_training(grid, corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"save: .*file/run: cannot be written \(Not a directory\)",
    ):
        train(
            load(
                [],
                tiny(f"data_path={corpus}", f"save={tmp_path / 'file' / 'run'}", "train_iters=1"),
            ),
            grid,
        )
