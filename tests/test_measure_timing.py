"""The GPU's timing loops on a stand-in for torch.cuda whose clock advances by known amounts."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from measure.devices.fake import FakeDevice  # noqa: E402
from measure.suites.interference import _two_streams  # noqa: E402
from measure.timed import timing  # noqa: E402

CALL_S = 1e-3
SM_HZ, LAUNCH_S = 1.5e9, 4e-6  # of the stand-in's spins


class FakeCuda:
    """One queue whose clock moves only when work is added; events read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0

    def work(self, seconds: float) -> None:
        self.now += seconds

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.query = lambda: True
        event.synchronize = lambda: None
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(wait_event=lambda event: None)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def set_device(self, index: int) -> None: ...

    def synchronize(self, device: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: Any) -> int:
        return 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10 * 2**30, 20 * 2**30

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(L2_cache_size=1024)

    def _sleep(self, cycles: int) -> None:
        self.slept += cycles
        self.now += LAUNCH_S + cycles / SM_HZ


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[timing.GpuTimer, FakeCuda]:
    cuda = FakeCuda()
    monkeypatch.setattr(timing, "_cuda", cuda)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: empty(*size, dtype=options["dtype"])
    )
    # sustained load is judged by the clock of the host: let it follow the device's
    monkeypatch.setattr(timing.time, "perf_counter", lambda: cuda.now)
    return timing.GpuTimer(0, FakeDevice(0)), cuda


def test_a_burst_times_the_call_alone(gpu: tuple[timing.GpuTimer, FakeCuda]) -> None:
    timer, cuda = gpu
    found = timer.burst(lambda: cuda.work(CALL_S), nbytes=100)
    assert len(found.times_us) == 60  # as many as fill BURST_S
    assert found.times_us == pytest.approx([1e3] * 60)
    assert found.host_us == pytest.approx(1e3)
    assert cuda.slept > 0
    assert found.state.clock_median_mhz == pytest.approx(1500)
    assert found.state.power_mean_w is not None


def test_sustained_load_leaves_out_the_settling(gpu: tuple[timing.GpuTimer, FakeCuda]) -> None:
    timer, cuda = gpu
    found = timer.sustained(lambda: cuda.work(CALL_S), seconds=2.0)
    # batches of 20 ms, of which those after SETTLE_S are kept
    assert 50 <= len(found.times_us) <= 62
    assert found.times_us == pytest.approx([1e3] * len(found.times_us))
    assert found.state.clock_median_mhz == pytest.approx(1500)
    assert cuda.now == pytest.approx(2.0, abs=0.1)


def test_a_fifth_of_free_memory_is_left_alone(gpu: tuple[timing.GpuTimer, FakeCuda]) -> None:
    timer, _ = gpu
    assert timer.limit_bytes == 8 * 2**30


def test_two_streams_are_fed_in_turns(gpu: tuple[timing.GpuTimer, FakeCuda]) -> None:
    timer, cuda = gpu
    kernels, collectives = _two_streams(
        timer, lambda: cuda.work(1e-3), lambda: cuda.work(2e-3), repeats=40, count=20
    )
    # the stand-in has one queue: each runs alone, two kernels after every collective
    assert kernels == pytest.approx([1e3] * len(kernels))
    assert collectives == pytest.approx([2e3] * len(collectives))
    assert len(kernels) >= 36
    assert len(collectives) >= 18


@pytest.mark.parametrize("shared", [False, True])
def test_a_share_of_a_core_is_timed_over_many_turns(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """A call of 1 ms on a host that runs 4 ms of every 20: five times as long, not as fast."""
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 1e-3
        if shared and round(now * 1e3) % 20 == 4:
            now += 16e-3  # the turn is over

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing.namespaces, "on_share", lambda: shared)
    timer = timing.CpuTimer(FakeDevice(0))
    found = timer.burst(call, 0.0).times_us
    assert len(found) >= timing.MIN_REPEATS
    expected = 5000.0 if shared else 1000.0
    assert sorted(found)[len(found) // 2] == pytest.approx(expected, rel=0.03)
    assert sorted(timer.sustained(call, 1.0).times_us)[10] == pytest.approx(expected, rel=0.03)
