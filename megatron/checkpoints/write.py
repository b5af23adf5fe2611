"""Write a checkpoint: the files for evaluation, the record, and the name of the newest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoints.manifest import (
    OPTIMIZER,
    SETTINGS,
    WEIGHTS,
    Entries,
    entry_of,
    write_record,
)
from megatron.checkpoints.saved import folder_of, remove_checkpoint
from megatron.commit import commit
from megatron.config import Config
from megatron.errors import UserError, in_words
from megatron.files import remove, sync, umask, write_text


def synced(files: list[Path]) -> Entries:
    """Sync each file to disk; its size and SHA-256."""
    for file in files:
        sync(file)
    return {file.name: entry_of(file) for file in files}


def write_checkpoint(
    run: Path,
    step: int,
    weights: dict[str, Tensor],
    config: Config,
    facts: Mapping[str, Any],
    optimizer: dict[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint for evaluation, fine-tuning or, with `optimizer`, resuming.

    It is written as partial_step{step} and renamed to global_step{step}; then `latest` names it.

    weights: of the whole model, by our names, float32, on the CPU
    facts: `vocab` (rows of the embedding), `tokenizer`, and other entries of the record
    optimizer: its state, as in `full_state`
    Returns its folder. Raises UserError if it cannot be written; then nothing of it remains.
    """
    partial, final = run / f"partial_step{step}", folder_of(run, step)
    try:
        remove(partial)
        partial.mkdir(parents=True)
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
            if tensors is not None:
                save_file(tensors, partial / name)
                (partial / name).chmod(0o666 & ~umask())  # safetensors lets only the owner read it
        config.save(partial / SETTINGS)
        record = {"step": step, "config_hash": config.hash, "commit": commit()}
        files = synced(sorted(partial.iterdir()))
        write_record(partial, {**facts, **record, "files": files})
        remove_checkpoint(final)
        partial.rename(final)
        write_text(run / "latest", final.name)
        return final
    except (OSError, SafetensorError) as fault:
        remove(partial)
        raise UserError(
            f"{partial} cannot be written ({in_words(fault)}) - free some space or save elsewhere"
        ) from None
