"""A user's file of encodings: run where it is named, hashed by its text, kept with checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoints.read import read_meta
from megatron.config import load
from megatron.errors import UserError
from megatron.positions import REGISTRY, load_file

pytestmark = pytest.mark.usefixtures("own_registry")

SHAPE = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
CODE = """\
from pathlib import Path

from megatron.positions import DistanceBias, Shape, positive, register

with Path(__file__).with_name("ran").open("a") as marks:
    marks.write("x")


@register("flat", aliases=("level",))
class Flat(DistanceBias):
    '''height'''

    def __init__(self, shape: Shape, *, height: float = 1.0):
        super().__init__(shape)
        self.height = positive("height", height)

    def log_kernel(self, distance):
        return (0 * distance + self.height).expand(self.shape.heads, -1)
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    return write(tmp_path / "mine.py", CODE)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def fault_of(*words: str) -> str:
    with pytest.raises(UserError) as raised:
        load([], [*SHAPE, *words])
    return str(raised.value)


def checkpoint(folder: Path, *words: str) -> Path:
    """What training leaves of a configuration."""
    config = load([], [*SHAPE, *words])
    folder.mkdir(parents=True)
    config.save(folder / "config.yml")
    (folder / "checkpoint.json").write_text(
        json.dumps({"step": 1, "config_hash": config.hash, "vocab": 128})
    )
    return folder


def forget(mine: Path) -> None:
    """As in a process that has loaded nothing yet."""
    from megatron.positions import ALIASES, FILES

    REGISTRY.pop("flat")
    ALIASES.pop("level")
    FILES.clear()
    mine.with_name("ran").unlink()


def test_a_file_is_run_once_and_its_encoding_has_options_messages_and_aliases(mine):
    for _ in range(2):
        config = load([], [*SHAPE, f"pos-emb-file={mine}", "pos_emb=flat", "pos_emb_args.height=2"])
    assert config.position.pos_emb_args == {"height": 2}
    assert mine.with_name("ran").read_text() == "x"
    assert load([], [*SHAPE, f"pos_emb_file={mine}", "pos_emb=level"]).position.pos_emb == "flat"
    assert "flat takes no option 'heit'; did you mean height?" in fault_of(
        "pos_emb=flat", "pos_emb_args.heit=2"
    )


def test_a_yaml_file_can_name_it_and_a_later_source_wins(mine, tmp_path):
    other = write(tmp_path / "other.py", CODE.replace("flat", "even").replace("level", "plane"))
    one = write(tmp_path / "one.yml", f"pos_emb_file: {mine}\npos_emb: even\n")
    config = load([one], [*SHAPE, f"pos_emb_file={other}"])
    assert config.position.pos_emb == "even"
    assert "flat" not in REGISTRY  # what is not used is not run


def test_the_text_counts_for_the_hash_and_its_place_does_not(mine, tmp_path):
    words = [*SHAPE, "pos_emb=flat"]
    first = load([], [*words, f"pos_emb_file={mine}"])
    moved = shutil.copy(mine, write(tmp_path / "elsewhere/renamed.py", ""))
    assert load([], [*words, f"pos_emb_file={moved}"]).hash == first.hash
    assert load([], words).hash != first.hash  # known by now, but nobody could say from where
    forget(mine)
    edited = write(tmp_path / "edited.py", CODE + "# another text\n")
    assert load([], [*words, f"pos_emb_file={edited}"]).hash != first.hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            r"pos_emb_file: \S*mine.py cannot be read \(No such file or directory\);"
            " give the path of a Python",
        ),
        (
            b"\xff\xfe\x00",
            r"pos_emb_file: \S*mine.py cannot be read \(it is not text\);"
            " give the path of a Python file",
        ),
        (b"x = 1\ndef f(:\n", r"pos_emb_file: \S*mine.py:2 is not valid Python \(invalid syntax\)"),
        (
            b"x = 1\n",
            r"pos_emb_file: \S*mine.py registers no encoding;"
            r' put @register\("its_name"\) above the class',
        ),
        (
            b"import nowhere_at_all\n",
            r"pos_emb_file: \S*mine.py:1 stops with ModuleNotFoundError: No module named",
        ),
        (
            CODE.replace("flat", "alibi").encode(),
            r"mine.py:9 stops with ValueError: Flat: the name 'alibi' is taken by another encoding;"
            " choose another",
        ),
    ],
    ids=["missing", "binary", "syntax", "empty", "import", "taken"],
)
def test_what_is_wrong_with_a_file_is_one_message_and_registers_nothing(tmp_path, text, message):
    known = dict(REGISTRY)
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UserError, match=message):
        load([], [*SHAPE, f"pos_emb_file={path}"])
    assert fault_of(f"pos_emb_file={path}").count("\n") == 1
    assert known == REGISTRY


def test_a_folder_or_a_list_is_no_file(tmp_path):
    assert "cannot be read (Is a directory)" in fault_of(f"pos_emb_file={tmp_path}")
    assert "pos_emb_file: must be a text" in fault_of("pos_emb_file=[a, b]")


def test_a_file_that_changed_in_the_same_process_is_not_half_loaded(mine):
    load([], [*SHAPE, f"pos_emb_file={mine}"])
    mine.write_text(CODE + "# edited\n")
    assert "was changed after this process had loaded it; start again" in fault_of(
        f"pos_emb_file={mine}"
    )


def test_a_checkpoint_keeps_the_text_that_was_run_and_comes_back(mine, tmp_path):
    config = load([], [*SHAPE, f"pos_emb_file={mine}", "pos_emb=flat"])
    mine.write_text("edited while training")
    config.save(tmp_path / "config.yml")
    assert (tmp_path / "pos_emb_file.py").read_text() == CODE
    folder = tmp_path / "run/global_step1"
    mine.write_text(CODE)
    again, _ = read_meta(checkpoint(folder, f"pos_emb_file={mine}", "pos_emb=flat"))
    assert (again.hash, again.pos_emb_code) == (config.hash, CODE)


def test_code_in_a_checkpoint_is_never_run_unasked(mine, tmp_path):
    folder = checkpoint(tmp_path / "run/global_step1", f"pos_emb_file={mine}", "pos_emb=flat")
    copy = folder / "pos_emb_file.py"
    forget(mine)
    for path in (mine, copy):  # a config.yml from somebody else may name any path
        text = (folder / "config.yml").read_text().replace(str(mine), str(path))
        (folder / "config.yml").write_text(text)
        for read in (lambda: read_meta(folder), lambda: load([folder / "config.yml"])):
            with pytest.raises(UserError) as raised:
                read()
            assert (
                f"{copy} defines this checkpoint's encoding; code that lies in a checkpoint"
                in str(raised.value)
            )
            assert f"read it, then write pos_emb_file={copy} on the command line" in str(
                raised.value
            )
    assert not list(tmp_path.rglob("ran"))
    load_file(copy)  # asked
    assert read_meta(folder)[0].position.pos_emb == "flat"


def test_a_checkpoint_takes_the_same_text_from_anywhere_and_no_other(mine, tmp_path):
    folder = checkpoint(tmp_path / "run/global_step1", f"pos_emb_file={mine}", "pos_emb=flat")
    forget(mine)
    mine.write_text(CODE + "# edited\n")
    load_file(mine)
    with pytest.raises(
        UserError, match=r"defines this checkpoint's encoding, and \S*mine.py has another text"
    ):
        read_meta(folder)
    forget(mine)
    load_file(write(tmp_path / "another/place.py", CODE))
    read_meta(folder)
    (folder / "pos_emb_file.py").unlink()
    with pytest.raises(
        UserError, match=r"pos_emb_file.py is missing or is not text; copy the checkpoint again"
    ):
        read_meta(folder)


def test_a_copy_that_was_edited_is_another_model_even_where_the_user_has_it_run(mine, tmp_path):
    folder = checkpoint(tmp_path / "run/global_step1", f"pos_emb_file={mine}", "pos_emb=flat")
    forget(mine)
    load_file(write(folder / "pos_emb_file.py", CODE.replace("0 * distance", "1 * distance")))
    with pytest.raises(
        UserError,
        match=r"config.yml with pos_emb_file.py: its hash is .* it was edited after training",
    ):
        read_meta(folder)


def test_ctrl_c_while_a_file_runs_is_no_fault_of_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_file(path)
