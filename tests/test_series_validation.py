"""Files of published series judged: which rows are one series, which anchor, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from reports.validation import filled, render
from simulate.series.plan import plan
from simulate.series.rows import TooLittle, read_rows
from simulate.series.validation import MEAN, UNLIKE, series_validation, summaries
from spec.calibration import Calibration
from tests.commands import call
from tests.made_up import write_calibration
from tests.made_up_series import WHOLE, row, write

FIXTURE = Path(__file__).parent / "data" / "published_series.csv"
MADE_UP = FIXTURE.with_name("series_made_up.csv")


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    monkeypatch.chdir(tmp_path)
    return write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")


def test_the_published_rows(calibration: Calibration, tmp_path: Path, capsys: Any) -> None:
    """The compact fixture: kinds are sources, vendor-expected and FP8 rows apart, reasons given."""
    code, out, err = call(capsys, "--series", str(FIXTURE), "--report", "r.html", "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["schema"] == "validation/1"
    cases = {case["id"]: case for case in value["cases"]}
    assert set(cases) == {"T00012", "T01298", "T00526", "T00532"}
    assert cases["T00012"]["real_s"] == pytest.approx(768 * 2048 / 128 / 10475)
    printed = cases["T00012"]["printed"]
    assert (printed["metric"], printed["value"]) == ("tokens/s/GPU", 10475)
    assert printed["predicted"] * (1 + cases["T00012"]["error"]) == pytest.approx(10475)
    assert cases["T00012"]["baseline_s"] == pytest.approx(6 * 2048 / 10643)
    assert cases["T00526"]["vendor_expected"]
    assert cases["T00532"]["kind"].endswith("FP8")
    for case in cases.values():
        low, high = case["predicted_s"]["low"], case["predicted_s"]["high"]
        assert low < case["predicted_s"]["median"] < high
        assert case["inside_interval"] == (low <= case["real_s"] <= high)
    summary = value["summary"]
    assert summary["mean over sources"]["sources"] == 2
    assert summary["mean over sources"]["n"] == 2
    assert {"all", "vendor-expected tables", "mosaicml/llm-foundry@8c8dd48"} <= set(summary)
    reasons = {entry["id"]: entry["reason"] for entry in value["skipped"]}
    assert "belongs to no series" in reasons["T01365"]
    assert "an anchor whose series has no row to project" in reasons["T01553"]
    page = (tmp_path / "r.html").read_text()
    for words in ("Fitted systems", "T01553", "assumed or searched", "Growth of the error"):
        assert words in page
    assert page == render(value)
    assert "half-width" in page
    assert ">energy<" not in page  # which no published row has


def test_columns_that_no_row_fills_are_left_out() -> None:
    rows = [("x", "-", 1), ("y", "-", "-")]
    assert filled(("a", "b", "c"), rows) == (("a", "c"), [("x", 1), ("y", "-")])
    assert filled(("a", "b"), []) == (("a", "b"), [])


def test_rows_unlike_their_anchors_are_summarised_beside_all() -> None:
    """Two sources that count once each, however many rows they have."""

    def entry(kind: str, made: float, changes: int) -> dict[str, Any]:
        about = {"anchored": True, "vendor_expected": False, "precision": "bf16"}
        interval = {"median": made, "low": 0.9 * made, "high": 1.1 * made}
        case = {"kind": kind, "real_s": 1.0, "predicted_s": interval, "changes": changes}
        return case | about

    alike = [entry("a", 1.0, 0), entry("a", 1.0, 0)]
    unlike = [entry("a", 1.1, 1), entry("b", 0.7, 2)]
    found = summaries([*alike, *unlike])
    assert found[UNLIKE]["n"] == 2
    assert found[UNLIKE]["mape"] == pytest.approx(0.2)
    assert found[MEAN]["mape"] == pytest.approx((0.1 / 3 + 0.3) / 2)
    assert UNLIKE not in summaries(alike)


def test_use_decides_and_anchor_none_fits_nothing(
    calibration: Calibration, tmp_path: Path, capsys: Any
) -> None:
    rows = [
        WHOLE | {"use": "test", "value": "0.9"},
        WHOLE | {"row_id": "b", "gpus": "16", "global_batch": "128", "use": "anchor"},
        WHOLE | {"row_id": "c", "pair_id": "", "use": "test"},
        WHOLE | {"row_id": "d", "use": ""},
        WHOLE | {"row_id": "e", "pair_id": "", "use": "anchor"},
    ]
    path = write(tmp_path / "s.csv", rows)
    code, out, err = call(capsys, "--series", str(path), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert {case["id"]: case["anchored"] for case in value["cases"]} == {"a": True, "c": False}
    assert {one["id"] for one in value["skipped"]} == {"d", "e"}
    assert [case["id"] for case in value["cases"]] == ["a", "c"]
    assert "baseline_s" not in value["cases"][-1]
    assert value["summary"]["without anchor"]["n"] == 1
    (gpu,) = (name for name in value["summary"] if name.startswith("without anchor, 16 bits"))
    assert "H200" in gpu
    bare = write(tmp_path / "n.csv", [{k: v for k, v in one.items() if k != "use"} for one in rows])
    code, out, err = call(capsys, "--series", str(bare), "--anchor", "none", "--json")
    assert code == 0, err
    assert len(json.loads(out)["cases"]) == 5


def test_flops_that_count_recomputation_tell_of_it(
    calibration: Calibration, tmp_path: Path
) -> None:
    """Four thirds of the model's by the time beside them, in either order; never where denied."""
    flops = plan(row()).flops / 1e12
    known = {"metric": "step_time_s", "value": "1.0", "metric2": "TFLOP/s/GPU", "recompute": ""}
    known |= {"use": "test", "value2": str(flops * 1.3)}
    turned = {"metric": "TFLOP/s/GPU", "value": str(flops * 1.3), "metric2": "tokens/s"}
    turned |= {"value2": str(64 * 2048)}
    rows = {
        "counted": known,
        "turned": known | turned,
        "full": known | {"recompute": "full"},
        "alike": known | {"value2": str(flops * 1.1)},
        "between": known | {"value2": str(flops * 1.2)},
        "denied": known | {"recompute": "none"},
    }
    path = write(tmp_path / "s.csv", [WHOLE | one | {"row_id": name} for name, one in rows.items()])
    cases = {one["id"]: one for one in series_validation(path, calibration)["cases"]}
    said = {name for name, one in cases.items() if any("counts full" in s for s in one["assumed"])}
    assert said == {"counted", "turned", "full"}
    full = {name for name, one in cases.items() if one["parallelism"]["recompute"] == "full"}
    assert full == said
    assert {cases[name]["predicted_s"]["median"] for name in said} == {
        cases["full"]["predicted_s"]["median"]
    }
    assert cases["turned"]["real_s"] == pytest.approx(1.0, rel=0.04)


def test_shapes_of_one_pair_are_told_apart(calibration: Calibration, tmp_path: Path) -> None:
    """Two shapes at two scales each are two series; a shape without anchors borrows theirs."""
    rows = [
        WHOLE | {"row_id": f"{layers}-{gpus}", "layers": layers, "gpus": gpus, "global_batch": "64"}
        for layers in ("8", "16")
        for gpus in ("8", "16")
    ]
    value = series_validation(write(tmp_path / "s.csv", rows), calibration)
    assert {case["id"]: case["series"] for case in value["cases"]} == {
        "8-16": "p 8 layers, hidden 4096",
        "16-16": "p 16 layers, hidden 4096",
    }
    for one, use in zip(rows, ("anchor", "test", "test", "test"), strict=True):
        one["use"] = use
    value = series_validation(write(tmp_path / "t.csv", rows), calibration)
    assert [one["borrowed"] for one in value["series"].values()] == [False, True]
    assert len(value["cases"]) == 3


def test_a_family_of_several_shapes_is_one_system(calibration: Calibration, tmp_path: Path) -> None:
    rows = [
        WHOLE
        | {"row_id": f"{layers}-{gpus}-{n}", "layers": layers, "gpus": gpus, "global_batch": "64"}
        | {"use": use}
        for layers in ("8", "16")
        for gpus, use, count in (("8", "anchor", 6), ("16", "test", 1))
        for n in range(count)
    ]
    bare = [{name: text for name, text in one.items() if name != "use"} for one in rows]
    for table in (rows, bare):  # marked, or the smallest of each shape
        value = series_validation(write(tmp_path / "s.csv", table), calibration)
        assert {case["id"] for case in value["cases"]} == {"8-16-0", "16-16-0"}
        assert {case["series"] for case in value["cases"]} == {"p"}
        assert len(value["series"]["p"]["anchors"]) == 12
        assert not value["series"]["p"]["borrowed"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "",
            "'row_id' is missing: the file is empty; give a CSV with row_id, metric, value",
        ),
        ("row_id,metric\na,step_time_s\n", "column 'value' is missing"),
        ("row_id;metric;value\na;step_time_s;1\n", "columns must be separated by commas"),
        ("row_id,metric,value\n", "a header and no row; give one for each published step"),
        ("row_id,metric,value\na,step_time_s\n", "line 2 does not have the header's 3 columns"),
        ("row_id,metric,value\na,x,1\na,x,1\n", "row_id a stands there 2 times"),
        ("row_id,metric,value,use\na,x,1,maybe\n", "use is 'maybe'"),
        ("row_id,metric,value,value\na,x,1,1\n", "column 'value' stands in the header twice"),
        ("row_id,metric,value\n,x,1\n", "line 2 has no row_id"),
        ("row_id,metric,value\n,,\n", "has a header and no row"),
        ('row_id,metric,value\na,"x,1\n', "not valid CSV"),
        ("row_id,metric,value\na,step_time_s,1\n", "no row of it can be projected"),
        ("row_id,metric,value\na,step\0,1\n", "NUL"),
    ],
)
def test_bad_files_get_a_sentence(
    calibration: Calibration, tmp_path: Path, capsys: Any, text: str, words: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    code, out, err = call(capsys, "--series", str(path))
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_files_that_are_none(calibration: Calibration, tmp_path: Path, capsys: Any) -> None:
    code, _, err = call(capsys, "--series", "nowhere.csv")
    assert (code, "no such file" in err) == (2, True)
    code, _, err = call(capsys, "--anchor", "none")
    assert (code, "without --series" in err) == (2, True)
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfrow_id,metric,value,extra\na,step_time_s,1,\n")
    assert read_rows(tmp_path / "bom.csv")[0].row_id == "a"


def test_misprints_end_quickly(calibration: Calibration, tmp_path: Path) -> None:
    """Sizes that are no model's or cluster's are refused, not looped over."""
    for name in ("gpus", "layers", "ep", "pp", "global_batch", "seq_len"):
        with pytest.raises(TooLittle, match=name):
            plan(row(**{name: "999999999"}))
    with pytest.raises(TooLittle, match=r"passes|misprint"):
        plan(row(global_batch="400000", seq_len="256"))


def test_larger_rows_that_were_made_up(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its anchor's rate, by this repository's H200: racks, a fit that steps back, chunks
    that the stages do not divide, replicas of unequal shares.
    """
    monkeypatch.chdir(Path(__file__).parent.parent)
    code, out, err = call(capsys, "--series", str(MADE_UP), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["skipped"] == []
    errors = {case["id"]: case["error"] for case in value["cases"]}
    assert abs(errors["rack-128"]) < 0.1
    assert abs(errors["step-256"]) < 0.1
    assert 0 < errors["chunks-4096"] < 0.6
    assert 0 < errors["shares-512"] < 1


def test_a_split_in_a_configurations_name_is_the_rows(
    calibration: Calibration, tmp_path: Path
) -> None:
    """It is said, and a column of that name in a file counts nothing."""
    named = {"source_locator": "x/config_DGXH200_2x8x8xtp4pp1cp1.sh", "named": "of no meaning"}
    bare = WHOLE | dict.fromkeys(("tp", "pp", "cp", "vpp", "sharding"), "") | named
    rows = [WHOLE, bare | {"row_id": "b", "gpus": "16", "global_batch": "32"}]
    value = series_validation(write(tmp_path / "s.csv", rows), calibration)
    (case,) = value["cases"]
    assert (case["parallelism"]["tp"], case["parallelism"]["dp"]) == (4, 4)
    assert "tp 4, pp 1, cp 1 by the name of its configuration" in case["assumed"]
