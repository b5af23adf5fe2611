"""The error that a user can cause and mend."""


class UserError(ValueError):
    """A fault in what the user gave: entries print it as one message, without a traceback, and exit with status 1.

    The text says where, what, and how to fix it.
    """
