"""How long the fuzz targets run: a few seconds each, or as long as FUZZ_EXAMPLES says."""

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator

from hypothesis import HealthCheck, settings

from megatron.errors import UserError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
SECONDS = 10  # that one input may take

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def works_or_says_why(action: Callable[[], object]) -> None:
    """An input either works in time or ends in one message; anything else fails the test."""
    with in_time(SECONDS), contextlib.suppress(UserError):
        action()


@contextlib.contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds, so that the test names its example.

    Code of a library that never comes back to Python ends the process twice as late, with its stack
    on standard error.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"an input took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
