"""Checkpoints: float32 weights and the configuration for everybody, the engine's own state for resuming.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the merged configuration
                    pos_emb_file.py         the user's own encoding, if there is one: text, never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, code's commit
                    mp_rank_*, *zero_*      DeepSpeed's engine state
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
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
from megatron.model import GPT, from_config
from megatron.training.trainer import Trainer

logger = logging.getLogger(__name__)

FOLDER = re.compile(r"global_step(\d+)")
ENGINE_STATE = "*_states.pt"  # DeepSpeed's files in a checkpoint, for resuming alone


def save(trainer: Trainer, folder: Path, facts: dict[str, Any]) -> Path:
    """Write SAVE/global_step{step} beside and rename it, then point `latest` at it. Every rank calls this.

    facts: what checkpoint.json says beyond step, hash and commit
    """
    step, grid, engine = trainer.step, trainer.grid, trainer.engine
    final, partial = folder / f"global_step{step}", folder / f"partial_step{step}"
    if grid.first:
        for leftover in [*folder.glob("partial_step*"), *folder.glob("removing_*")]:
            shutil.rmtree(leftover)
    grid.wait()
    engine.save_checkpoint(str(folder), tag=partial.name, save_latest=False)
    weights = full_weights(engine, keep=grid.first)
    if grid.first:
        save_file(weights, partial / "model.safetensors")
        (partial / "model.safetensors").chmod(
            0o666 & ~_umask()
        )  # the library makes it the owner's alone
        trainer.config.save(partial / "config.yml")
        record = {"step": step, "config_hash": trainer.config.hash, "commit": commit(), **facts}
        (partial / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n")
        for path in partial.rglob("*"):
            _sync(path)
        _remove(final)
        partial.rename(final)
        _write(folder / "latest", final.name)
    grid.wait()
    return final


def resume(trainer: Trainer, path: Path) -> None:
    """Load the engine's state of a folder global_stepN, without running any code that its pickles may name."""
    if not any(path.glob(ENGINE_STATE)):
        raise UserError(
            f"{path}: holds weights only, training cannot continue from it - a sweep removes the "
            "optimizer's states of a finished run: train anew, or sweep with --keep-states"
        )
    with _data_only():
        found, _ = trainer.engine.load_checkpoint(str(path.parent), tag=path.name)
    if found is None:
        raise UserError(f"{path}: no engine state there - only evaluation can use this checkpoint")
    trainer.step = int(path.name.removeprefix("global_step"))
    trainer.restore_exact_positions()


def keep_last(folder: Path, step: int, count: int | None) -> None:
    """Delete checkpoints before `step`, the one just written, but for the newest count - 1 (None: keep all)."""
    earlier = [other for other in steps_in(folder) if other < step]
    for doomed in earlier[: max(0, len(earlier) + 1 - count)] if count else []:
        _remove(folder / f"global_step{doomed}")


def keep_weights_only(folder: Path) -> None:
    """Delete the engine's state of every checkpoint in a run's folder; evaluation needs none."""
    for path in folder.glob(f"global_step*/{ENGINE_STATE}"):
        path.unlink()


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, ascending."""
    found = (
        FOLDER.fullmatch(path.parent.name) for path in folder.glob("global_step*/checkpoint.json")
    )
    return sorted(int(match[1]) for match in found if match)


def latest_step(folder: Path) -> int | None:
    """The step that `latest` names, or the newest one; None where there is no checkpoint."""
    steps = steps_in(folder)
    pointer = folder / "latest"
    named = FOLDER.fullmatch(pointer.read_text().strip()) if pointer.exists() else None
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
            f"checkpoint: no folder {folder} - train first, or set load to the folder that training saved to"
        )
    found = step if step is not None else latest_step(folder)
    if found is None or found not in steps_in(folder):
        have = ", ".join(map(str, steps_in(folder))) or "none"
        wanted = (
            "global_stepN/checkpoint.json" if step is None else f"global_step{step}/checkpoint.json"
        )
        raise UserError(
            f"checkpoint: looked for {wanted} in {folder}, steps there: {have} - check load and the step"
        )
    return folder / f"global_step{found}"


def read_meta(path: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration and checkpoint.json of a folder global_stepN; UserError where they are damaged or disagree."""
    try:
        meta = json.loads((path / "checkpoint.json").read_text())
        step, config_hash, vocab = meta["step"], meta["config_hash"], meta["vocab"]
    except (OSError, ValueError, KeyError) as fault:
        raise UserError(
            f"{path}/checkpoint.json: not readable ({fault!r}) - copy the checkpoint again"
        ) from None
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
    """The trained model in float32 and eval mode, its own configuration, and checkpoint.json with `path` added.

    UserError where there is no checkpoint or it does not hold the model that its configuration describes.
    """
    path = find(folder, step)
    config, meta = read_meta(path)
    model = load_model(path, config, meta["vocab"])
    return model, config, {**meta, "path": str(path)}


def load_model(path: Path, config: Config, vocab: int) -> GPT:
    """The model of a configuration with the weights of a folder global_stepN, in eval mode.

    UserError where the weights cannot be read or are those of another model.
    """
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
    """The whole model's weights in float32 on the CPU, from the optimizer's master copy where there is one.

    Every rank calls this: with ZeRO each holds a part. Only those that `keep` them get them.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else None
        if keep:
            weights[name] = (
                (parameter if master is None else master).detach().float().cpu().contiguous()
            )
    return weights


@contextmanager
def _data_only() -> Iterator[None]:
    """DeepSpeed reads its files with full unpickling; inside this block torch refuses all but plain data and the few
    classes that DeepSpeed itself stores."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(
            [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
        ):
            yield
    finally:
        os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        if before is not None:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def _remove(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a half deleted one is never taken for whole."""
    if path.exists():
        doomed = path.with_name(f"removing_{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".partial")
    fresh.write_text(text)
    _sync(fresh)
    fresh.replace(path)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    """Wait until a file is on the disk: a rename must not overtake what it names."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
