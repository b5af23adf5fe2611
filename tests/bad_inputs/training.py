"""Training that cannot start: folders, logging, signals and the optimizer."""

from pathlib import Path

from tests.bad_inputs.case import TRAIN, Case


def link_in_the_place_of_the_lock(here: Path) -> None:
    (here / "precious").write_text("text")
    (here / "run").mkdir()
    (here / "run" / ".owner").symlink_to(here / "precious")


def of_word(word: str, line: str) -> Case:
    """A training with one more word; line: the fault."""
    return Case(word, [*TRAIN, word], f"bad configuration (command line)\n  {line}")


CASES: list[Case] = [
    of_word("exit_interval=-1", "exit_interval: must be >= 0, got -1"),
    of_word("extra_save_iters=[5,-1]", "extra_save_iters: must be >= 0, got -1"),
    of_word("checkpoint_scale=exp", "checkpoint_scale: must be linear or log, got 'exp'"),
    of_word(
        "checkpoint_scale=log",
        "checkpoint_scale: log saves at the powers of save_interval = 0;"
        " set save_interval to 2 or more",
    ),
    Case(
        "tokenizer-of-other-data",
        [*TRAIN, "tokenizer_type=GPT2BPETokenizer"],
        "tokenizer_type: GPT2BPETokenizer is not what {corpus} was written by, CharLevelTokenizer"
        " - leave tokenizer_type out, or give the data that it wrote",
    ),
    Case(
        "save-names-a-file",
        [*TRAIN, "save=run/deep"],
        "save: run/deep: cannot be written (Not a directory)"
        " - a part of this path is a file: choose another place",
        files={"run": "a file"},
    ),
    Case(
        "link-in-the-place-of-the-lock",
        TRAIN,
        "save: run: cannot be written (Too many levels of symbolic links) - choose another place",
        prepare=link_in_the_place_of_the_lock,
    ),
    Case(
        "tensorboard-names-a-file",
        [*TRAIN, "tensorboard_dir=events"],
        "tensorboard_dir: events: cannot be written (File exists)"
        " - it is in the way: move it, or choose another place",
        files={"events": "a file"},
    ),
    Case(
        "wandb-password",
        [*TRAIN, "use_wandb=true", "wandb_host=https://me:secret@wandb.example"],
        "bad configuration (command line)\n"
        "  wandb_host: holds a name or password, which every checkpoint would keep;"
        " write the address alone, and give the key in WANDB_API_KEY",
    ),
]
