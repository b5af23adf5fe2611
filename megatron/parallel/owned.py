"""What several processes write together has one owner, the first of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from megatron.errors import UserError
from megatron.parallel.grid import Grid


@contextmanager
def owned_by_first(grid: Grid, *places: AbstractContextManager[None]) -> Iterator[None]:
    """The first rank owns some places until the block ends; every rank calls this.

    places: of `owned_folder` and `owned_file`
    UserError on every rank where the first cannot own one.
    """
    with ExitStack() as stack:
        fault = None
        if grid.first:
            try:
                for place in places:
                    stack.enter_context(place)
            except UserError as error:
                fault = str(error)
        fault = grid.gather(fault)[0]
        if fault is not None:
            raise UserError(fault)
        yield
