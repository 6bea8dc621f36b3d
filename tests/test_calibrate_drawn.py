"""What kernels draw once they are launched, from rows that ran sustained."""

import pytest

from calibrate.kernels.drawn import ASSUMED_SD, PRODUCTS_BY_RATE, powers
from calibrate.kernels.shapes import Group, Shape
from calibrate.state import ClockState, Drawn, Key
from spec.kernel import Kernel
from spec.kernel_fit import Physics

READY_W = 50.0
LAUNCH_US = 10.0


def clock() -> ClockState:
    return ClockState(1980.0, 700.0, 80.0, ready_w=READY_W)


def drawing(kernel: Kernel, watts: float, busy_us: float, late_us: float = 0.0) -> Drawn:
    """A row of a kernel that draws so much while it runs; in a loop it waits for its host."""
    whole_us = LAUNCH_US + busy_us + late_us
    mean = (watts * busy_us + READY_W * (LAUNCH_US + late_us)) / whole_us
    return Drawn(kernel, mean, whole_us)


def group(key: Key, rows: list[tuple[Kernel, float, float, float]]) -> Group:
    """Of kernels, their power and time while they run, and how late a loop of them is."""
    shapes = {kernel: Shape(kernel, LAUNCH_US + busy, 0.01, 1) for kernel, _, busy, _ in rows}
    drawn = tuple(drawing(*row) for row in rows if row[1])
    return Group(key, tuple(shapes.values()), (), drawn)


def found(*groups: Group) -> dict[str, tuple[float, float | None, float, str]]:
    physics = {one.key: Physics(LAUNCH_US, 800.0, 4000.0, 132) for one in groups}
    told = powers({one.key: one for one in groups}, physics, clock())
    return {"/".join(key[:2]): one[:4] for key, one in told.items()}


def product(n: int) -> Kernel:
    return Kernel("gemm", "forward", (4096, n, 4096))


def test_products_draw_by_their_rate_and_shapes_count_alike() -> None:
    """However often each was timed, at the rate that the middle one of them reaches."""
    rows = []
    for n, rate, times in ((2048, 400.0, 9), (4096, 800.0, 1), (8192, 900.0, 1)):
        watts, busy_us = 900 * (rate / 800) ** PRODUCTS_BY_RATE, product(n).flops / rate / 1e6
        rows += [(product(n), watts, busy_us, 0.0)] * times
    told = found(group(("gemm", "forward", "bf16"), rows))["gemm/forward"]
    assert told == pytest.approx((900.0, 800.0, 0.01, told[3]))
    assert told[3] == "measured"


def test_a_loop_that_waits_for_its_host_does_not_draw_less_once_launched() -> None:
    copies = [Kernel("copy", "forward", (2**n,)) for n in (20, 22, 24)]
    rows = [(copies[0], 500.0, 20.0, 30.0), (copies[1], 500.0, 80.0, 5.0)]
    told = found(group(("copy", "forward", "bf16"), [*rows, (copies[2], 520.0, 300.0, 0.0)]))
    assert told["copy/forward"][:2] == (pytest.approx(500.0), None)


def test_narrow_products_draw_one_power_whatever_their_rate() -> None:
    """Their rows say `gemm`, as all products do."""
    rows = [(Kernel("gemm", "forward", (8192, n, 4096)), 560.0, 20.0 + n, 0.0) for n in (8, 32)]
    narrow = [(Kernel("narrow_gemm", "forward", one.dims), *rest) for one, *rest in rows]
    shapes = group(("narrow_gemm", "forward", "bf16"), narrow)
    told = found(Group(shapes.key, shapes.shapes, (), tuple(drawing(*row) for row in rows)))
    assert told["narrow_gemm/forward"][:3] == (pytest.approx(560.0), None, 0.05)


def test_what_no_row_shows_draws_as_its_like_or_its_kind() -> None:
    long = Kernel("attention", "forward", (1, 8192, 32, 8, 128))
    block = Kernel("attention_block", "forward", (1, 4096, 2048, 32, 8, 128))
    copy, gelu = Kernel("copy", "forward", (2**28,)), Kernel("gelu", "forward", (8192, 8192))
    many = Kernel("grouped_gemm", "forward", (8, 16384, 14336, 4096))
    groups = [
        group(("gemm", "forward", "bf16"), [(product(8192), 920.0, 900.0, 0.0)]),
        group(("attention", "forward", "bf16"), [(long, 730.0, 1000.0, 0.0)]),
        group(("copy", "forward", "bf16"), [(copy, 540.0, 900.0, 0.0)]),
        group(("attention_block", "forward", "bf16"), [(block, 0.0, 500.0, 0.0)]),
        group(("grouped_gemm", "forward", "bf16"), [(many, 0.0, 2800.0, 0.0)]),
        group(("gelu", "forward", "bf16"), [(gelu, 0.0, 99.0, 0.0)]),
    ]
    told = found(*groups)
    assert told["attention_block/forward"] == (
        pytest.approx(730.0),
        None,
        ASSUMED_SD,
        "assumed",
    )
    assert told["grouped_gemm/forward"][0] == pytest.approx(920.0)
    assert told["grouped_gemm/forward"][1] == told["gemm/forward"][1]
    assert told["gelu/forward"][0] == pytest.approx(540.0)
    alone = found(groups[-1])["gelu/forward"]
    assert alone[0] == pytest.approx(0.6 * (700 - 80))
