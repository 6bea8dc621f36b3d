"""Which component of a projection is off: found where it is known."""

from typing import Any

import pytest

from simulate.series_misses import misses, named


def case(compute: float, tp: float, factors: dict[str, float], **more: Any) -> dict[str, Any]:
    """A projected row whose real components take `factors` of what was projected."""
    parts = {"compute": compute, "tp_exposed": tp, "bubble": 0.0}
    real = sum(seconds * factors.get(name, 1.0) for name, seconds in parts.items())
    made = sum(parts.values())
    return {
        "kind": "source",
        "series": "s",
        "anchored": True,
        "breakdown_s": parts,
        "real_s": real,
        "predicted_s": {"median": made},
        "error": made / real - 1,
    } | more


@pytest.mark.parametrize(
    ("component", "factor"), [("tp_exposed", 1.8), ("tp_exposed", 0.5), ("compute", 0.85)]
)
def test_the_component_that_is_off_is_found(component: str, factor: float) -> None:
    rows = [case(1.0, tp, {component: factor}) for tp in (0.1, 0.3, 0.6)]
    one = named(rows)
    assert one["component"] == component
    assert one["factor"] == pytest.approx(factor, rel=0.02)
    assert one["low"] == pytest.approx(factor)
    assert one["high"] == pytest.approx(factor)
    assert one["left"] < 0.01 < one["before"]
    assert one["alike"]


def test_one_row_does_not_tell_and_rows_may_disagree() -> None:
    assert named([case(1.0, 0.1, {"compute": 0.8})])["alike"] is None
    rows = [case(1.0, 0.1, {"compute": factor}) for factor in (0.7, 1.4)]
    one = named(rows)
    assert not one["alike"]
    assert "no component" in one["in_words"]
    exact = named([case(1.0, 0.1, {})] * 2)
    assert "nothing beyond" in exact["in_words"]


def test_series_within_five_percent_are_not_listed() -> None:
    near, far = case(1.0, 0.1, {"compute": 1.02}), case(1.0, 0.1, {"compute": 0.8}, series="t")
    lone = case(1.0, 0.1, {"compute": 0.5}, kind="other", series="u", anchored=False)
    found = misses([near, far, lone])
    assert set(found["source"]) == {"source"}
    assert set(found["series"]) == {"t"}
