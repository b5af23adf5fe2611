"""What several processes write together has one owner, the first of them.

A fault that one process alone meets ends all of them: the others would wait for it for ever.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from megatron.errors import UserError, cannot_write
from megatron.parallel.grid import Grid


@contextmanager
def shared_faults(grid: Grid) -> Iterator[None]:
    """A block of which a fault on any rank is raised on all; every rank calls this.

    UserError with the message of the first rank that has one. An OSError becomes one too.
    """
    message = None
    try:
        yield
    except UserError as fault:
        message = str(fault)
    except OSError as fault:
        message = str(cannot_write(fault.filename or "a file of this run", fault))
    for one in grid.gather(message):
        if one is not None:
            raise UserError(one)


@contextmanager
def owned_by_first(grid: Grid, *places: AbstractContextManager[None]) -> Iterator[None]:
    """The first rank owns some places until the block ends; every rank calls this.

    places: of `owned_folder` and `owned_file`
    UserError on every rank where the first cannot own one.
    """
    with ExitStack() as stack:
        with shared_faults(grid):
            if grid.first:
                for place in places:
                    stack.enter_context(place)
        yield
