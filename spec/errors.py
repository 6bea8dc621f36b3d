"""The two ways a command fails, each one sentence long."""


class UserError(Exception):
    """The request was wrong: names the file, the field, the value and what would be right.

    Commands print it without a traceback and exit with 2.
    """


class WorkError(Exception):
    """The request was right but the work failed; commands exit with 1."""
