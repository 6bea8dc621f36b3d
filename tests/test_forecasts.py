"""Forecasts: sealed once, from a plan, and judged by what was measured afterwards."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measure.suites.host_time import HostCase
from spec.errors import UserError
from spec.files import read_table, write_json, write_table
from spec.manifest import OTHER_DEVICES
from spec.measurable import read_steps
from spec.records import HostRow, KernelRow
from spec.training_records import TrainingConfig, TrainingRow
from tests.commands import call
from tests.made_up_steps import DEVICES, SPLITS, configs
from tests.synthetic import Truth, kernel_rows
from tests.test_nil_steps import nil_row


def test_forecast_is_sealed_once_and_judged(results: Path, tmp_path: Path, capsys: Any) -> None:
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    sealed = tmp_path / "sealed.json"
    words = ("predict", "plan.csv", "--out", "sealed.json")
    code, _, err = call(capsys, *words)
    assert code == 0, err
    before = sealed.read_bytes()
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "a forecast is written once" in err
    assert sealed.read_bytes() == before

    code, out, err = call(capsys, "compare", "sealed.json", str(results), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["summary"]["all"]["n"] == len(SPLITS)
    assert value["forecast"]["never_measured"] == []
    assert len(value["forecast"]["calibration"]["sha256"]) == 64

    # what runs again later counts as a mean on the same devices, and not on others
    shutil.copytree(results / "4x-h200" / "run-1", results / "4x-h200" / "run-2")
    folder = results / "4x-h200" / "run-2"
    again = folder / "manifest.json"
    text = again.read_text().replace("run-1", "run-2")
    again.write_text(re.sub(r"(2030-01-01T\d\d):0", r"\1:5", text))
    assert again.read_text() != text
    slower = [
        row.model_copy(update={"step_time_median_s": 3 * (row.step_time_median_s or 0.0)})
        for row in read_table(folder / "training.csv", TrainingRow)
    ]
    write_table(folder / "training.csv", TrainingRow, slower)
    repeated = json.loads(call(capsys, "compare", "sealed.json", str(results), "--json")[1])
    assert repeated["forecast"]["repeats_in_means"] == len(SPLITS)
    assert repeated["forecast"]["measured_again"] == 0
    assert [one["id"] for one in repeated["cases"]] == [one["id"] for one in value["cases"]]
    means = [one["real_s"] / 2 for one in repeated["cases"]]
    assert means == pytest.approx([one["real_s"] for one in value["cases"]])
    assert repeated["forecast"]["runs_of_repeats"] == ["run-2"]
    soon = again.read_text()
    for other in (
        re.sub(r'("uuid_hash": ")..', r"\1ee", soon),
        soon.replace("2030-01", "2030-02"),
    ):
        assert other != soon
        again.write_text(other)
        repeated = json.loads(call(capsys, "compare", "sealed.json", str(results), "--json")[1])
        assert repeated["summary"] == value["summary"]
        assert repeated["forecast"]["repeats_in_means"] == 0
        assert repeated["forecast"]["measured_again"] == len(SPLITS)
    shutil.rmtree(folder)

    # what was measured before the forecast was made does not count
    path = results / "4x-h200" / "run-1" / "manifest.json"
    path.write_text(path.read_text().replace("2030-01-01", "2020-01-01"))
    code, _, err = call(capsys, "compare", "sealed.json", str(results))
    assert code == 2
    assert "was measured after" in err


def test_plan_that_is_none(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plan.csv").write_text("case_id,model\n")
    code, _, err = call(capsys, "predict", "plan.csv", "--out", "sealed.json")
    assert code == 2
    assert "plan.csv: the column 'layers' is missing" in err
    assert (
        "results: is a folder; a CSV table"
        in call(capsys, "predict", "results", "--out", "sealed.json")[2]
    )
    assert not (tmp_path / "sealed.json").exists()


def test_a_sealed_forecast_that_was_edited(results: Path, tmp_path: Path, capsys: Any) -> None:
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    assert call(capsys, "predict", "plan.csv", "--out", "sealed.json", "--draws", "20")[0] == 0
    text = (tmp_path / "sealed.json").read_text()
    for change, words in (
        ({"calibration": {}}, "calibration: the key 'path' is missing"),
        ({"breakdown_s": {}}, "cases.0.breakdown_s: the parts of a step must be there"),
        ({"allocated_gib": -5}, "cases.0.allocated_gib is -5"),
        ({"modelled_share": 99}, "cases.0.modelled_share is 99"),
    ):
        sealed = json.loads(text)
        (sealed if "calibration" in change else sealed["cases"][0]).update(change)
        write_json(tmp_path / "edited.json", sealed)
        code, _, err = call(capsys, "compare", "edited.json", str(results))
        assert (code, err[: err.index(words)]) == (2, "error: edited.json: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": "8", "top_k": "2", "dp": "3", "ep": "3", "global_batch": "3"}, "ep 3 does"),
        ({"tp": "3"}, "tp 3 does not divide heads 32"),
        ({"hidden": "1000000000"}, "hidden is 1000000000; input should be less"),
        ({"layers": "-1"}, "layers is '-1'; input should be greater than 0"),
        ({"global_batch": "3", "dp": "2"}, "global_batch 3 is not a multiple"),
        ({"nodes": "7"}, "nodes 7 does not divide the 1 GPUs"),
        ({"model": "../x"}, "model is '../x'"),
    ],
)
def test_a_row_that_cannot_be_is_named_by_file_and_line(
    results: Path, tmp_path: Path, capsys: Any, changes: dict[str, str], words: str
) -> None:
    """In a plan, and in a run's table."""
    plan, ran = tmp_path / "plan.csv", results / "4x-h200" / "run-1" / "training.csv"
    write_table(plan, TrainingConfig, configs())
    for path, command in (
        (plan, ("predict", "plan.csv", "--out", "sealed.json")),
        (ran, (str(results),)),
    ):
        header, first, *others = csv.reader(path.read_text().splitlines())
        cells = dict(zip(header, first, strict=True)) | changes
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, cells.values(), *others])
        code, out, err = call(capsys, *command)
        assert (code, out) == (2, "")
        assert f"{path.name}: line 2: {words}" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "sealed.json").exists()


def test_a_forecast_for_the_devices_measured_last(results: Path, capsys: Any) -> None:
    plan = results.parent / "plan.csv"
    write_table(plan, TrainingConfig, configs())
    words = ("predict", "plan.csv", "--same-devices", "--draws", "20")
    code, _, err = call(capsys, *words, "--out", "none.json")
    assert code == 2
    assert "knows no device of its newest kernels" in err
    system = results / "4x-h200"
    row = kernel_rows(Truth(), 4, np.random.default_rng(0))[0]
    write_table(system / "run-1" / "kernels.csv", KernelRow, [row])
    value = json.loads((system / "calibration.json").read_text())
    # nil steps of their host will do, not those of a host of one of them
    for devices, code in ((DEVICES[:1], 2), (DEVICES, 0)):
        host = {"devices": devices, "slower": 1.5, "times_us": {"part_us": 90.0}}
        write_json(
            system / "calibration.json", value | {"host": value["host"] | {"visits": [host]}}
        )
        assert call(capsys, *words, "--out", "host.json")[0] == code
    assert json.loads((results.parent / "host.json").read_text())["devices"] == DEVICES
    name = DEVICES[0]
    value["clock"]["devices"] = [{"uuid_hash": name, "power": 1.6}]
    write_json(system / "calibration.json", value)
    clocks = []
    for out, more in (("same.json", words), ("any.json", (*words[:2], *words[3:]))):
        assert call(capsys, *more, "--out", out)[0] == 0
        sealed = json.loads((results.parent / out).read_text())
        clocks.append(sealed["cases"][0]["clock_mhz"]["median"])
    assert clocks[0] < clocks[1]
    # nil steps measured since are of the devices measured last, too
    later = results / "4x-h200" / "run-2"
    shutil.copytree(system / "run-1", later)
    (later / "kernels.csv").unlink()
    about, others = later / "manifest.json", [f"{n:016x}" for n in range(4)]
    for old, new in zip(DEVICES, others, strict=True):
        about.write_text(about.read_text().replace(old, new))
    write_table(later / "host.csv", HostRow, [nil_row(HostCase(1.0, 4), slower=1.0)])
    host = {"devices": others, "slower": 1.5, "times_us": {"part_us": 90.0}}
    with_host = value | {"host": value["host"] | {"visits": [host]}}
    write_json(system / "calibration.json", with_host)
    assert call(capsys, *words, "--out", "nil.json")[0] == 0
    assert json.loads((results.parent / "nil.json").read_text())["devices"] == others
    shutil.rmtree(later)
    # emulated nodes have their kernels from the host's runs, which must be of the same devices
    emulated = results / "4x-h200-2x2"
    shutil.copytree(system, emulated)
    (emulated / "run-1" / "kernels.csv").unlink()
    about = emulated / "run-1" / "manifest.json"
    about.write_text(about.read_text().replace('"4x-h200"', '"4x-h200-2x2"'))
    value |= {"system": "4x-h200-2x2"}
    value["inputs"] = [{"path": "4x-h200/run-1/kernels.csv", "sha256": "0" * 64, "rows": 1}]
    write_json(emulated / "calibration.json", value)
    words = (*words, "--system", "4x-h200-2x2")
    assert call(capsys, *words, "--out", "emulated.json")[0] == 0
    sealed = json.loads((results.parent / "emulated.json").read_text())
    assert sealed["cases"][0]["clock_mhz"]["median"] == pytest.approx(clocks[0])
    about.write_text(about.read_text().replace(name, "0123456789abcdef"))
    code, _, err = call(capsys, *words, "--out", "other.json")
    assert code == 2
    assert "ran on other devices than its kernels or nil steps in" in err
    assert err.count("\n") == 1
    # unless their own collectives were measured: the network is theirs, and kernels another visit's
    devices = json.loads(about.read_text())["hosts"][0]["devices"]
    value["networks"] = [one | {"visit_sd": 0.8} for one in value["networks"]]
    value["networks"][0] |= {"run_sd": 0.05, "devices": [one["uuid_hash"] for one in devices]}
    write_json(emulated / "calibration.json", value)
    assert call(capsys, *words, "--out", "other.json")[0] == 0
    sealed = json.loads((results.parent / "other.json").read_text())
    assert sealed["cases"][0]["clock_mhz"]["median"] == pytest.approx(clocks[1])


def test_a_forecast_judged_on_other_devices_says_so(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    """Sealed for a run's four devices, judged there, on other ones, and on some of them."""
    system, count = results / "4x-h200", len(SPLITS)
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    row = kernel_rows(Truth(), 4, np.random.default_rng(0))[0]
    write_table(system / "run-1" / "kernels.csv", KernelRow, [row])
    about = system / "run-1" / "manifest.json"
    was = json.loads(about.read_text())
    names = [one["uuid_hash"] for one in was["hosts"][0]["devices"]]
    value = json.loads((system / "calibration.json").read_text())
    value["clock"]["devices"] = [{"uuid_hash": name, "power": 1.1} for name in names]
    write_json(system / "calibration.json", value)
    for out, more in (("own.json", ["--same-devices"]), ("any.json", [])):
        words = ("predict", "plan.csv", "--out", out, "--draws", "20", *more)
        assert call(capsys, *words)[0] == 0
    sealed = json.loads((tmp_path / "own.json").read_text())
    assert sealed["devices"] == names
    assert json.loads((tmp_path / "any.json").read_text())["devices"] == []

    def judged(path: str, hashes: list[str], *notes: str) -> tuple[dict[str, Any], str, str]:
        changed = json.loads(json.dumps(was))
        for device, name in zip(changed["hosts"][0]["devices"], hashes, strict=True):
            device["uuid_hash"] = name
        write_json(about, changed | {"notes": list(notes)})
        more = ("--json", "judged.json", "--report", "judged.html")
        code, out, err = call(capsys, "compare", path, str(results), *more)
        assert code == 0, err
        value = json.loads((tmp_path / "judged.json").read_text())
        return value, out, (tmp_path / "judged.html").read_text()

    here, out, page = judged("own.json", names)
    assert here["forecast"]["warning"] is None
    assert here["forecast"]["on_other_devices"] == []
    assert "other devices" not in out + page
    others = [f"{index:016x}" for index in range(8, 12)]
    there, out, page = judged("own.json", others)
    assert there["summary"] == here["summary"]
    assert len(there["forecast"]["on_other_devices"]) == count
    assert out.splitlines()[1] == there["forecast"]["warning"]
    assert out.splitlines()[1].startswith(
        f"{count} of {count} cases ran on other devices than those this forecast is conditional on"
    )
    assert there["forecast"]["warning"] in page
    assert f"<dt>on other devices</dt><dd>{count} of {count}</dd>" in page
    # the third and fourth device are others: of the six, two steps have four GPUs
    mixed, out, _ = judged("own.json", [*names[:2], *others[2:]])
    fours = [one["id"] for one in mixed["cases"] if one["gpus"] == 4]
    assert mixed["forecast"]["on_other_devices"] == fours
    assert f"\n2 of {count} cases ran on other devices" in out
    swapped = judged("own.json", [names[1], names[0], *names[2:]])[0]
    assert swapped["forecast"]["on_other_devices"] == ["run-1/case-0"]  # its one GPU is the second
    moved, out, _ = judged("own.json", names, OTHER_DEVICES)
    assert len(moved["forecast"]["on_unknown_devices"]) == count
    assert f"\n{count} of {count} cases may have run on other devices" in out

    # of no devices by name; earlier forecasts do not say
    older = {key: value for key, value in sealed.items() if key != "devices"}
    write_json(tmp_path / "older.json", older)
    for path, devices in (("any.json", []), ("older.json", None)):
        value, out, page = judged(path, others)
        assert value["forecast"]["devices"] == devices
        assert "other devices" not in out + page
    for wrong in (7, "0" * 16, [7], ["GPU-0"], ["0" * 15 + "\n"], ["<script>"], {"0": "1"}):
        write_json(tmp_path / "odd.json", sealed | {"devices": wrong})
        code, out, err = call(capsys, "compare", "odd.json", str(results))
        assert (code, out) == (2, "")
        assert "odd.json: devices" in err
        assert err.count("\n") == 1


def test_a_forecast_for_gpus_never_measured(results: Path, tmp_path: Path, capsys: Any) -> None:
    """The calibration moved to H100; steps of the system's own GPUs are not what it forecast."""
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())

    def sealed(name: str, *more: str) -> dict[str, Any]:
        code, _, err = call(capsys, "predict", "plan.csv", "--out", name, "--draws", "20", *more)
        assert code == 0, err
        return dict(json.loads((tmp_path / name).read_text()))

    own, other = sealed("own.json"), sealed("h100.json", "--node", "hgx-h100")
    code, _, err = call(
        capsys, "predict", str(tmp_path / "plan.csv"), "--out", "far.json", "--draws", "20"
    )
    far = json.loads((tmp_path / "far.json").read_text())
    assert own["plan"]["path"] == "plan.csv"
    assert far["plan"] == own["plan"] | {"path": "/".join((tmp_path / "plan.csv").parts[-3:])}
    assert (own["gpu"], other["gpu"]) == ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    for one, two in zip(own["cases"], other["cases"], strict=True):
        assert two["step_time_s"]["median"] > one["step_time_s"]["median"]  # 3.35 of 4.8 TB/s
    code, _, err = call(capsys, "compare", "h100.json", str(results))
    assert code == 2
    assert "was measured after" in err
    # a forecast that does not say its GPU was made for a named node
    older = {key: value for key, value in other.items() if key != "gpu"}
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert call(capsys, "compare", "older.json", str(results))[0] == 2
    for change, said in (
        ({"node": "/etc/hostname"}, "gpu is missing, and node '/etc/hostname' is none of"),
        ({"gpu": " "}, "gpu"),
        ({"created": "yesterday"}, "'yesterday' is no time with its zone"),
        ({"cases": [other["cases"][0] | {"energy_j": {}}]}, "low, median and high must be there"),
        (
            {"cases": [other["cases"][0] | {"step_time_s": {"low": 2, "median": 1, "high": 3}}]},
            "in",
        ),
    ):
        (tmp_path / "odd.json").write_text(json.dumps(older | change))
        code, _, err = call(capsys, "compare", "odd.json", str(results))
        assert code == 2
        assert said in err
    words = ("predict", "plan.csv", "--out", "s.json", "--node", "hgx-h100", "--same-devices")
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "give one of them" in err


def test_steps_over_other_links_are_not_what_was_forecast(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    """The same steps of the same GPUs ran over shaped links first, over the calibration's later."""
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    assert call(capsys, "predict", "plan.csv", "--out", "sealed.json", "--draws", "20")[0] == 0
    sealed = json.loads((tmp_path / "sealed.json").read_text())
    sealed["cases"] = sealed["cases"][1:]  # the first is on one GPU, which is no two nodes
    for one in sealed["cases"]:
        one["config"]["nodes"] = 2
    write_json(tmp_path / "sealed.json", sealed)
    own = results / "4x-h200" / "run-1"
    rows = read_table(own / "training.csv", TrainingRow)
    across = [row.model_copy(update={"nodes": 2}) for row in rows[1:]]
    write_table(own / "training.csv", TrainingRow, across)
    text = (own / "manifest.json").read_text().replace("Synthetic GPU", "NVIDIA H200")
    about = json.loads(text) | {"emulated_nodes": 2}
    write_json(own / "manifest.json", about)
    shaped = results / "2x-h200-10000mbit" / "run-0"
    shutil.copytree(results / "4x-h200", shaped.parent)
    (shaped.parent / "run-1").rename(shaped)
    earlier = about["started"].replace("2030", "2029")
    links = {"system": shaped.parent.name, "run": "run-0", "link_mbit_per_s": 10000}
    write_json(shaped / "manifest.json", about | links | {"started": earlier})

    words = ("compare", "sealed.json", str(results), "--json")
    value = json.loads(call(capsys, *words)[1])
    assert {one["system"] for one in value["cases"]} == {"4x-h200"}
    assert value["forecast"]["over_other_links"] == len(across)
    assert value["forecast"]["measured_again"] == 0
    assert f"{len(across)} repeats over other links" in value["forecast"]["repeats"]
    # a calibration of one node says nothing of links: then the first that ran counts
    write_json(own / "manifest.json", about | {"emulated_nodes": 1})
    value = json.loads(call(capsys, *words)[1])
    assert {one["system"] for one in value["cases"]} == {"2x-h200-10000mbit"}
    assert value["forecast"]["over_other_links"] == 0


def test_steps_that_cannot_be_measured_are_not_sealed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    first = configs()[0]
    one = first.model_copy(update={"zero": 2, "dp": 2, "global_batch": 2 * first.global_batch})
    write_table(plan, TrainingConfig, [one])
    with pytest.raises(UserError, match=r"plan\.csv: line 2, .* zero 2 steps are not measured"):
        read_steps(plan)


def test_a_step_that_gpus_do_not_hold_is_forecast_and_said(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    small = configs()[0]
    large = small.model_copy(update={"case_id": "large", "layers": 128})
    write_table(tmp_path / "plan.csv", TrainingConfig, [small, large])
    code, out, err = call(capsys, "predict", "plan.csv", "--out", "sealed.json")
    assert code == 0, err
    of_small, of_large, _ = out.strip().splitlines()
    assert "does not fit" not in of_small
    said = re.search(r"^large: .* s; does not fit: ([\d.]+) GiB of 140\.4$", of_large)
    assert said
    assert float(said[1]) > 140.4
