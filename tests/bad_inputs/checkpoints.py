"""Damaged, foreign and missing checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoints.manifest import entry_of, read_record, write_record
from megatron.checkpoints.saved import keep_weights_only
from tests.bad_inputs.case import MODEL, Case

Prepare = Callable[[Path], None]

TRAIN = ["train.py", *MODEL, "train_iters=6", "eval_interval=0", "data_path={corpus}"]
RESUME = [*TRAIN, "save=copy", "load=copy"]
EVALUATE = ["evaluate.py", "--checkpoint", "copy"]
INSPECT = ["tools/inspect_checkpoint.py"]
STEP = "copy/global_step4"
STATE = "mp_rank_00_model_states.pt"
ALONE = " - no other checkpoint of the run is good: copy it again"
CHANGED = "was changed after it was written"
NEEDED = {"step": 4, "config_hash": "0123456789ab", "vocab": 512}


def flip(name: str) -> Prepare:
    """One bit of a file's last byte but one."""

    def prepare(here: Path) -> None:
        file = here / STEP / name
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)

    return prepare


def delete(*names: str) -> Prepare:
    return lambda here: [(here / name).unlink() for name in names] and None


def record_is(content: str | bytes | dict) -> Prepare:
    """A checkpoint.json with this content; a dictionary is laid over what every record needs."""

    def prepare(here: Path) -> None:
        file = here / STEP / "checkpoint.json"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            is_text = isinstance(content, str)
            file.write_text(content if is_text else json.dumps(NEEDED | content))

    return prepare


def without_sums(*then: Prepare) -> Prepare:
    """An old checkpoint, and what else was done to it."""

    def prepare(here: Path) -> None:
        record = read_record(here / STEP)
        del record["files"], record["sha256"]
        (here / STEP / "checkpoint.json").write_text(json.dumps(record))
        for more in then:
            more(here)

    return prepare


def surplus(here: Path) -> None:
    shutil.copy(here / STEP / STATE, here / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


def renamed(here: Path) -> None:
    (here / STEP).rename(here / "copy/global_step9")
    (here / "copy/latest").write_text("global_step9")


def hostile(here: Path) -> None:
    """A pickle that calls a function, in a checkpoint with the sums of whoever wrote it."""
    state = here / STEP / STATE
    torch.save({"module": Path.touch}, state)
    record = read_record(here / STEP)
    record["files"][STATE] = entry_of(state)
    write_record(here / STEP, record)


def write(name: str, content: bytes) -> Prepare:
    def prepare(here: Path) -> None:
        (here / STEP / name).write_bytes(content)

    return prepare


def case(name: str, words: list[str], message: str, prepare: Prepare | None = None) -> Case:
    return Case(name, words, message, prepare=prepare, copies_run=True)


def damaged(name: str, fault: str, prepare: Prepare) -> list[Case]:
    """The same damage met by a resume and by an evaluation."""
    message = f"{STEP}/{fault}{ALONE}"
    return [
        case(f"resume-{name}", RESUME, message, prepare),
        case(f"evaluate-{name}", EVALUATE, message, prepare),
    ]


RECORDS: dict[str, tuple[str | bytes | dict, str]] = {
    "empty": ("", "not readable (Expecting value: line 1 column 1 (char 0))"),
    "step-is-text": ({"step": "4"}, "step is '4', which cannot be"),
    "another-step": ({"step": 5}, "is the one of step 5"),
    "negative-vocabulary": ({"vocab": -1}, "vocab is -1, which cannot be"),
    "losses-are-nan": (
        {"pending_losses": [float("nan")]},
        "pending_losses is [nan], which cannot be",
    ),
    "files-are-a-list": ({"files": []}, CHANGED),
}

CASES: list[Case] = [
    *(
        one
        for name, (content, fault) in RECORDS.items()
        for one in damaged(f"record-{name}", f"checkpoint.json: {fault}", record_is(content))
    ),
    *(
        one
        for name in ("config.yml", "model.safetensors", "checkpoint.json")
        for one in damaged(f"{name}-deleted", f"{name}: is missing", delete(f"{STEP}/{name}"))
    ),
    *(
        one
        for name in ("config.yml", "model.safetensors")
        for one in damaged(f"{name}-flipped", f"{name}: {CHANGED}", flip(name))
    ),
    case("resume-state-flipped", RESUME, f"{STEP}/{STATE}: {CHANGED}{ALONE}", flip(STATE)),
    case(
        "resume-state-deleted",
        RESUME,
        f"{STEP}/{STATE}: is missing{ALONE}",
        delete(f"{STEP}/{STATE}"),
    ),
    case(
        "resume-state-of-two-ranks",
        RESUME,
        f"{STEP}/zero_pp_rank_1_mp_rank_00_optim_states.pt: is not of this checkpoint{ALONE}",
        surplus,
    ),
    case(
        "resume-no-record-and-no-latest",
        RESUME,
        f"{STEP}/checkpoint.json: is missing{ALONE}",
        delete(f"{STEP}/checkpoint.json", "copy/latest"),
    ),
    case(
        "resume-renamed",
        RESUME,
        f"copy/global_step9/checkpoint.json: is the one of step 4{ALONE}",
        renamed,
    ),
    case(
        "resume-weights-only",
        RESUME,
        f"{STEP}: holds weights only, training cannot continue from it - finetune=true"
        " starts a new run from them, no_load_optim=true goes on with a fresh optimizer; a sweep"
        " keeps the optimizer's states with --keep-states",
        lambda here: keep_weights_only(here / "copy"),
    ),
    case(
        "evaluate-old-weights-garbage",
        EVALUATE,
        f"{STEP}/model.safetensors: cannot be read (Error while deserializing header: header too"
        f" small){ALONE}",
        without_sums(write("model.safetensors", b"x")),
    ),
    case(
        "resume-old-weights-deleted",
        RESUME,
        f"{STEP}/model.safetensors: is missing{ALONE}",
        without_sums(delete(f"{STEP}/model.safetensors")),
    ),
    case(
        "train-over-a-damaged-run",
        [*TRAIN, "save=copy"],
        "save: copy holds a checkpoint of step 4 already - set load: copy to continue it, or save"
        " elsewhere",
        delete(f"{STEP}/checkpoint.json", "copy/latest"),
    ),
    case(
        "evaluate-absent-step",
        [*EVALUATE, "--step", "9"],
        "checkpoint: looked for global_step9/checkpoint.json in copy, steps there: 4 - check load"
        " and the step",
    ),
    case(
        "evaluate-a-checkpoint-and-another-step",
        ["evaluate.py", "--checkpoint", STEP, "--step", "7"],
        f"checkpoint: {STEP} is the one of step 4, not of step 7 - name the run's folder, or leave"
        " the step out",
    ),
    case(
        "load-is-not-there",
        [*TRAIN, "save=run", "load=gone"],
        "checkpoint: no folder gone - train first, or set load to the folder that training saved"
        " to",
    ),
    case(
        "load-is-empty",
        [*TRAIN, "save=run", "load=empty"],
        "checkpoint: looked for global_stepN/checkpoint.json in empty, steps there: none - check"
        " load and the step",
        lambda here: (here / "empty").mkdir(),
    ),
]
