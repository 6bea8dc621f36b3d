"""Stand-ins for the vendors' C libraries, under the vendors' own Python packages.

The installed pynvml and amdsmi run as they are: their signatures, enums, structures, error classes
and conversions are the real ones. Only the C functions that they call are answered here.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# what a C function answers: fields of the structure it fills, values of its pointers in their
# order, a function of its arguments (which returns a status or nothing), or an error's status
Answer = dict[str, Any] | list[Any] | Callable[..., int | None] | int


class Function:
    """One C function; packages set its types as they would of a real one's."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.argtypes: Any = None
        self.restype: Any = None
        self.calls = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        if callable(self._answer):
            return self._answer(*arguments) or 0
        if isinstance(self._answer, int):
            return self._answer
        targets = [one._obj for one in arguments if hasattr(one, "_obj")]  # byref's
        if isinstance(self._answer, dict):
            for name, value in self._answer.items():
                getattr(targets[-1], name)  # a structure accepts any attribute: only its own fields
                setattr(targets[-1], name, value)
        else:
            for target, value in zip(targets, self._answer, strict=True):
                target.value = value
        return 0


class Library:
    """A C library: its functions by name, and what one that is not named does."""

    def __init__(self, answers: dict[str, Answer], otherwise: int | None = None) -> None:
        self.functions = {name: Function(answer) for name, answer in answers.items()}
        self._otherwise = otherwise

    def __getattr__(self, name: str) -> Function:
        if name in self.functions:
            return self.functions[name]
        if self._otherwise is None:
            raise AttributeError(name)
        return Function(self._otherwise)


AMD_NOT_SUPPORTED = 2  # AMDSMI_STATUS_NOT_SUPPORTED


@contextmanager
def amdsmi_over(answers: dict[str, Answer]) -> Iterator[Any]:
    """The installed amdsmi package, imported over a library with one GPU and these answers."""

    def one(*arguments: Any) -> None:
        *_, count, handles = arguments
        count._obj.value = 1
        if handles:
            handles[0] = 1

    found = {"amdsmi_get_socket_handles": one, "amdsmi_get_processor_handles": one}
    quiet: dict[str, Answer] = {"amdsmi_init": [], "amdsmi_shut_down": []}
    library = Library(quiet | found | answers, AMD_NOT_SUPPORTED)
    real = ctypes.CDLL
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_amdsmi(name)}

    def load(name: Any, *rest: Any, **more: Any) -> Any:
        return library if "libamd_smi" in str(name) else real(name, *rest, **more)

    try:
        ctypes.CDLL = load  # type: ignore[misc, assignment]
        import amdsmi

        yield amdsmi
    finally:
        ctypes.CDLL = real  # type: ignore[misc]
        for name in [one for one in sys.modules if _is_amdsmi(one)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_amdsmi(name: str) -> bool:
    return name.partition(".")[0] == "amdsmi"
