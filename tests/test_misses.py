"""Which component of a projection is off: found where it is known."""

from typing import Any

import pytest

from simulate.validation.aims import ONE_HOST, SERIES, missed
from simulate.validation.misses import by_row, most_likely, named, of_memory, of_series, of_steps
from simulate.validation.scores import summarise


def case(compute: float, tp: float, factors: dict[str, float], **more: Any) -> dict[str, Any]:
    """A projected row whose real components take `factors` of what was projected."""
    parts = {"compute": compute, "tp_exposed": tp, "bubble": 0.0}
    real = sum(seconds * factors.get(name, 1.0) for name, seconds in parts.items())
    made = sum(parts.values())
    return {
        "id": "row",
        "kind": "source",
        "model": "m",
        "gpus": 4,
        "series": "s",
        "anchored": True,
        "parallelism": {"tp": 2, "pp": 1, "cp": 1, "ep": 1},
        "breakdown_s": parts,
        "real_s": real,
        "predicted_s": {"median": made, "low": 0.9 * made, "high": 1.1 * made},
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
    found = of_series([near, far, lone])
    assert set(found["source"]) == {"source"}
    assert set(found["series"]) == {"t"}


def ours(row: dict[str, Any]) -> dict[str, Any]:
    """The same as a measured step, which has no anchor."""
    return {name: value for name, value in row.items() if name != "anchored"}


def test_splits_of_a_source_are_told_apart() -> None:
    """Eight-way tensor parallelism waits, row by row differently; the rest is right."""
    eight = {"parallelism": {"tp": 8, "pp": 1, "cp": 1, "ep": 1}}
    off = [case(1.0, 0.3, {"tp_exposed": factor}, **eight) for factor in (1.5, 0.6)]
    near = [case(1.0, 0.1, {})] * 2
    found = of_series([*off, *near])
    assert set(found["split"]) == {"source, TP8"}
    words = found["split"]["source, TP8"]["in_words"]
    assert "no component explains its rows" in words
    assert "row by row, most likely, TP communication by" in words
    assert of_series(off)["split"] == {}  # the source itself


def test_what_is_missed_is_said() -> None:
    one = summarise([case(1.0, 0.1, {"compute": 0.9}, baseline_s=1.15, neighbour_s=9.9)])
    assert missed(one, SERIES)[0].startswith("mean error 10.0%, wanted 5%")
    words = missed(one, ONE_HOST)
    assert [word.split()[0] for word in words] == ["mean", "worst", "0.67"]
    assert "of the constant rate's error, wanted 0.5" in words[2]
    near = summarise([case(1.0, 0.1, {"compute": 0.99}, baseline_s=1.15)])
    assert missed(near, ONE_HOST) == []
    exact = case(1.0, 0.0, {"compute": 0.8}, baseline_s=0.8 * (1 + 1e-5), neighbour_s=0.8 + 1e-15)
    assert missed(summarise([exact]), SERIES)[2:] == [
        "over 100 times of the constant rate's error, wanted 0.6"
    ]


def test_groups_of_steps_that_miss_name_the_component() -> None:
    """Tensor-parallel communication takes 1.6 times what was simulated, in steps of one kind."""
    off = [case(1.0, tp, {"tp_exposed": 1.6}, kind="TP") for tp in (0.2, 0.4, 0.8)]
    near = [case(1.0, 0.1, {"compute": 1.01}, kind="DP")] * 3
    found = of_steps([ours(row) for row in (*off, *near)])
    assert set(found["kind"]) == {"TP"}
    one = found["kind"]["TP"]
    assert (one["component"], one["alike"]) == ("tp_exposed", True)
    assert "TP communication" in one["in_words"]
    assert "1.60" in one["in_words"]
    assert one["missed"][0].startswith("mean error")
    assert of_steps([ours(row) for row in near]) == {}


def test_across_nodes_five_percent_are_wanted() -> None:
    rows = [ours(case(1.0, 0.5, {"tp_exposed": 1.13}))] * 2
    assert set(of_steps(rows)) == {"all", "kind", "scale", "model"}
    assert of_steps([row | {"nodes": 2} for row in rows]) == {}


def test_where_no_component_explains_all_rows_each_row_is_shared() -> None:
    """Opposite errors of the host in two rows; what is left goes to what is known least."""
    rows = [ours(case(0.5, 0.0, {})) for _ in range(2)]
    for row, factor in zip(rows, (0.5, 1.7), strict=True):
        row["breakdown_s"]["other"] = 0.5
        row["predicted_s"]["median"] = 1.0
        row["real_s"] = 0.5 + 0.5 * factor
        row["error"] = 1 / row["real_s"] - 1
    parts = by_row(rows)
    assert next(iter(parts)) == "other"
    mean = sum(abs(row["error"]) for row in rows) / 2
    assert 0.95 * mean < parts["other"]["error"] < mean
    likely = most_likely(rows[0])
    assert (likely["component"], likely["in_words"]) == ("other", "waiting for the host")
    assert likely["of_step"] == pytest.approx(rows[0]["error"], rel=0.05)
    one = of_steps(rows)["all"]["all"]
    assert "row by row" in one["in_words"]
    assert "waiting for the host" in one["in_words"]


def test_the_part_of_a_peak_that_is_off_most() -> None:
    def peaks(made: dict[str, float]) -> dict[str, Any]:
        real = {"memory": 10.0, "reserved": 12.0, "device": 14.0}
        return {f"real_{name}_gib": gib for name, gib in real.items()} | {
            f"predicted_{name}_gib": {"median": gib} for name, gib in made.items()
        }

    blocks = peaks({"memory": 10.1, "reserved": 14.0, "device": 16.0})
    (one,) = of_memory([blocks] * 2)
    assert one["quantity"] == "device"
    assert one["component"] == "what it reserves beyond"
    assert one["off_gib"] == pytest.approx(1.9)
    assert of_memory([peaks({"memory": 10.1, "reserved": 12.0, "device": 14.0})]) == []
    assert [
        one["quantity"] for one in of_memory([peaks({"memory": 9, "reserved": 12, "device": 14})])
    ] == ["allocated"]
