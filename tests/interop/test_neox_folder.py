"""The folder of a GPT-NeoX run, its checkpoint and the configuration that was saved with it."""

import pytest

from megatron.errors import UserError
from megatron.interop.neox_folder import checkpoint_in, configuration

SIZES = '{"num-layers": 2, "hidden-size": 48, "num-attention-heads": 4, "seq-length": 64,\n'


@pytest.fixture
def step(tmp_path):
    """A folder global_step30 as GPT-NeoX writes it with two tensor-parallel ranks."""
    folder = tmp_path / "global_step30"
    (folder / "configs").mkdir(parents=True)
    (folder / "layer_00-model_01-model_states.pt").touch()
    (folder / "configs" / "small.yml").write_text(
        SIZES + '"pos-emb": "alibi", "model-parallel-size": 2, "pipe-parallel-size": 2}'
    )
    (folder / "configs" / "setup.yml").write_text('{"seq_length": 64, "log-interval": 100}')
    return folder


def test_the_run_and_its_newest_checkpoint_are_found(step, tmp_path):
    assert checkpoint_in(step) == step
    assert checkpoint_in(tmp_path) is None
    pointer = tmp_path / "latest"
    pointer.write_text("global_step30\n")
    assert checkpoint_in(tmp_path) == step
    for other in ("global_step40", "", "../" + tmp_path.name + "/global_step30", "."):
        pointer.write_text(other)
        assert checkpoint_in(tmp_path) is None, other


def test_a_checkpoint_of_ours_is_none_of_theirs(step):
    (step / "mp_rank_00_model_states.pt").touch()
    (step / "checkpoint.json").write_text("{}")
    assert checkpoint_in(step) is None


def test_the_saved_configuration_is_read_for_one_rank(step):
    config = configuration(step, ["attention_backend=eager"])
    assert config is not None
    assert config.position.pos_emb == "alibi"
    assert config["model_parallel_size"] == config["pipe_parallel_size"] == 1
    assert config["attention_backend"] == "eager"


def test_files_that_disagree_or_are_damaged_are_one_message(step):
    (step / "configs" / "length.yml").write_text("seq-length: 128")
    with pytest.raises(UserError, match=r"length.yml has seq_length: 128, setup.yml has 64, and"):
        configuration(step)
    (step / "configs" / "length.yml").write_text("{")
    with pytest.raises(UserError, match=r"length.yml: not valid YAML"):
        configuration(step)


def test_without_files_there_is_no_configuration(step):
    for file in (step / "configs").iterdir():
        file.unlink()
    assert configuration(step) is None
