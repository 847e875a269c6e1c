"""The one exception for mistakes that a user can correct.

Its message says what was given, what was needed, where, and what to do. The command line prints
it without a traceback and exits with status 2; any other exception is a defect of oper.
"""


class OperError(Exception):
    """Bad input, an impossible request, or a failure of the machine such as a full disk."""


class OperWarning(UserWarning):
    """What a user should know of an input that is read all the same; the command line prints it."""
