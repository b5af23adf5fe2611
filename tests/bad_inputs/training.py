"""Training that cannot start: folders, logging, signals and the optimizer."""

from pathlib import Path

from tests.bad_inputs.case import TRAIN, Case


def link_in_the_place_of_the_lock(here: Path) -> None:
    (here / "precious").write_text("text")
    (here / "run").mkdir()
    (here / "run" / ".owner").symlink_to(here / "precious")


CASES: list[Case] = [
    Case(
        "save-names-a-file",
        [*TRAIN, "save=run/deep"],
        "save: run/deep cannot be made (Not a directory) - choose another folder",
        files={"run": "a file"},
    ),
    Case(
        "log-dir-names-a-file",
        [*TRAIN, "log_dir=logs"],
        "log_dir: logs cannot be made (File exists) - choose another folder",
        files={"logs": "a file"},
    ),
    Case(
        "link-in-the-place-of-the-lock",
        TRAIN,
        "save: run cannot be written (Too many levels of symbolic links) - choose another folder",
        prepare=link_in_the_place_of_the_lock,
    ),
    Case(
        "wandb-password",
        [*TRAIN, "use_wandb=true", "wandb_host=https://me:secret@wandb.example"],
        "bad configuration (command line)\n"
        "  wandb_host: holds a name or password, which every checkpoint would keep;"
        " write the address alone, and give the key in WANDB_API_KEY",
    ),
]
