"""Single rows that are far too short, as no kernel or message can be."""

from collections.abc import Iterable, Sequence

# a value further than this from the next one (a factor) is alone: that may be a row gone wrong
NEAR = 2.0
# of what a model that all rows share says: what takes less is a row gone wrong. Of all measured
# here no kernel takes less than 0.27 (a CPU's cache; GPUs 0.3), no collective inside a node less
# than 0.56, no message between nodes less than 0.18 (hosts of a CPU; GPUs 0.47)
ABSURD = 0.1


def highest(values: Iterable[float]) -> float:
    """The largest of positive values, but the next one where it is alone.

    So no single row decides what others start from. Of three values none tells which is wrong.
    """
    return _not_alone(sorted(values, reverse=True))


def lowest(values: Iterable[float]) -> float:
    """The smallest of positive values, but the next one where it is alone, as in `highest`."""
    return _not_alone(sorted(values))


def _not_alone(ordered: Sequence[float]) -> float:
    first, *others = ordered
    if len(others) < 3 or 1 / NEAR <= first / others[0] <= NEAR:
        return float(first)
    return float(others[0])
