"""Result sets survive kills at any moment; windows add up."""

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from measure.budget import by_worth
from measure.checks.suite import LoadCase
from measure.devices import Device
from measure.devices.fake import FakeDevice
from measure.hosts.window import Window
from measure.plans.file import PlanFile
from measure.result_set import left_to_do, refuse_other_devices, reopen_store
from measure.store.write import Store, done_so_far, find_run
from measure.wanted import Options
from spec.errors import UserError
from spec.files import write_json
from spec.manifest import Device as Described
from spec.manifest import Host, Manifest
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import CollectiveRow, QueuedRow
from spec.results import find_result_sets, read_result_set
from spec.training_records import TrainingConfig, TrainingRow

ROOT = Path(__file__).parent.parent
ROW = CollectiveRow(
    case_id="a",
    role="fit",
    repeats=1,
    median_us=1.0,
    p10_us=1.0,
    p90_us=1.0,
    min_us=1.0,
    mean_us=1.0,
    std_us=0.0,
    collective="all_reduce",
    backend="gloo",
    ranks=2,
    nodes=1,
    bytes=1024,
    dtype="fp32",
    busbw_gbytes_per_s=1.0,
)


def new_store(root: Path, devices: int = 1, **more: Any) -> Store:
    found = [FakeDevice(index).describe() for index in range(devices)]
    host = Host(name_hash="0", cpu="x", cores=1, memory_gib=1.0, devices=found)
    return Store.create(
        root,
        system="fake",
        run="r1",
        hosts=[host],
        interconnect="",
        software={},
        environment={},
        command="python -m measure.run",
        suites=["collectives"],
        **more,
    )


def test_a_run_that_is_going_on_is_not_continued_beside(tmp_path: Path) -> None:
    """Both wrote each case once, said that all was well, and left a table with every row twice."""
    store = new_store(tmp_path, plan={})
    half = store.folder / ".manifest.json.1"  # what it is writing
    half.write_text("{")
    with pytest.raises(UserError, match="another process is measuring this run now"):
        Store.reopen(store.folder)
    assert half.exists()
    store.release()
    Store.reopen(store.folder).release()


def test_runs_begun_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (new_store(tmp_path, plan={}, numbered=True) for _ in range(2))
    assert [one.folder.name for one in (first, second)] == ["r1", "r1-2"]
    assert [one.manifest.run for one in find_result_sets(tmp_path)] == ["r1", "r1-2"]
    first.release()
    second.release()


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_half_written_row_is_dropped(tmp_path: Path, cut: int) -> None:
    store = new_store(tmp_path)
    store.append("collectives", [ROW])
    table = store.folder / "collectives.csv"
    whole = table.read_text()
    store.append("collectives", [ROW.model_copy(update={"case_id": "b"})])
    table.write_text(whole + table.read_text()[len(whole) :][:cut])
    again = Store.reopen(store.folder)
    assert again.done("collectives") == {"a"}
    assert table.read_text() == whole


@pytest.mark.parametrize("rows", [0, 1])
def test_what_a_full_disk_takes_of_a_row_is_not_kept(tmp_path: Path, rows: int) -> None:
    """Else the next row stands behind a half one, and no row of the table can be read any more."""
    store = new_store(tmp_path)
    store.append("collectives", [ROW.model_copy(update={"case_id": f"r{n}"}) for n in range(rows)])
    table = store.folder / "collectives.csv"
    room = 60 + (table.stat().st_size if rows else 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.append("collectives", [ROW])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.append("collectives", [ROW.model_copy(update={"case_id": "b"})])
    expected = {*(f"r{n}" for n in range(rows)), "b"}
    assert (
        read_result_set(store.folder).cases(CollectiveRow) == store.done("collectives") == expected
    )


def test_a_half_written_header_is_dropped(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    (store.folder / "collectives.csv").write_text("case_id,ro")
    again = Store.reopen(store.folder)
    again.append("collectives", [ROW])
    assert [row.case_id for row in read_result_set(again.folder).table(CollectiveRow)] == ["a"]


def test_a_step_that_failed_is_not_done(tmp_path: Path) -> None:
    """To who asks what a resumed run would do, as to the run itself."""
    store = new_store(tmp_path)
    for case, status in (("a", "done"), ("b", "failed")):
        config = TrainingConfig.of(case, load_model("tiny"), Parallelism())
        fields = {"status": status, "framework": "made up", "steps": 1, "step_time_median_s": 1.0}
        store.append("training", [TrainingRow.model_validate(config.model_dump() | fields)])
    asked = done_so_far(store.folder)
    again = Store.reopen(store.folder)
    again.retry_failed_training()
    assert asked["training"] == again.done("training") == {"a"}


def test_the_manifest_is_whole_at_any_time(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.append("collectives", [ROW])
    store.skip("x", "needs\nmore")
    store.save("complete")
    value = json.loads((store.folder / "manifest.json").read_text())
    manifest = Manifest.model_validate(value)
    assert (manifest.status, manifest.finished) == ("complete", 1)
    assert manifest.skipped == {"x": "needs more"}
    assert manifest.ended is not None


def test_a_run_is_found_by_id_system_or_path(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    for name in ("r1", "fake/r1", str(store.folder)):
        assert find_run(tmp_path, name) == store.folder
    with pytest.raises(UserError, match="no run 'r2'"):
        find_run(tmp_path, "r2")
    for name in ("fake", str(store.folder.parent)):
        with pytest.raises(UserError, match=r"fake: is a system; name one of its runs: r1$"):
            find_run(tmp_path, name)
    with pytest.raises(UserError, match="name another with --run"):
        new_store(tmp_path)
    store.append("collectives", [ROW])
    (store.folder / "manifest.json").unlink()
    for name in ("r1", "fake/r1", str(store.folder)):
        with pytest.raises(UserError, match=r"r1: has collectives.csv but no manifest.json; rest"):
            find_run(tmp_path, name)


def described(device: FakeDevice, name: str) -> Described:
    return FakeDevice.describe(device).model_copy(update={"name": name})


def test_a_system_has_devices_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of another GPU than was asked for once ended up among an H100's runs."""
    store = new_store(tmp_path)
    system, fakes = store.folder.parent, [FakeDevice(0), FakeDevice(1)]
    other = FakeDevice(1)
    monkeypatch.setattr(other, "describe", lambda: described(FakeDevice(1), "NVIDIA H200"))
    refuse_other_devices(system, fakes)
    with pytest.raises(UserError, match="here is NVIDIA H200; name another system with --system"):
        refuse_other_devices(system, [other])
    with pytest.raises(UserError, match="here are Fake accelerator, NVIDIA H200; a run is on"):
        refuse_other_devices(system, [fakes[0], other])
    later = json.loads((store.folder / "manifest.json").read_text())
    later["hosts"][0]["devices"][0]["name"] = "NVIDIA H200"
    write_json(system / "r2" / "manifest.json", later | {"run": "r2"})
    with pytest.raises(UserError, match="'fake' can be only one of them"):
        find_result_sets(tmp_path)
    write_json(system / "r2" / "manifest.json", later | {"run": "r2", "system": "h200"})
    assert len(find_result_sets(tmp_path)) == 2
    write_json(system / "r2" / "manifest.json", later | {"run": "r2", "invalid": "another GPU"})
    assert len(find_result_sets(tmp_path)) == 1
    refuse_other_devices(system, fakes)
    with pytest.raises(UserError, match="has runs on Fake accelerator, such as r1"):
        reopen_store(store.folder, [other])
    (system / "r1" / "manifest.json").write_text("{")  # for who reads it to say
    refuse_other_devices(system, [other])


def test_a_window_reads_energy_at_both_ends() -> None:
    devices: list[Device] = [FakeDevice(0), FakeDevice(1)]
    with Window(devices) as window:
        pass
    assert window.result is not None
    assert window.result.energy_j == pytest.approx(2 * 7.25)
    assert window.result.temperature_max_c == 51


def test_a_short_budget_begins_with_cheap_cases() -> None:
    cases = [LoadCase(str(number), 0.0, 0.1 if number % 2 else 10.0) for number in range(100)]
    first = by_worth(cases)[:40]
    assert first == by_worth(cases[::-1])[:40]
    assert sum(case.seconds < 1 for case in first) > 35


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"link_mbit": -5}, "link_mbit is -5"),
        ({"link_mbit": "x"}, "link_mbit is 'x'"),
        ({"share": 7}, "share is 7; input should be less than or equal to 1"),
        ({"nodes": 0}, "nodes is 0"),
        ({"suites": 3}, "suites is 3"),
        ({"plan": {"kernels": 1}}, "plan.kernels is 1"),
    ],
)
def test_a_changed_plan_of_an_unfinished_run_is_a_sentence(
    changed: dict[str, object], problem: str, tmp_path: Path
) -> None:
    options = Options(("kernels",), (), True, PlanFile(), 2, 500, 0.5)
    plan = vars(options) | {"plan": options.plan.model_dump()}
    write_json(tmp_path / "plan.json", plan)
    assert left_to_do(tmp_path) == options
    write_json(tmp_path / "plan.json", plan | changed)
    with pytest.raises(UserError, match=re.escape(f"plan.json: {problem}")):
        left_to_do(tmp_path)


def test_a_table_of_an_older_version_gets_today_s_columns(tmp_path: Path) -> None:
    """A column that its rows did not have is empty there, and what is appended fits the header."""
    old = read_result_set(ROOT / "results" / "2x-h100" / "20261124-143234")
    folder = tmp_path / old.path.name
    shutil.copytree(old.path, folder)
    assert "kernels" not in (folder / "queued.csv").read_text().partition("\n")[0]
    store = Store.reopen(folder)
    (new,) = read_result_set(ROOT / "results" / "2x-h100" / "20261128-013200").table(QueuedRow)[:1]
    store.append("queued", [new.model_copy(update={"case_id": "another"})])
    store.release()
    assert [one.case_id for one in read_result_set(folder).table(QueuedRow)] == ["another"]
    assert len(read_result_set(folder).cases(QueuedRow)) == len(old.cases(QueuedRow)) + 1
