"""The commands: each module parses its options and calls the package."""

import sys
from types import TracebackType


def _end_quietly_after_ctrl_c(
    kind: type[BaseException], fault: BaseException, traceback: TracebackType | None
) -> None:
    """Print no traceback of ctrl-C; Python still ends with the signal's status."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, fault, traceback)


# Packages load for seconds before a command can guard itself (megatron/cli_errors.py).
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly_after_ctrl_c
