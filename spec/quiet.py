"""Ctrl-C while a command still imports: a word and status 130, as `spec.command.run` does later."""

import sys
from types import TracebackType


def quiet_interrupt() -> None:
    """Called by the packages that hold commands; nothing unless `python -m` is starting one."""
    if sys.argv[:1] == ["-m"]:  # what argv[0] is until the module that was named runs
        sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)
