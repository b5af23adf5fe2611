"""Write a checkpoint: the files that evaluation reads, the record, and the name of the newest."""

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
    """Size and SHA-256 of each file, which is on the disk then."""
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
    """A checkpoint: to be evaluated, to start a fine-tuning from, or with `optimizer` to resume.

    It is written as partial_step{step} and renamed to global_step{step}; then `latest` names it.

    weights: of the whole model by our names, float32, on the CPU
    facts: `vocab`, the rows of the embedding, `tokenizer`, and what else the record shall say
    optimizer: its state, as in `full_state`
    Returns its folder. Raises UserError if the disk refuses it; then nothing of it is left.
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
            f"{partial} cannot be written ({in_words(fault)}) - make room or save elsewhere"
        ) from None
