"""Compare two calibrations: `python -m calibrate.diff A.json B.json`.

examples:
    python -m calibrate.diff results/h200/calibration.json results/h200-may/calibration.json
    python -m calibrate.diff old.json new.json --all --json changes.json

Parameters are listed with the largest change first. A change is `beyond` when the 90 % intervals of
the two do not touch: noise alone would hardly explain it.
"""

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

from spec.calibration import Calibration, HeldOut, Parameter, read_calibration
from spec.command import Parser, add_json, emit, run
from spec.interval import percent


def compare(a: Calibration, b: Calibration) -> dict[str, Any]:
    """What differs from `a` to `b`: parameters, held-out errors, input files."""
    mine, other = by_name(a), by_name(b)
    parameters = [
        entry
        for name in [*mine, *(name for name in other if name not in mine)]
        if (entry := _parameter(name, mine.get(name), other.get(name))) is not None
    ]
    parameters.sort(key=lambda entry: (-entry["size"], entry["name"]))
    files_a = {one.path: one.sha256 for one in a.inputs}
    files_b = {one.path: one.sha256 for one in b.inputs}
    return {
        "schema": "calibration-diff/1",
        "systems": [a.system, b.system],
        "parameters": parameters,
        "unchanged": len(set(mine) & set(other))
        - sum(entry["a"] is not None and entry["b"] is not None for entry in parameters),
        "held_out": _held_out(a.held_out, b.held_out),
        "inputs": {
            "only_a": sorted(files_a.keys() - files_b.keys()),
            "only_b": sorted(files_b.keys() - files_a.keys()),
            "changed": sorted(
                path for path in files_a.keys() & files_b.keys() if files_a[path] != files_b[path]
            ),
        },
    }


def by_name(calibration: Calibration) -> dict[str, Parameter]:
    """A calibration's parameters, each by its name."""
    return {one.name: one for one in calibration.parameters}


def _parameter(name: str, a: Parameter | None, b: Parameter | None) -> dict[str, Any] | None:
    """The entry of a parameter that differs; None where it does not."""
    if a is None or b is None:
        one = a or b
        assert one is not None
        size, beyond = float("inf"), False
    else:
        one = a
        if (a.value, a.low, a.high, a.source) == (b.value, b.low, b.high, b.source):
            return None
        size = (
            abs(log(b.value / a.value)) if a.value > 0 and b.value > 0 else abs(b.value - a.value)
        )
        beyond = a.high < b.low or b.high < a.low
    return {
        "name": name,
        "unit": one.unit,
        "a": _side(a),
        "b": _side(b),
        "ratio": b.value / a.value if a and b and a.value else None,
        "beyond": beyond,
        "size": size if size != float("inf") else 1e9,
    }


def _side(one: Parameter | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {"value": one.value, "low": one.low, "high": one.high, "source": one.source}


def _held_out(a: Sequence[HeldOut], b: Sequence[HeldOut]) -> list[dict[str, Any]]:
    before = {(one.model, one.split): one for one in a}
    after = {(one.model, one.split): one for one in b}
    found = []
    for key in [*before, *(key for key in after if key not in before)]:
        one, other = before.get(key), after.get(key)
        if one == other:
            continue
        found.append(
            {
                "model": key[0],
                "split": key[1],
                "median_error": [
                    one.median_error if one else None,
                    other.median_error if other else None,
                ],
                "inside_90": [one.inside_90 if one else None, other.inside_90 if other else None],
            }
        )
    return found


def table(value: dict[str, Any], show_all: bool) -> str:
    """The comparison as text; without `show_all` the twenty largest changes."""
    listed = value["parameters"] if show_all else value["parameters"][:20]
    a, b = value["systems"]
    lines = [
        f"{len(value['parameters'])} parameters differ, {value['unchanged']} do not "
        f"(A is {a}, B is {b})",
        "",
        f"{'parameter':<46}{'A':>12}{'B':>12}  {'B / A':>7}  unit",
    ]
    for entry in listed:
        ratio = "" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
        lines.append(
            f"{entry['name']:<46}{_number(entry['a']):>12}{_number(entry['b']):>12}  {ratio:>7}  "
            f"{entry['unit']}{_remark(entry)}"
        )
    if len(listed) < len(value["parameters"]):
        lines.append(f"... and {len(value['parameters']) - len(listed)} more; --all lists them")
    if value["held_out"]:
        lines += ["", f"{'held out':<32}{'A median':>10}{'B median':>10}  split"]
        lines += [
            f"{entry['model']:<32}{percent(entry['median_error'][0]):>10}"
            f"{percent(entry['median_error'][1]):>10}  {entry['split']}"
            for entry in value["held_out"]
        ]
    for key, words in (("only_a", "only A"), ("only_b", "only B"), ("changed", "changed")):
        if value["inputs"][key]:
            lines.append(f"input files, {words}: {', '.join(value['inputs'][key])}")
    return "\n".join(lines)


def _remark(entry: dict[str, Any]) -> str:
    a, b = entry["a"], entry["b"]
    if a is None or b is None:
        return f"  ({'A' if b is None else 'B'} only, {(a or b)['source']})"
    words = []
    if a["source"] != b["source"]:
        words.append(f"{a['source']} -> {b['source']}")
    if entry["beyond"]:
        words.append("beyond both intervals")
    return f"  ({', '.join(words)})" if words else ""


def _number(side: dict[str, Any] | None) -> str:
    return "-" if side is None else f"{side['value']:.5g}"


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = Parser(prog="python -m calibrate.diff", description=__doc__)
    parser.add_argument("a", type=Path, metavar="A.json", help="a calibration")
    parser.add_argument("b", type=Path, metavar="B.json", help="the one to compare with it")
    parser.add_argument("--all", action="store_true", help="list every parameter that differs")
    add_json(parser)
    options = parser.parse_args(arguments)
    value = compare(read_calibration(options.a), read_calibration(options.b))
    emit(options.json, value, table(value, options.all))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
