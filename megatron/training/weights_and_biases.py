"""A run of Weights & Biases: optional, in a thread of its own, and never a reason to wait.

Where its server cannot be used, the records are kept beside the run for `wandb sync`.
"""

import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.schema import Logging
from megatron.errors import in_words
from megatron.network import is_reachable
from megatron.training.records import Record

logger = logging.getLogger(__name__)

NAME = "use_wandb"
STARTS = 15  # seconds in which its server must answer
ENDS = 30  # seconds for what is still to be sent at the end
PATIENCE = 75.0  # seconds for all of it, also where its own limits fail
ARTIFACT = re.compile(r"[^\w.-]+")  # what the name of an artifact may not have
PROCESS_SETTINGS = {"silent": True, "console": "off"}
"""silent: it asks no terminal for a key; console: a stuck service must not block log lines."""


@dataclass(frozen=True)
class Attachment:
    """What is sent at the end of a run.

    name: of the artifact; kind: its type; step: where tables and pictures stand
    files: those that exist are in it
    tables: rows by name, each a mapping with the same keys; pictures: .png files by name
    """

    name: str
    kind: str
    step: int
    files: Sequence[Path] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    pictures: Mapping[str, Path] = field(default_factory=dict)


class Wandb:
    """A run of Weights & Biases; kept on this machine where its server cannot be reached.

    Records have an axis of their own, `step`: a resumed run sends those after its checkpoint again,
    and W&B's own counter would drop them.

    settings: the section `logging`; config: all keys; folder: where its files go, None: here
    run_id: see `new_id`; is_continued: whether a run of this id exists
    attached: what is sent at the end
    Raises ModuleNotFoundError without the package, and what its start on a disk may raise.
    """

    def __init__(
        self,
        settings: Logging,
        config: dict[str, Any],
        folder: Path | None,
        run_id: str,
        *,
        is_continued: bool = False,
        attached: Callable[[], Attachment | None] = lambda: None,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("the package wandb is not installed: pip install wandb")
        # Its reports of faults go to the same server, and a process waits for them at its end.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # slow to import

        self.wandb, self.attached = wandb, attached
        self.arguments = {
            "project": settings.wandb_project,
            "entity": settings.wandb_team,
            "group": settings.wandb_group,
            "config": config,
            "dir": folder,
            "id": run_id,
        }
        self.host, self.folder = settings.wandb_host, folder
        self.run = self._started(is_continued)
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Send every number, and a histogram of every parameter of the encoding."""
        values: dict[str, Any] = {"step": record.step, **record.scalars()}
        for name, numbers in record.finite_values().items():
            values[name] = self.wandb.Histogram(numbers.tolist())
        self.run.log(values)

    def close(self) -> None:
        """Send what is attached, and wait ENDS seconds for what was not sent yet."""
        try:
            self._attach_all()
            self.run.finish()
        except TimeoutError:
            logger.warning(
                f"{NAME}: not all was sent within {ENDS} seconds - `wandb sync"
                f" {self.run.settings.sync_dir}` sends it later"
            )
        finally:
            self.wandb.teardown()  # else it is tried at the end of the process, with a traceback

    def _started(self, is_continued: bool) -> Any:
        settings = self._set_up()
        if settings.mode != "online":  # WANDB_MODE, or `wandb offline`
            return self._init()
        address = self.host or settings.base_url
        try:
            if not is_reachable(address):
                raise ConnectionError(f"{address} cannot be reached")
            run = self._init(resume="allow" if is_continued else None)
            logger.info(f"{NAME}: {run.url}")
        except Exception as fault:  # no network, no key, no rights, an answer that it cannot read
            place = "wandb" if self.folder is None else self.folder / "wandb"
            logger.warning(
                f"{NAME}: the server cannot be used ({in_words(fault)}) - the run goes on;"
                f" the records are kept in {place}, and `wandb sync` sends them later"
            )
            self.wandb.teardown()  # its service still has a run of this id
            self._set_up()
            run = self._init(mode="offline")
        return run

    def _set_up(self) -> Any:
        return self.wandb.setup(self.wandb.Settings(**PROCESS_SETTINGS)).settings

    def _init(self, **how: Any) -> Any:
        limits = self.wandb.Settings(
            init_timeout=STARTS,
            finish_timeout=ENDS,
            finish_timeout_raises=True,
            **PROCESS_SETTINGS,
        )
        if self.host:
            with suppress(ValueError) if how.get("mode") == "offline" else nullcontext():
                limits.base_url = self.host
        return self.wandb.init(**self.arguments, settings=limits, **how)

    def _attach_all(self) -> None:
        try:
            attachment = self.attached()
            if attachment is not None:
                self._attach(attachment)
        except Exception as fault:  # a file that cannot be read, or what a library may raise
            logger.warning(f"{NAME}: its files are not sent ({in_words(fault)})")

    def _attach(self, attachment: Attachment) -> None:
        wandb = self.wandb
        artifact = wandb.Artifact(ARTIFACT.sub("_", attachment.name), type=attachment.kind)
        for path in attachment.files:
            if path.is_file():
                artifact.add_file(str(path))
        shown: dict[str, Any] = {}
        for name, rows in attachment.tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            table = wandb.Table(columns=columns, allow_mixed_types=True)
            for row in rows:
                table.add_data(*(row.get(column) for column in columns))
            artifact.add(table, ARTIFACT.sub("_", name))
            shown[name] = table
        for name, path in attachment.pictures.items():
            shown[name] = wandb.Image(str(path))
        if shown:
            self.run.log({"step": attachment.step, **shown})
        self.run.log_artifact(artifact)


def new_id() -> str:
    """The id of a new run, which its checkpoints keep."""
    return secrets.token_hex(4)
