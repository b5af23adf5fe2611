"""How far a measurement is, on the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.evaluation.perplexity import Advance


@contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Advance]:
    """A bar for each length of `what` on stderr, as `measured(advance=...)` tells it; only on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not (shown and console.is_terminal), transient=True
    ) as bars:
        tasks = {}

        def advance(length: int, done: int, windows: int) -> None:
            if length not in tasks:
                tasks[length] = bars.add_task(f"{what} {length}", total=windows)
            bars.update(tasks[length], completed=done)

        yield advance
