"""The one exception for mistakes a user can mend.

Its message says what was given, what was needed, where, and what to do. The command line prints
it without a traceback and exits with status 2; anything else that is raised is a defect of ours.
"""


class OperError(Exception):
    """A user's mistake, or the world's: bad input, an impossible request, a full disk."""
