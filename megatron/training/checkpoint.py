"""Checkpoints: float32 weights and the configuration, and the engine's own state for resuming.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the complete configuration
                    pos_emb_file.py         the text of the user's own encoding; never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, commit
                    mp_rank_*, *zero_*      DeepSpeed's engine state
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.commit import commit
from megatron.config import Config, load
from megatron.errors import UserError
from megatron.files import remove, sync, write_text
from megatron.model import GPT, from_config
from megatron.training.fits import check_weights_fit
from megatron.training.trainer import Trainer
from megatron.training.universal import Engine, restore

logger = logging.getLogger(__name__)

FOLDER = re.compile(r"global_step(\d+)")
NEEDED = ("step", "config_hash", "vocab")  # what every checkpoint.json says
ENGINE_STATE = "*_states.pt"  # DeepSpeed's files in a checkpoint, for resuming alone


def save(trainer: Trainer, folder: Path, facts: dict[str, Any]) -> Path:
    """Write partial_step{step}, rename it to global_step{step}, then point `latest` at it.

    Every rank calls this. facts: entries of checkpoint.json beyond step, hash and commit
    """
    step, grid, engine = trainer.step, trainer.grid, trainer.engine
    final = folder / f"global_step{step}"
    partial = folder / f"partial_step{step}"
    if grid.first:
        remove_unfinished(folder)
    grid.wait()
    engine.save_checkpoint(str(folder), tag=partial.name, save_latest=False)
    weights = full_weights(engine, keep=grid.first)
    if grid.first:
        weights_file = partial / "model.safetensors"
        save_file(weights, weights_file)
        weights_file.chmod(0o666 & ~_umask())  # safetensors lets only the owner read it
        trainer.config.save(partial / "config.yml")
        record = {"step": step, "config_hash": trainer.config.hash, "commit": commit(), **facts}
        (partial / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n")
        for path in partial.rglob("*"):
            if path.is_file():
                sync(path)
        _remove(final)
        partial.rename(final)
        write_text(folder / "latest", final.name)
    grid.wait()
    return final


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left half written or half deleted; for the folder's owner alone."""
    for leftover in [*folder.glob("partial_step*"), *folder.glob("removing_*")]:
        remove(leftover)


def check_engine_state(path: Path) -> None:
    """UserError where a folder global_stepN has weights, but nothing to resume with."""
    if not any(path.glob(ENGINE_STATE)):
        raise UserError(
            f"{path}: holds weights only, training cannot continue from it"
            " - a sweep removes the optimizer's states of a finished run:"
            " train anew, or sweep with --keep-states"
        )


def resume(trainer: Trainer, path: Path, written_by: Engine) -> None:
    """Load the engine's state of a folder global_stepN; code that its pickles name is not run.

    written_by: the engine that wrote it; the state of another one than this is converted
    """
    now = Engine.of(trainer.config, trainer.grid.ranks)
    with _data_only():
        if written_by == now:
            loaded, _ = trainer.engine.load_checkpoint(str(path.parent), tag=path.name)
        else:
            logger.info("%s was written with %s; continuing with %s", path, written_by, now)
            restore(trainer.engine, trainer.config, path, written_by)
            loaded = path
    if loaded is None:
        raise UserError(f"{path}: has no engine state - only evaluation can use this checkpoint")
    trainer.step = int(path.name.removeprefix("global_step"))
    trainer.restore_exact_positions()


def keep_last(folder: Path, step: int, count: int | None, *, kept: Collection[int] = ()) -> None:
    """Keep `count` checkpoints: `step`, the one just written, and the newest before it.

    count: None keeps all; kept: steps whose checkpoints stay and are not counted
    """
    if not count:
        return
    counted = [other for other in steps_in(folder) if other <= step and other not in kept]
    too_many = max(0, len(counted) - count)
    for old in counted[:too_many]:
        _remove(folder / f"global_step{old}")


def keep_weights_only(folder: Path) -> None:
    """Delete the engine's state of every checkpoint in a run's folder; evaluation needs none."""
    for path in folder.glob(f"global_step*/{ENGINE_STATE}"):
        path.unlink()


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, ascending."""
    steps = []
    for path in folder.glob("global_step*/checkpoint.json"):
        match = FOLDER.fullmatch(path.parent.name)
        if match:
            steps.append(int(match[1]))
    return sorted(steps)


def latest_step(folder: Path) -> int | None:
    """The step that `latest` names, or the newest one; None where there is no checkpoint."""
    steps = steps_in(folder)
    pointer = folder / "latest"
    if pointer.exists():
        named = FOLDER.fullmatch(pointer.read_text().strip())
        if named and int(named[1]) in steps:
            return int(named[1])
    return steps[-1] if steps else None


def find(folder: str | Path, step: int | None = None) -> Path:
    """The folder global_stepN that `folder` is or holds; UserError says what was looked for."""
    folder = Path(folder)
    if FOLDER.fullmatch(folder.name) and (folder / "checkpoint.json").exists():
        return folder
    if not folder.is_dir():
        raise UserError(
            f"checkpoint: no folder {folder}"
            " - train first, or set load to the folder that training saved to"
        )
    chosen = latest_step(folder) if step is None else step
    existing = steps_in(folder)
    if chosen is None or chosen not in existing:
        number = "N" if step is None else step
        steps = ", ".join(map(str, existing)) or "none"
        raise UserError(
            f"checkpoint: looked for global_step{number}/checkpoint.json in {folder},"
            f" steps there: {steps} - check load and the step"
        )
    return folder / f"global_step{chosen}"


def read_record(path: Path) -> dict[str, Any]:
    """checkpoint.json of a folder global_stepN; UserError where it is damaged."""
    try:
        record = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        for key in NEEDED:
            if key not in record:
                raise KeyError(key)
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise UserError(
            f"{path}/checkpoint.json: not readable ({fault!r}) - copy the checkpoint again"
        ) from None
    return record


def read_meta(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and checkpoint.json of a folder global_stepN.

    UserError where they are damaged or disagree.
    """
    meta = read_record(path)
    step, config_hash, vocab = meta["step"], meta["config_hash"], meta["vocab"]
    config = load([path / "config.yml"])
    if config.hash != config_hash:
        files = "config.yml" if config.pos_emb_code is None else "config.yml with pos_emb_file.py"
        raise UserError(
            f"{path}/{files}: its hash is {config.hash}, the checkpoint says {config_hash}"
            " - it was edited after training"
        )
    logger.info("%s: step %d, %d rows of vocabulary, config %s", path, step, vocab, config_hash)
    return config, meta


def load_for_evaluation(
    folder: str | Path, step: int | None = None
) -> tuple[GPT, Config, dict[str, Any]]:
    """The trained model in float32 and eval mode, its configuration, and checkpoint.json.

    To the latter `path` is added, the folder global_stepN. UserError where there is no checkpoint,
    or where it does not hold the model that its configuration describes.
    """
    path = find(folder, step)
    config, meta = read_meta(path)
    model = load_model(path, config, meta["vocab"])
    return model, config, {**meta, "path": str(path)}


def load_model(path: Path, config: Config, vocab: int) -> GPT:
    """The model of a configuration with the weights of a folder global_stepN, in eval mode.

    UserError where the weights cannot be read or are those of another model.
    """
    check_weights_fit(config, vocab)
    model = from_config(config, vocab=vocab)
    file = path / "model.safetensors"
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as fault:
        raise UserError(f"{file}: cannot be read ({fault}) - copy the checkpoint again") from None
    try:
        model.load_state_dict(weights)
    except RuntimeError as fault:
        raise UserError(f"{file}: does not hold the model of its config.yml ({fault})") from None
    return model.eval()


def full_weights(engine: Any, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole model's weights in float32 on the CPU, from the optimizer's master copy if any.

    Every rank calls this, as with ZeRO each holds a part; ranks without `keep` get none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else None
        if keep:
            weight = parameter if master is None else master
            weights[name] = weight.detach().float().cpu().contiguous()
    return weights


@contextmanager
def _data_only() -> Iterator[None]:
    """Let torch load plain data alone, and the few classes that DeepSpeed itself stores.

    DeepSpeed otherwise unpickles its files in full, which would run code that they name.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a half deleted one never looks complete."""
    if path.exists():
        renamed = path.with_name(f"removing_{path.name}")
        path.rename(renamed)
        shutil.rmtree(renamed)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
