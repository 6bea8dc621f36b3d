"""What a step on a CPU has beside its kernels, and in what state those are timed."""

import os
from pathlib import Path

import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.host.overhead import MEASURED_SD, fit_host
from calibrate.network.own import crossings
from measure.devices.cpu import CACHE_BYTES, last_level_cache
from measure.suites import host_time
from measure.timed import cpu_memory
from simulate.step.estimate import StepSimulator
from spec.calibration import Calibration
from spec.files import read_json, write_json, write_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import CollectiveRow, HostRow
from spec.results import read_result_set
from spec.step import copied_alone, stage_parameters
from tests.made_up import calibration_json
from tests.synthetic import write_result_set
from topologies import load_fabric, load_node

MODEL = load_model("small")


def test_the_largest_cache_is_read(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "32M", "lots")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 32 * 2**20
    assert last_level_cache(tmp_path / "nowhere") == CACHE_BYTES


def test_operands_take_turns_so_that_no_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from measure.devices.fake import FakeDevice
    from measure.suites.kernels import in_turn
    from measure.timed import timing

    monkeypatch.setattr(timing, "last_level_cache", lambda: 2**20)
    timer = timing.CpuTimer(FakeDevice(0))
    assert timer.sets(2**30) == 1  # flushes them by itself
    assert timer.sets(2**18) == 8
    assert timer.sets(1.0) == timing.MOST_SETS
    ran: list[int] = []
    call = in_turn([lambda number=number: ran.append(number) for number in range(3)])  # type: ignore[misc]
    for _ in range(4):
        call()
    assert ran == [0, 1, 2, 0, 1, 2, 0]


def test_the_users_own_tunables_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu_memory.TUNABLES, raising=False)
    cpu_memory.prepare()
    assert "tcache_count=0" in os.environ[cpu_memory.TUNABLES]
    monkeypatch.setenv(cpu_memory.TUNABLES, "glibc.malloc.check=3")
    cpu_memory.prepare()
    assert os.environ[cpu_memory.TUNABLES] == "glibc.malloc.check=3"


def test_every_size_is_repeated_twenty_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from measure.suites import collectives

    for there in (False, True):
        monkeypatch.setattr(collectives, "on_host", lambda there=there: there)
        for gpu in (False, True):
            assert min(collectives.repeats_of(2**size, gpu) for size in range(10, 31)) == 20


def test_a_cpu_has_one_host_case_and_a_fake_device_none() -> None:
    assert host_time.cases("fake", 4) == []
    (whole,), (fifth,) = host_time.cases("cpu"), host_time.cases("cpu", share=0.2)
    assert whole.case_id == fifth.case_id
    assert whole.seconds < fifth.seconds


def test_a_step_whose_arithmetic_is_nil() -> None:
    pytest.importorskip("megatron.core")
    row = host_time.measure(host_time.HostCase(1.0), "cpu")
    assert row.median_us > row.kernels_us
    assert row.single_us > row.single_kernels_us
    assert row.median_us > row.single_us
    assert row.repeats >= 20
    assert row.parts == 2 * (12 * host_time.LAYERS + 4)


def host_row(microbatches: int, single_us: float, several_us: float) -> HostRow:
    """What the host adds to a step of one microbatch and of several."""
    names = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
    return HostRow(
        case_id="nil",
        role="fit",
        repeats=40,
        std_us=0.0,
        layers=3,
        microbatches=microbatches,
        parts=80,
        kernels_us=1000.0 * microbatches,
        single_us=single_us + 1000.0,
        single_kernels_us=1000.0,
        **dict.fromkeys(names, several_us + 1000.0 * microbatches),
    )


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_the_hosts_time_is_fitted_where_rows_show_it(tmp_path: Path, share: float) -> None:
    folder = write_result_set(tmp_path)
    manifest = read_json(folder / "manifest.json", "")
    host = manifest["hosts"][0]
    host["devices"] = [host["devices"][0] | {"kind": "cpu"}]
    host["cores"] = share
    write_json(folder / "manifest.json", manifest)

    def fitted() -> tuple[float, float, float, set[str]]:
        ledger = Ledger()
        fit = fit_host(Evidence("a", [read_result_set(folder)]), (), ledger)
        assert fit.serial
        return fit.part_us, fit.step_us, fit.sd, {one.source for one in ledger.parameters}

    assert fitted()[3] == {"assumed"}
    # 2 ms a step, 3 ms a pass of 80 parts
    write_table(folder / "host.csv", HostRow, [host_row(5, 5000.0, 17000.0)])
    part_us, step_us, sd, sources = fitted()
    assert part_us == pytest.approx(37.5 / share)
    assert step_us == pytest.approx(2000.0 / share)
    assert (sd, sources) == (MEASURED_SD, {"measured"})


@pytest.mark.parametrize(("kind", "cores", "expected"), [("cpu", 0.2, 6.0), ("cpu", 1.0, 1.0)])
def test_waits_for_a_turn_count_as_often_as_they_come(
    tmp_path: Path, kind: str, cores: float, expected: float
) -> None:
    folder = write_result_set(tmp_path)
    value = read_json(folder / "manifest.json", "")
    one = value["hosts"][0]
    device = one["devices"][0] | {"kind": kind}
    hosts = [one | {"cores": cores, "devices": [device | {"index": n}]} for n in (0, 1)]
    write_json(folder / "manifest.json", value | {"hosts": hosts})
    row = CollectiveRow(
        case_id="a",
        role="fit",
        repeats=40,
        median_us=1.0,
        p10_us=0.5,
        p90_us=20.0,
        min_us=0.4,
        mean_us=6.0,
        std_us=8.0,
        collective="all_gather",
        backend="gloo",
        ranks=2,
        nodes=2,
        bytes=1024,
        dtype="fp32",
        busbw_gbytes_per_s=1.0,
    )
    write_table(folder / "collectives.csv", CollectiveRow, [row])
    (crossing,) = crossings(Evidence("a", [read_result_set(folder)]))["tcp"]
    assert crossing.sample.time_us == expected


def test_gloo_copies_where_a_replica_is_alone() -> None:
    alone = Parallelism(tp=2, pp=2, global_batch=4)
    for stage in (0, 1):
        (held, _), kernels = (
            stage_parameters(MODEL, alone, stage),
            copied_alone(MODEL, alone, stage),
        )
        # fp32 gradients cloned and copied back, bf16 parameters copied in and out
        assert sum(kernel.bytes for kernel in kernels) == pytest.approx(24 * held, rel=1e-5)
    assert copied_alone(MODEL, Parallelism(dp=2, global_batch=2), 0) == ()
    assert copied_alone(MODEL, Parallelism(zero=0, global_batch=1), 0) == ()


def test_those_copies_are_of_a_cpus_steps_alone() -> None:
    def update_us(serial: bool) -> float:
        host = {"part_us": 5.0, "step_us": 1000.0, "sd": 0.3, "serial": serial}
        calibration = Calibration.model_validate(calibration_json(host=host))
        node, fabric = load_node("hgx-h200"), load_fabric("ndr400-rail")
        p = Parallelism(global_batch=1)
        simulator = StepSimulator(MODEL, p, node, fabric, calibration, draws=0)
        return float(simulator.run().priced.updates[0].kernels_us)

    assert update_us(True) > update_us(False)
