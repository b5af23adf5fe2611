"""The folders that a run writes, each with one owner at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from megatron.checkpoints.saved import remove_unfinished
from megatron.config import Config
from megatron.folder_lock import owned_folder
from megatron.training.metric_logs import checked_logs


def folders_of(config: Config) -> list[AbstractContextManager[None]]:
    """`save`, and `log_dir` where that is another folder: entered, they are owned.

    The folder of tensorboard, which several runs may share, is only tried.
    """
    save, log_dir = config.checkpoint.save, config.logging.log_dir
    folders: list[AbstractContextManager[None]] = []
    if save:
        folders.append(_folder_of_checkpoints(Path(save)))
    if log_dir and not (save and _same(save, log_dir)):
        folders.append(owned_folder(Path(log_dir), "log_dir"))
    folders.append(checked_logs(config.logging))
    return folders


@contextmanager
def _folder_of_checkpoints(folder: Path) -> Iterator[None]:
    with owned_folder(folder, "save"):
        remove_unfinished(folder)
        yield


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
