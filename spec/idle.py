"""Values listed in a plan or a grid that nothing made of it can have: they would change nothing."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pydantic import ValidationError

from spec.errors import UserError
from spec.files import first_problem

# fields as the file names them, such as `tp.0`, and what raises where their values do not combine
Combined = tuple[Collection[str], Callable[[], object]]


def listed(name: str, values: Sequence[object]) -> dict[str, object]:
    """The values of a list in a file, by their places as pydantic names them."""
    return {f"{name}.{place}": value for place, value in enumerate(values)}


def refuse_idle(where: str, values: Mapping[str, object], combined: Iterable[Combined]) -> None:
    """Raise UserError on the first of these values that is in no combination that can be.

    With the reason against the first combination that has it.
    """
    idle = dict.fromkeys(values, "")
    for names, check in combined:
        if not idle:
            return
        left = [name for name in names if name in idle]
        if not left:
            continue
        try:
            check()
        except (UserError, ValidationError) as error:
            why = str(error) if isinstance(error, UserError) else first_problem(error)
            idle |= {name: idle[name] or why for name in left}
        else:
            idle = {name: why for name, why in idle.items() if name not in left}
    for name, why in idle.items():
        why = f": {why}" if why else "; leave it out"
        raise UserError(f"{where}: {name} is {values[name]}, which no step of it can have{why}")
