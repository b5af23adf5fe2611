"""What every encoding must keep: checks of ours and of anybody's, for commands and tests."""

from megatron.conformance.anybody import check

__all__ = ["check"]
