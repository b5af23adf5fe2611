"""How long the fuzz targets run: a few seconds each, or as long as FUZZ_EXAMPLES says."""

import contextlib
import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings

from megatron.errors import UserError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
SECONDS = 10  # that one input may take

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=SECONDS * 1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def works_or_says_why(action: Callable[[], object]) -> None:
    """An input either works or ends in one message; anything else is the test's failure."""
    with contextlib.suppress(UserError):
        action()
