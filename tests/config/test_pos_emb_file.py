"""A user's file of encodings: run where it is named, hashed by its text, kept with checkpoints."""

import shutil

import pytest

from megatron.checkpoints.manifest import write_record
from megatron.checkpoints.read import read_meta
from megatron.config import load
from megatron.errors import UserError
from megatron.positions import ALIASES, FILES, REGISTRY, load_file, syntax_fingerprint
from tests.config.small import faults, loaded, write

pytestmark = pytest.mark.usefixtures("own_registry")

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
def mine(tmp_path):
    return write(tmp_path / "mine.py", CODE)


@pytest.fixture
def checkpoint(mine, tmp_path):
    """What training leaves of a configuration, for a process that has loaded nothing yet."""
    folder = tmp_path / "run/global_step1"
    config = loaded(f"pos_emb_file={mine}", "pos_emb=flat")
    folder.mkdir(parents=True)
    config.save(folder / "config.yml")
    write_record(folder, {"step": 1, "config_hash": config.hash, "vocab": 128, "files": {}})
    forget(mine)
    return folder


def forget(mine):
    REGISTRY.pop("flat")
    ALIASES.pop("level")
    FILES.clear()
    mine.with_name("ran").unlink()


def test_a_file_is_run_once_and_its_encoding_has_options_messages_and_aliases(mine, tmp_path):
    for _ in range(2):
        config = loaded(f"pos-emb-file={mine}", "pos_emb=flat", "pos_emb_args.height=2")
    assert config.position.pos_emb_args == {"height": 2}
    assert mine.with_name("ran").read_text() == "x"
    first = write(tmp_path / "one.yml", f"pos_emb_file: {mine}\nhidden_size: 96\nnum_layers: 2\n")
    words = ["num_attention_heads=12", "seq_length=64", "pos_emb=level"]
    assert load([first], words).position.pos_emb == "flat"
    (line,) = faults("pos_emb=flat", "pos_emb_args.heit=2")
    assert "flat: takes no option 'heit'; did you mean height?" in line
    mine.write_text(CODE + "edited = True\n")
    (line,) = faults(f"pos_emb_file={mine}")
    assert "the name 'flat' is taken by another encoding" in line


def test_the_code_counts_for_the_hash_and_its_comments_and_place_do_not(mine, tmp_path):
    first = loaded("pos_emb=flat", f"pos_emb_file={mine}")
    moved = shutil.copy(mine, write(tmp_path / "elsewhere/renamed.py", ""))
    assert loaded("pos_emb=flat", f"pos_emb_file={moved}").hash == first.hash
    words = CODE.replace("height'''", "how high'''").replace("):\n", "):  # why\n\n")
    moved = write(tmp_path / "commented.py", words)
    assert loaded("pos_emb=flat", f"pos_emb_file={moved}").hash == first.hash
    assert first.hash == "92508211f009"
    assert (
        loaded("pos_emb=flat").hash != first.hash
    )  # known by now, but nobody could say from where
    forget(mine)
    formatted = syntax_fingerprint("print(f'{name:>{width}}')")  # 3.12 adds a part
    assert formatted[:12] == "f5fcda1f8fb2"
    assert syntax_fingerprint("a = 'b, c'") != syntax_fingerprint("a = 'bc'")
    edited = write(tmp_path / "edited.py", CODE + "another = 'text'\n")
    assert loaded("pos_emb=flat", f"pos_emb_file={edited}").hash != first.hash


def test_what_is_wrong_with_a_file_is_one_message_and_registers_nothing(tmp_path):
    """tests/bad_inputs has other files."""
    encodings = dict(REGISTRY)
    path = write(tmp_path / "mine.py", f"{CODE}\n\n{CODE.replace('flat', 'alibi')}")
    (line,) = faults(f"pos_emb_file={path}")
    assert "Flat: the name 'alibi' is taken by another encoding; choose another" in line
    assert encodings == REGISTRY
    path.write_text("raise KeyboardInterrupt\n")  # no fault of the file
    with pytest.raises(KeyboardInterrupt):
        load_file(path)


def test_code_in_a_checkpoint_is_never_run_unasked(checkpoint, mine, tmp_path):
    copy, settings = checkpoint / "pos_emb_file.py", checkpoint / "config.yml"
    assert copy.read_text() == CODE
    for path in (mine, copy):  # a config.yml from somebody else may name any path
        settings.write_text(settings.read_text().replace(str(mine), str(path)))
        for read in (lambda: read_meta(checkpoint), lambda: load([settings])):
            with pytest.raises(UserError) as raised:
                read()
            assert (
                f"{copy} defines this checkpoint's encoding, but code inside a checkpoint"
                f" never runs without your consent: read it, then write pos_emb_file={copy} on the"
                " command line"
            ) in str(raised.value)
    assert not list(tmp_path.rglob("ran"))
    load_file(copy)  # asked
    assert read_meta(checkpoint)[0].position.pos_emb == "flat"


def test_a_checkpoint_takes_the_same_text_from_anywhere_and_no_other(checkpoint, mine, tmp_path):
    mine.write_text(CODE + "edited = True\n")
    load_file(mine)
    with pytest.raises(UserError, match="defines this checkpoint's encoding"):
        read_meta(checkpoint)
    forget(mine)
    load_file(write(tmp_path / "another/place.py", CODE + "# not the code\n"))
    config, _ = read_meta(checkpoint)
    assert config.pos_emb_code == CODE
    (checkpoint / "pos_emb_file.py").unlink()
    with pytest.raises(UserError, match=r"pos_emb_file.py is missing or is not text; copy the"):
        read_meta(checkpoint)


def test_a_copy_that_was_edited_is_another_model_even_where_the_user_has_it_run(checkpoint):
    edited = CODE.replace("0 * distance", "1 * distance")
    load_file(write(checkpoint / "pos_emb_file.py", edited))
    message = r"config.yml with pos_emb_file.py: its hash is .* it was edited after training"
    with pytest.raises(UserError, match=message):
        read_meta(checkpoint)
