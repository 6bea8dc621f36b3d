"""Validation and forecasts, on made-up training steps whose errors are known."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.validation import render
from simulate import components, validate
from simulate.draw import Grid, _random
from simulate.memory import memory
from simulate.scores import _inside, coverage, grouped, summarise, wide_or_narrow, winkler
from simulate.uncertainty import Z90
from simulate.validation import Case, predict, validation
from simulate.validation_text import table
from spec.calibration import read_calibration
from spec.command import run
from spec.files import parse, read_table, read_yaml, write_json, write_table
from spec.manifest import OTHER_DEVICES
from spec.measurable import refuse
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import KernelRow
from spec.training_records import ProfileRow, StepRow, TrainingConfig, TrainingRow
from tests.made_up import write_calibration
from tests.synthetic import Truth, kernel_rows, manifest
from topologies import load_fabric, load_node

RESULTS = Path(__file__).parent.parent / "results"
MODEL = load_model("llama3-8b").resized(layers=4, seq_len=2048)
SPLITS = (
    {},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "sequence_parallel": True},
    {"pp": 2, "global_batch": 8},
    {"dp": 2, "global_batch": 8, "overlap": True},
    {"tp": 2, "dp": 2, "sequence_parallel": True, "global_batch": 8},
)
ERROR = 0.04  # every made-up measurement is this much slower than its simulation


def configs() -> list[TrainingConfig]:
    return [
        TrainingConfig.of(f"case-{i}", MODEL, Parallelism.model_validate(fields))
        for i, fields in enumerate(SPLITS)
    ]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system whose training steps all took 4 % longer than simulated."""
    monkeypatch.chdir(tmp_path)
    system = tmp_path / "results" / "4x-h200"
    calibration = write_calibration(system / "calibration.json")
    node, fabric = load_node("hgx-h200"), load_fabric("ndr400-rail")
    rows = []
    for config in configs():
        predicted = predict(config, calibration, node, fabric, draws=20)
        assert predicted.power_w is not None
        assert predicted.clock_mhz is not None
        step = predicted.step_time_s["median"] * (1 + ERROR)
        fields = config.model_dump() | {
            "status": "done",
            "framework": "made up",
            "steps": 10,
            "step_time_median_s": step,
            "energy_per_step_j": predicted.energy_j["median"] * 1.1,
            "power_mean_w": predicted.power_w["median"] * 1.05,
            "clock_mean_mhz": predicted.clock_mhz["median"] / 1.02,
            "peak_allocated_gib": f"{predicted.allocated_gib},1.0",
        }
        rows.append(TrainingRow.model_validate(fields))
    folder = system / "run-1"
    write_table(folder / "training.csv", TrainingRow, rows)
    steps = [
        StepRow(case_id=row.case_id, role="judge", step=0, step_time_s=row.step_time_median_s or 1)
        for row in rows
    ]
    write_table(folder / "steps.csv", StepRow, steps)
    about = manifest("4x-h200", "run-1", 4, Truth(), "2030-01-01T00:00:00Z")
    write_json(folder / "manifest.json", about.model_dump(mode="json", by_alias=True))
    return tmp_path / "results"


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = run(validate.main, words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_errors_and_baselines(results: Path, capsys: Any) -> None:
    code, out, err = call(capsys, str(results), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["schema"] == "validation/1"
    every = value["summary"]["all"]
    assert every["n"] == len(SPLITS)
    assert every["mape"] == pytest.approx(1 - 1 / (1 + ERROR), rel=1e-3)
    assert every["bias"] == pytest.approx(1 / (1 + ERROR) - 1, rel=1e-3)
    # power and time enter energy together
    assert every["energy_mape"] == pytest.approx(1 - 1 / 1.1, rel=1e-3)
    assert every["memory_mape"] == pytest.approx(0, abs=1e-3)
    assert every["power_mape"] == pytest.approx(1 - 1 / 1.05, rel=1e-3)
    assert every["clock_mape"] == pytest.approx(0.02, rel=1e-3)
    assert every["clock_inside_90"] == 1
    assert every["limit_power_mape"] > every["power_mape"]
    assert every["limit_clock_mape"] > 0
    assert every["baseline_mape"] > every["mape"]
    assert set(value["summary"]) == {"all", "1 GPU", "TP", "PP", "DP", "TP+DP"}
    for case in value["cases"]:
        assert case["baseline_from"] != case["id"]
        inside = case["predicted_s"]["low"] <= case["real_s"] <= case["predicted_s"]["high"]
        assert case["inside_interval"] == inside


def test_devices_that_were_measured_have_power_of_their_own(results: Path, capsys: Any) -> None:
    path = results / "4x-h200" / "calibration.json"
    value = json.loads(path.read_text())
    names = [
        one.uuid_hash for one in manifest("4x-h200", "run-1", 4, Truth(), "x").hosts[0].devices
    ]
    powers = (1.6, 1.0, 1.0, 1.0)
    before = json.loads(call(capsys, str(results), "--json")[1])["cases"]
    value["clock"]["devices"] = [
        {"uuid_hash": name, "power": power} for name, power in zip(names, powers, strict=True)
    ]
    write_json(path, value)
    after = json.loads(call(capsys, str(results), "--json")[1])["cases"]
    slower = [
        one["predicted_clock_mhz"]["median"] / other["predicted_clock_mhz"]["median"]
        for one, other in zip(after, before, strict=True)
    ]
    assert slower[0] < slower[1] < slower[2] < 1  # one, two and four devices, the first one hot


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
    names = [
        one.uuid_hash for one in manifest("4x-h200", "run-1", 4, Truth(), "x").hosts[0].devices
    ]
    # nil steps of their host will do, not those of a host of one of them
    for devices, code in ((names[:1], 2), (names, 0)):
        host = {"devices": devices, "slower": 1.5, "times_us": {"part_us": 90.0}}
        write_json(
            system / "calibration.json", value | {"host": value["host"] | {"visits": [host]}}
        )
        assert call(capsys, *words, "--out", "host.json")[0] == code
    assert json.loads((results.parent / "host.json").read_text())["devices"] == names
    name = names[0]
    value["clock"]["devices"] = [{"uuid_hash": name, "power": 1.6}]
    write_json(system / "calibration.json", value)
    clocks = []
    for out, more in (("same.json", words), ("any.json", (*words[:2], *words[3:]))):
        assert call(capsys, *more, "--out", out)[0] == 0
        sealed = json.loads((results.parent / out).read_text())
        clocks.append(sealed["cases"][0]["clock_mhz"]["median"])
    assert clocks[0] < clocks[1]
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
    assert "ran on other devices than its kernels in" in err
    assert err.count("\n") == 1
    # unless their own collectives were measured: the network is theirs, and kernels another visit's
    devices = json.loads(about.read_text())["hosts"][0]["devices"]
    value["networks"] = [one | {"visit_sd": 0.8} for one in value["networks"]]
    value["networks"][0] |= {"run_sd": 0.05, "devices": [one["uuid_hash"] for one in devices]}
    write_json(emulated / "calibration.json", value)
    assert call(capsys, *words, "--out", "other.json")[0] == 0
    sealed = json.loads((results.parent / "other.json").read_text())
    assert sealed["cases"][0]["clock_mhz"]["median"] == pytest.approx(clocks[1])


def test_terminal_summary_names_baselines_and_worst(results: Path, capsys: Any) -> None:
    code, out, _ = call(capsys, str(results))
    assert code == 0
    for words in ("MAPE", "constant rate", "neighbour", "inside 90 %", "worst cases", "case-",
                  "power: MAPE 4.8%", "clock: MAPE 2.0%", "the largest clock"):  # fmt: skip
        assert words in out


def test_what_is_missed_is_named_with_the_component_that_is_off(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    """All steps took 4 % longer than simulated, where 3 % is wanted."""
    code, out, err = call(capsys, str(results), "--report", "v.html")
    assert code == 0, err
    (line,) = (one for one in out.splitlines() if one.startswith("missed, all"))
    assert line.startswith(f"missed, all ({len(SPLITS)} cases): mean error 3.8%, wanted 3%; off is")
    assert "compute" in line
    assert any(one.startswith("missed, kind TP (2 cases)") for one in out.splitlines())
    page = (tmp_path / "v.html").read_text()
    assert "What is missed, and what is off" in page
    assert line.split("off is ")[1] in page
    assert "not profiled; most likely compute, -3." in page
    assert "model llama3-8b" in page


def test_systems_are_judged_apart_by_themselves(results: Path, tmp_path: Path, capsys: Any) -> None:
    """A second system, whose steps took twice as long: neither errors nor baselines are mixed."""
    alone = json.loads(call(capsys, str(results), "--json")[1])
    other = results / "slow"
    shutil.copytree(results / "4x-h200", other)
    path = other / "run-1" / "manifest.json"
    path.write_text(path.read_text().replace('"4x-h200"', '"slow"'))
    rows = read_table(other / "run-1" / "training.csv", TrainingRow)
    slow = [
        row.model_copy(update={"step_time_median_s": 2 * (row.step_time_median_s or 0)})
        for row in rows
    ]
    write_table(other / "run-1" / "training.csv", TrainingRow, slow)
    code, out, err = call(capsys, str(results), "--json", "--report", "v.html")
    assert code == 0, err
    value = json.loads(out)
    assert value["systems"]["4x-h200"]["summary"] == alone["summary"]
    assert value["systems"]["slow"]["summary"]["all"]["mape"] == pytest.approx(
        1 - 0.5 / (1 + ERROR), rel=1e-3
    )
    text = call(capsys, str(results))[1]
    kinds = [line.split()[0] for line in text.splitlines()[2:16]]
    assert kinds.count("4x-h200") == kinds.count("slow") == 1
    assert "all" not in kinds
    page = (tmp_path / "v.html").read_text()
    assert "slow: Worst cases" in page
    assert "4x-h200, mean error" in page


def test_peaks_of_memory_beside_the_nearest_row(results: Path, capsys: Any) -> None:
    """Reserved and device peaks as predicted, but for one row; rows fitted on are told apart."""
    path = results / "4x-h200" / "run-1" / "training.csv"
    rows = read_table(path, TrainingRow)
    value = json.loads(call(capsys, str(results), "--json")[1])
    assert [one["quantity"] for one in value["memory"]] == ["allocated"]
    node, fabric = load_node("hgx-h200"), load_fabric("loopback")
    peaks = [memory(row.model_spec(), row.parallelism(), node, fabric).intervals() for row in rows]
    full = [
        row.model_copy(
            update={
                "peak_reserved_gib": f"{one['reserved']['median'] * (2 if index == 0 else 1)}",
                "peak_device_gib": f"{one['device']['median']}",
            }
        )
        for index, (row, one) in enumerate(zip(rows, peaks, strict=True))
    ]
    write_table(path, TrainingRow, full)
    by_name = {
        one["quantity"]: one
        for one in json.loads(call(capsys, str(results), "--json")[1])["memory"]
    }
    assert by_name["reserved"]["max_ape"] == pytest.approx(0.5, rel=1e-3)
    assert by_name["reserved"]["inside_90"] == pytest.approx(1 - 1 / len(rows))
    assert by_name["device"]["mape"] == pytest.approx(0, abs=1e-3)
    assert by_name["device"]["baseline_mape"] > 0.05
    assert not any(one["fitted"] for one in by_name.values())


def test_training_steps_that_failed_are_left_out(results: Path, capsys: Any) -> None:
    path = results / "4x-h200" / "run-1" / "training.csv"
    path.write_text(path.read_text().replace(",done,", ",failed,"))
    code, _, err = call(capsys, str(results))
    assert code == 2
    assert "no finished training step" in err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("case-1,judge", "case-1,fit", "role is 'fit'"),
        ("case-1,judge", "case-0,judge", "case_id case-0 stands there 2 times"),
        (",done,", ",perhaps,", "status is 'perhaps'"),
        ("seq_len", "seq_length", "seq_len"),
    ],
)
def test_bad_rows_get_a_sentence(
    results: Path, capsys: Any, old: str, new: str, words: str
) -> None:
    path = results / "4x-h200" / "run-1" / "training.csv"
    path.write_text(path.read_text().replace(old, new))
    code, out, err = call(capsys, str(results))
    assert code == 2
    assert out == ""
    assert words in err
    assert "training.csv" in err
    assert err.count("\n") == 1


def test_half_written_table(results: Path, capsys: Any) -> None:
    path = results / "4x-h200" / "run-1" / "training.csv"
    path.write_text(path.read_text()[:-40])
    code, _, err = call(capsys, str(results))
    assert code == 2
    assert "half-written" in err


def test_result_set_of_another_version(results: Path, capsys: Any) -> None:
    path = results / "4x-h200" / "run-1" / "manifest.json"
    path.write_text(path.read_text().replace("results/1", "results/7"))
    code, _, err = call(capsys, str(results))
    assert code == 2
    assert "schema is 'results/7'; this version reads 'results/1'" in err


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--series x.csv --fabric ndr400-rail", "--fabric has no effect with --series"),
        ("--series x.csv --engine astra-sim", "--engine has no effect with --series"),
        ("--spread x.csv --report x.html", "--report has no effect with --spread"),
        ("--spread x.csv --progress", "--progress has no effect with --spread"),
        ("--anchor none", "--anchor has no effect without --series"),
        ("--astra-sim x", "--astra-sim has no effect without --engine astra-sim"),
        ("predict plan.csv --out x.json --seed 1a2b3c4", "--seed has no effect without --draw"),
        ("predict plan.csv --out x.json --report x.html", "unrecognized arguments: --report"),
        ("compare sealed.json --draws 40", "unrecognized arguments: --draws"),
    ],
)
def test_options_without_effect_are_refused(
    results: Path, capsys: Any, words: str, said: str
) -> None:
    code, out, err = call(capsys, *words.split())
    assert (code, out) == (2, "")
    assert said in err


def test_steps_over_other_links_are_not_what_was_forecast(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    """The same steps of the same GPUs ran over shaped links first, over the calibration's later."""
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    assert call(capsys, "predict", "plan.csv", "--out", "sealed.json", "--draws", "20")[0] == 0
    sealed = json.loads((tmp_path / "sealed.json").read_text())
    for one in sealed["cases"]:
        one["config"]["nodes"] = 2
    write_json(tmp_path / "sealed.json", sealed)
    own = results / "4x-h200" / "run-1"
    rows = read_table(own / "training.csv", TrainingRow)
    across = [row.model_copy(update={"nodes": 2}) for row in rows]
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
    assert value["forecast"]["over_other_links"] == len(SPLITS)
    assert value["forecast"]["measured_again"] == 0
    assert f"{len(SPLITS)} repeats over other links" in value["forecast"]["repeats"]
    # a calibration of one node says nothing of links: then the first that ran counts
    write_json(own / "manifest.json", about | {"emulated_nodes": 1})
    value = json.loads(call(capsys, *words)[1])
    assert {one["system"] for one in value["cases"]} == {"2x-h200-10000mbit"}
    assert value["forecast"]["over_other_links"] == 0


def test_a_forecast_for_gpus_never_measured(results: Path, tmp_path: Path, capsys: Any) -> None:
    """The calibration moved to H100; steps of the system's own GPUs are not what it forecast."""
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())

    def sealed(name: str, *more: str) -> dict[str, Any]:
        code, _, err = call(capsys, "predict", "plan.csv", "--out", name, "--draws", "20", *more)
        assert code == 0, err
        return dict(json.loads((tmp_path / name).read_text()))

    own, other = sealed("own.json"), sealed("h100.json", "--node", "hgx-h100")
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


def test_plan_that_is_none(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "plan.csv").write_text("case_id,model\n")
    code, _, err = call(capsys, "predict", "plan.csv", "--out", "sealed.json")
    assert code == 2
    assert "plan.csv: the column 'layers' is missing" in err
    assert not (tmp_path / "sealed.json").exists()


def test_coverage_is_clopper_pearson() -> None:
    """18 of 20: the exact 95 % interval, as printed in tables of the binomial distribution."""
    held = coverage(18, 20)
    assert held is not None
    assert held["low"] == pytest.approx(0.683, abs=1e-3)
    assert held["high"] == pytest.approx(0.988, abs=1e-3)


def test_winkler_score() -> None:
    one = np.array([1.0])
    assert winkler(one, 0.9 * one, 1.1 * one)[0] == pytest.approx(0.2)
    assert winkler(one, 1.1 * one, 1.3 * one)[0] == pytest.approx(0.2 + 20 * 0.1)


def test_a_clock_that_never_moves_is_inside() -> None:
    """A CPU's at 2499.982 MHz, of which a calibration keeps six digits; 1 MHz above it is not."""
    held = {"low": 2404.2, "high": 2499.98}
    for real, inside in ((2499.982, 1), (2500.98, 0), (2403.2, 0)):
        entry = {"predicted_clock_mhz": held, "real_clock_mhz": real}
        assert _inside([entry], "clock_mhz") == inside


def test_summary_of_nothing() -> None:
    assert summarise([])["mape"] is None


GRID = """
gpus: [4, 2]
families:
  - {model: llama3-8b, layers: [4, 8], seq_len: [2048]}
  - {model: llama2-13b, layers: [4], seq_len: [2048]}
step_time_s: [0.001, 10]
"""


def test_drawn_plan(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)

    def predict_drawn(name: str, seed: str) -> tuple[int, str, str]:
        words = (
            "--draw",
            "8",
            "--seed",
            seed,
            "--plan-out",
            f"{name}.csv",
            "--out",
            f"{name}.json",
        )
        return call(capsys, "predict", "grid.yaml", *words)

    assert predict_drawn("a", "1a2b3c")[0] == 0
    assert predict_drawn("b", "1a2b3c")[0] == 0
    assert predict_drawn("c", "ffffff")[0] == 0
    plans = {name: (tmp_path / f"{name}.csv").read_text() for name in "abc"}
    assert plans["a"] == plans["b"] != plans["c"]
    drawn = read_table(tmp_path / "a.csv", TrainingConfig)
    measured = {(row.hidden, row.tp, row.pp) for row in configs()}
    assert sum((row.hidden, row.tp, row.pp) not in measured for row in drawn) >= 4
    code, _, err = predict_drawn("a", "1a2b3c")
    assert code == 2
    assert "a plan is drawn once" in err


def test_a_row_of_shards_is_simulated_with_its_own_queues(results: Path, capsys: Any) -> None:
    """Of one queue where the row says so; a plan's row has several."""
    (run,) = (path.parent for path in (results / "4x-h200").glob("*/training.csv"))
    sharded = Parallelism(dp=2, zero=3, overlap=True, global_batch=8)
    config = TrainingConfig.of("sharded", MODEL, sharded).model_dump()
    done = {"status": "done", "steps": 3, "step_time_median_s": 1.0}
    found = []
    for words in ("x; CUDA_DEVICE_MAX_CONNECTIONS=1", "x; CUDA_DEVICE_MAX_CONNECTIONS unset"):
        row = TrainingRow(**config, **done, framework=words)
        write_table(run / "training.csv", TrainingRow, [row])
        code, out, err = call(capsys, str(results), "--json", "--draws", "20")
        assert code == 0, err
        found.append(json.loads(out)["cases"][0]["predicted_s"]["median"])
    assert found[0] > 1.01 * found[1]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/forecasts/grid*.yaml")), ids=str)
def test_what_committed_grids_draw_can_be_measured(path: Path) -> None:
    """And across the nodes that they say; new kinds of steps come up."""
    grid = parse(Grid, read_yaml(path, "a grid of configurations"), str(path))
    rng = random.Random("1a2b3c")
    drawn = [one for one in (_random(grid, rng) for _ in range(3000)) if one is not None]
    assert len(drawn) > 100
    for model, p in drawn:
        refuse(model, p)
        assert p.gpus in grid.gpus
        assert grid.tp is None or p.tp in grid.tp
        assert p.gpus % grid.nodes == 0
    kinds = {
        "cp": any(p.cp > 1 for _, p in drawn),
        "uneven": any(p.layers_per_stage for _, p in drawn),
        "sharded": any(p.zero == 3 for _, p in drawn),
        "lora": any(model.lora_rank for model, _ in drawn),
    }
    wanted = {
        "cp": max(grid.cp) > 1,
        "uneven": any(grid.uneven),
        "sharded": 3 in grid.zero,
        "lora": any(max(family.lora_rank) for family in grid.families),
    }
    assert kinds == wanted


def test_a_draw_without_seed_or_from_a_bad_grid(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    code, _, err = call(capsys, "predict", "grid.yaml", "--draw", "2", "--out", "s.json")
    assert (code, "--draw needs --seed" in err) == (2, True)
    (tmp_path / "grid.yaml").write_text("gpus: []\nfamilies: []")
    words = ("--draw", "2", "--seed", "1", "--plan-out", "p.csv", "--out", "s.json")
    code, _, err = call(capsys, "predict", "grid.yaml", *words)
    assert code == 2
    assert "grid.yaml: gpus is []" in err
    for name in ("tp", "vpp", "cp", "microbatch", "zero"):
        (tmp_path / "grid.yaml").write_text(f"{GRID}\n{name}: []\n")
        code, _, err = call(capsys, "predict", "grid.yaml", *words)
        assert (code, f"grid.yaml: {name} is []" in err) == (2, True)


def profile(case_id: str, rank: int, **seconds: tuple[float, ...]) -> list[ProfileRow]:
    """Rows of one rank: {part: (time,) or (time, exposed, waiting)}."""
    found = []
    for part, times in seconds.items():
        fields = dict(zip(("time_s", "exposed_s", "waiting_s"), times, strict=False))
        row = {"case_id": case_id, "role": "judge", "rank": rank, "part": part} | fields
        found.append(ProfileRow.model_validate(row))
    return found


def test_components_of_a_profile_are_those_of_the_rank_that_computes_most() -> None:
    early = {"tp": (0.7, 0.7, 0.6), "idle": (0.07,), "optimizer": (0.03,)}
    rows = profile("a", 0, step=(1.0,), gemm=(0.2,), **early)
    late = {"tp": (0.15, 0.15, 0.05), "optimizer": (0.05,)}
    rows += profile("a", 1, step=(1.0,), gemm=(0.7,), memory=(0.1,), **late)
    found = components.measured(rows, timed_s=1.0)
    assert found is not None
    assert (found["gemm"], found["memory"]) == (0.7, 0.1)
    assert found["tp"] == pytest.approx(0.10)
    assert found["optimizer"] == pytest.approx(0.03)
    assert found["waiting"] == pytest.approx(0.07)
    assert sum(found.values()) == pytest.approx(1)
    # a profiler slows the host, and so what waits for it
    faster = components.measured(rows, timed_s=0.95)
    assert faster == found | {"waiting": pytest.approx(0.02)}
    assert components.measured([], timed_s=1.0) is None


def test_simulated_components_add_up_to_the_step(results: Path) -> None:
    calibration = read_calibration(results / "4x-h200" / "calibration.json")
    for config in configs():
        found = predict(config, calibration, load_node("4x-h200"), load_fabric("ndr400-rail"), 0)
        assert found.components_s is not None
        whole = sum(found.components_s.values())
        assert whole == pytest.approx(found.step_time_s["median"], rel=1e-6)
        assert found.components_s["gemm"] > 0.3 * whole
        assert (found.components_s["tp"] > 0) == (config.tp > 1)


def test_errors_by_component(results: Path, tmp_path: Path, capsys: Any) -> None:
    """A profile in a run of its own: 10 % of the step too little in products, as much too much in
    waiting."""
    row = configs()[1]
    calibration = read_calibration(results / "4x-h200" / "calibration.json")
    node, fabric = load_node("4x-h200"), load_fabric("ndr400-rail")
    made = predict(row, calibration, node, fabric, draws=0).components_s
    assert made is not None
    step = sum(made.values())
    real = dict(made) | {"gemm": made["gemm"] + 0.1 * step}
    real["waiting"] -= 0.1 * step
    real["waiting"], real["tp"] = max(real["waiting"], 0.0), made["tp"]
    parts = {name: (real[name],) for name in ("gemm", "attention", "memory", "optimizer")}
    rows = profile(
        row.case_id, 0, **parts, tp=(real["tp"], real["tp"], 0.0), idle=(real["waiting"],)
    )
    run = next((results / "4x-h200").glob("*/training.csv")).parent
    write_table(run / "profile.csv", ProfileRow, rows)
    code, out, err = call(capsys, "results", "--json", "--report", "v.html")
    assert code == 0, err
    value = json.loads(out)
    found = {one["component"]: one for one in value["components"]}
    assert found["gemm"]["n"] == 1
    assert found["gemm"]["bias"] < -0.05
    lost = abs(float(f"{real['tp']:.7g}") - real["tp"])  # of the digits that the table keeps
    assert found["tp"]["error"] == pytest.approx(lost / sum(real.values()), abs=1e-11)
    assert found["waiting"]["bias"] >= 0
    # no other profile to take a baseline from
    assert (found["gemm"]["neighbour_error"], found["gemm"]["mean_error"]) == (None, None)
    page = (tmp_path / "v.html").read_text()
    assert "Which part is off" in page
    assert "Coverage by group" in page


def test_baselines_of_components_come_from_other_profiles(tmp_path: Path) -> None:
    """Products are 40, 50 and 60 % of three steps; the nearest of 8 sequences has 2 or 16."""
    calibration = write_calibration(tmp_path / "calibration.json")
    node, fabric = load_node("4x-h200"), load_fabric("ndr400-rail")
    cases = []
    for share, batch in ((0.4, 2), (0.5, 8), (0.6, 16)):
        config = TrainingConfig.of(f"case-{batch}", MODEL, Parallelism(global_batch=batch))
        step_s = 0.1 * batch
        more = {"status": "done", "framework": "made up", "steps": 1, "step_time_median_s": step_s}
        row = TrainingRow.model_validate(config.model_dump() | more)
        parts = {"gemm": (share * step_s,), "idle": ((1 - share) * step_s,)}
        cases.append(
            Case(row, predict(row, calibration, node, fabric, 0), profile=profile("a", 0, **parts))
        )
    value = validation(cases)
    found = {one["component"]: one for one in value["components"]}["gemm"]
    # time goes with FLOPs here, so the nearest one's share stays: 50, 60 and 50 %
    assert found["neighbour_error"] == pytest.approx((0.1 + 0.1 + 0.1) / 3)
    assert found["mean_error"] == pytest.approx((0.15 + 0.0 + 0.15) / 3)
    assert value["cases"][0]["mean_components_s"]["gemm"] == pytest.approx(0.55 * 0.2)
    text = table(value)
    assert "as baselines, the nearest profile 10.0%, the mean share 10.0%" in text
    assert "nearest profile's" in render(value).replace("&#39;", "'")


def test_groups_say_what_is_too_narrow_and_what_too_wide() -> None:
    def entries(width: float, error: float) -> list[dict[str, Any]]:
        interval = {"median": 1 + error, "low": 1 + error - width, "high": 1 + error + width}
        one = {"kind": "TP", "model": "m", "gpus": 4, "real_s": 1.0, "predicted_s": interval}
        return [one | {"error": error}] * 40

    assert "too narrow" in wide_or_narrow(grouped(entries(0.01, 0.05)))[0]
    assert "4.8 median errors wide" in wide_or_narrow(grouped(entries(0.2, 0.04)))[0]
    assert wide_or_narrow(grouped(entries(0.08, 0.04))) == []
    assert set(grouped(entries(0.1, 0.1))) == {"kind", "scale", "model", "system"}


def test_a_small_group_may_be_wide_by_chance() -> None:
    def entries(count: int) -> list[dict[str, Any]]:
        interval = {"median": 1.02, "low": 0.95, "high": 1.09}  # half-width 3.4 errors
        one = {"kind": "TP", "model": "m", "gpus": 4, "real_s": 1.0, "predicted_s": interval}
        return [one | {"error": 0.02}] * count

    assert wide_or_narrow(grouped(entries(5))) == []
    assert "3.4 median errors wide" in wide_or_narrow(grouped(entries(80)))[0]
    likely = [summarise(entries(count))["width_by_chance"] for count in (1, 5, 80, 2000)]
    assert likely[0]["low"] < likely[1]["low"] < likely[2]["low"] < Z90 / 0.674
    assert likely[0]["high"] > likely[1]["high"] > likely[2]["high"] > Z90 / 0.674
    assert likely[3] == pytest.approx({"low": 2.44, "high": 2.44}, rel=0.06)
    # of one case: half-widths over |normal| at its 5th and 95th percentile
    assert likely[0] == pytest.approx({"low": 0.84, "high": 26.0}, rel=0.2)


def test_a_group_that_scores_worse_than_the_constant_rate_is_said() -> None:
    rows = [(1.0, 1.001), (1.0, 0.999), (1.0, 1.002), (1.0, 0.998)]
    interval = {"median": 1.1, "low": 0.8, "high": 1.4}
    found = [
        {"kind": "TP", "model": "m", "gpus": 4, "real_s": real, "baseline_s": guess}
        | {"predicted_s": interval}
        for real, guess in rows
    ]
    assert "kind TP scores worse than the constant rate's" in wide_or_narrow(grouped(found))
    better = [one | {"baseline_s": 3.0**place} for place, one in enumerate(found)]
    assert not any("worse" in words for words in wide_or_narrow(grouped(better)))
