"""Waiting for the slowest: formulas against drawn clusters, what-ifs, and honest tails."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.telemetry import read_columns
from measure.suites.turns import SETTLE_S
from simulate.cost.uncertainty import Draws
from simulate.project import main
from simulate.step.stragglers import (
    HUNT_US,
    MTBF_HOURS,
    SlowGpus,
    goodput,
    jitter,
    largest,
    lateness,
    left_of_hunting,
    quantile,
    read_slow_gpus,
    step_spread,
)
from spec.clock_fit import ClockFit
from spec.errors import UserError
from spec.files import write_json
from spec.parallelism import Parallelism
from tests.commands import projected
from topologies import load_fabric

ROOT = Path(__file__).parent.parent
NORMAL = np.zeros(1)
ALIKE = np.zeros(1), NORMAL  # no spread among GPUs


def plan(tp: int, pp: int, dp: int, microbatches: int) -> Parallelism:
    return Parallelism(
        tp=tp, pp=pp, dp=dp, global_batch=dp * microbatches, sequence_parallel=tp > 1
    )


def drawn_steps(p: Parallelism, slowness: Any) -> Any:
    """Step times of clusters of GPUs (clusters, dp, pp, tp), every stage's mean 1."""
    stages = slowness.max(axis=3)
    replicas = (p.microbatches - 1) * stages.max(axis=2) + stages.sum(axis=2)
    return replicas.max(axis=1) / (p.microbatches + p.pp - 1)


@pytest.mark.parametrize(
    "split",
    [(1, 1, 4, 1), (4, 1, 1, 8), (1, 4, 1, 8), (8, 4, 8, 8), (4, 8, 16, 64), (8, 1, 128, 4)],
)
def test_the_slowest_of_a_structure(split: tuple[int, int, int, int]) -> None:
    p = plan(*split)
    random = np.random.default_rng(0)
    clusters = random.standard_normal((400, p.dp, p.pp, p.tp))
    steps = drawn_steps(p, 1 + 0.01 * clusters)
    # maxima of sums are at most sums of maxima, and hardly less
    expected = 1 + 0.01 * float(lateness(p, NORMAL)[0])
    assert steps.mean() - 1 == pytest.approx(expected - 1, rel=0.12)


def test_a_tail_moves_the_slowest_of_many_but_not_of_four() -> None:
    shape = np.array([-0.9, 0.0, 0.9])
    four, many = largest(4, shape), largest(8192, shape)
    assert np.ptp(four) < 0.2
    assert many[0] < many[1] < many[2]
    assert many[2] > 1.5 * many[1]
    assert largest(1, shape).tolist() == [0, 0, 0]


def test_quantiles_of_any_tail_grow() -> None:
    shape = np.linspace(-1, 1, 9)
    values = np.array([quantile(share, shape) for share in (0.5, 0.9, 0.99, 0.9999)])
    assert (np.diff(values, axis=0) >= 0).all()


@pytest.mark.parametrize("split", [(1, 4, 4, 8), (8, 4, 4, 8), (2, 8, 16, 16)])
def test_slow_gpus_somewhere_against_drawn_clusters(split: tuple[int, int, int, int]) -> None:
    p = plan(*split)
    slow = SlowGpus(max(0.02, 1.5 / p.gpus), 1.3)
    random = np.random.default_rng(0)
    picked = random.random((2000, p.dp, p.pp, p.tp)) < slow.share
    picked = picked[picked.any(axis=(1, 2, 3))]  # at least one is
    late = drawn_steps(p, 1 + 0.3 * picked).mean() - 1
    assert slow.lateness(p, *ALIKE) == pytest.approx(late, rel=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 1, "cp": 16, "pp": 8, "dp": 4, "global_batch": 32},
        {"tp": 2, "cp": 8, "pp": 16, "dp": 4, "global_batch": 4},
        {"tp": 1, "ep": 8, "pp": 8, "dp": 16, "global_batch": 128},
    ],
)
def test_gpus_that_meet_within_a_layer_wait_for_the_slowest_of_them(fields: Any) -> None:
    """Rings of context parallelism and experts' exchanges like tensor-parallel groups."""
    p = Parallelism.model_validate(fields)
    layer = p.tp * p.cp * p.ep
    random = np.random.default_rng(0)
    clusters = random.standard_normal((2000, p.gpus // p.pp // layer, p.pp, layer))
    late = drawn_steps(p, 1 + 0.01 * clusters).mean() - 1
    assert 0.01 * float(lateness(p, NORMAL)[0]) == pytest.approx(late, rel=0.05)
    picked = random.random(clusters.shape) < 0.02
    picked = picked[picked.any(axis=(1, 2, 3))]  # at least one is
    late = drawn_steps(p, 1 + 0.3 * picked).mean() - 1
    assert SlowGpus(0.02, 1.3).lateness(p, *ALIKE) == pytest.approx(late, rel=0.1)


@pytest.mark.parametrize("split", [(4, 4, 4, 32), (2, 1, 128, 1), (1, 8, 2, 8)])
def test_where_all_gpus_are_slow_a_step_is_as_much_longer(
    split: tuple[int, int, int, int],
) -> None:
    """By any factor: they differ among themselves as all do. One alone is as slow as it is said."""
    p, spread = plan(*split), np.array([0.01])
    natural = float(lateness(p, NORMAL)[0] * spread[0])
    for factor in (1.001, 1.2):
        every = SlowGpus(1.0, factor).lateness(p, spread, NORMAL)
        assert 1 + every[0] == pytest.approx(factor * (1 + natural))
    one = SlowGpus(1 / p.gpus, 1.2)
    assert one.lateness(p, spread, NORMAL) == one.lateness(p, *ALIKE)


def test_what_if_gpus_were_slow_is_said(tmp_path: Path) -> None:
    words = "--gpus 8 --model llama3-8b --tp 2 --pp 1 --global-batch 4 --microbatch 1"
    for asked, said in (("1:1.2", " (--slow-gpus)."), ("0.125:1.0001", "slowest are as slow")):
        value = projected(tmp_path, f"{words} --slow-gpus {asked}")
        assert sum("What if: " in one and said in one for one in value["warnings"]) == 1


def test_slow_gpus_are_asked_for_in_words_that_make_sense() -> None:
    assert read_slow_gpus("0.01:1.2") == SlowGpus(0.01, 1.2)
    for text in ("", "0.01", "2:1.1", "0.1:0.9", "nan:2", "0.1:inf", "a:b"):
        with pytest.raises(UserError, match="FRACTION:FACTOR"):
            read_slow_gpus(text)
    with pytest.raises(UserError, match="less than one GPU"):
        SlowGpus(0.01, 1.2).lateness(plan(1, 1, 8, 1), *ALIKE)


def test_short_steps_spread_more_and_long_ones_still_do() -> None:
    long, short = (
        float(step_spread(8192, 8, 0.02, np.array([seconds]), Draws(0))[0])
        for seconds in (20.0, 0.1)
    )
    assert 0.001 < long < short < 0.05


@pytest.mark.parametrize("system", ["2x-h200", "2x-h100"])
def test_hunting_leaves_of_means_what_telemetry_has(system: str) -> None:
    """Clocks of products alone, the first of the turns, on a grid of 10 ms and without trend."""
    kept: dict[float, list[float]] = {0.2: [], 0.5: [], 1.0: []}  # variances
    readings: list[float] = []
    for path in sorted((ROOT / "results" / system).glob("*/telemetry.parquet")):
        if not (path.parent / "turns.csv").exists():
            continue
        columns = read_columns(path, ("time_s", "case_id", "device", "sm_clock_mhz"))
        assert columns is not None
        for device in np.unique(columns["device"]):
            mine = columns["case_id"] == f"turns-grad_accumulate-4-0-device{device:.0f}"
            mine &= (columns["device"] == device) & np.isfinite(columns["sm_clock_mhz"])
            times = columns["time_s"][mine]
            late = times > times.min() + SETTLE_S
            grid = np.arange(times[late].min(), times.max(), 0.01)
            clock = np.log(np.interp(grid, times[late], columns["sm_clock_mhz"][mine][late]))
            clock -= np.polyval(np.polyfit(grid, clock, 1), grid)
            whole = np.concatenate([[0], np.cumsum(clock)])
            for window_s, found in kept.items():
                count = round(100 * window_s)
                found.append(float(np.var(whole[count:] - whole[:-count])) / count**2)
            readings.append(float(clock.var()))
    for window_s, found in kept.items():
        assert len(found) >= 4
        expected = float(left_of_hunting(np.array(1e6 * window_s)))
        left = float(np.sqrt(np.mean(found) / np.mean(readings)))
        assert left == pytest.approx(expected, abs=0.12)


def test_hunting_is_about_half_as_wide_after_twenty_seconds_of_products() -> None:
    """Five devices of the heat suite, 20 to 140 s after their constant load began."""
    spreads = []
    for run in ("4x-h200/20261121-120032", "2x-h100/20261122-233008"):
        path = ROOT / "results" / run / "telemetry.parquet"
        columns = read_columns(path, ("time_s", "case_id", "device", "sm_clock_mhz"))
        assert columns is not None
        for device in np.unique(columns["device"]):
            mine = (columns["case_id"] == "heat-100") & (columns["device"] == device)
            mine &= np.isfinite(columns["sm_clock_mhz"])
            if not mine.any():
                continue
            since = columns["time_s"][mine] - columns["time_s"][mine].min()
            late = (since > 20) & (since < 140)
            clock = np.log(columns["sm_clock_mhz"][mine][late])
            clock -= np.polyval(np.polyfit(since[late], clock, 1), since[late])
            spreads.append(float(clock.std()))
    assert len(spreads) >= 5
    assert 0.007 < min(spreads) <= max(spreads) < 0.0135  # beside a jitter_sd of 0.02 and 0.036


def test_jitter_alone_spreads_as_drawn_clusters_do() -> None:
    # a hundred groups of one GPU, of whose hunting a step as long as HUNT_US keeps half
    random = np.random.default_rng(0)
    steps = 1 + 0.01 * random.standard_normal((20000, 100)).max(axis=1)
    drawn = np.quantile(steps, 0.95) / np.median(steps) - 1
    step_s = np.array([HUNT_US / 1e6])
    whole = float(step_spread(100, 1, 0.02, step_s, Draws(0))[0])
    still = float(step_spread(100, 1, 0.0, step_s, Draws(0))[0])
    assert (whole**2 - still**2) ** 0.5 == pytest.approx(drawn, rel=0.1)


def test_groups_within_a_layer_wait_for_all_of_a_hunt_and_replicas_for_what_a_step_leaves() -> None:
    watts = {"idle_w": 80, "power_limit_w": 700, "communication_w": 200, "waiting_w": 60}
    spreads = {"power_exponent": 1.4, "device_spread_sd": 0.0, "visit_sd": 0.0}
    clock = ClockFit.model_validate(
        {"reference_mhz": 1980, "max_mhz": 1980, "jitter_sd": 0.02, "jitter_mean": 0.005}
        | watts
        | spreads
    )
    shape, step_us = np.zeros(1), np.array([2e6])

    def waits(**split: int) -> float:
        return float(jitter(Parallelism(**split), clock, step_us, shape)[0]) - 0.005

    alone = float(largest(4, shape)[0])
    assert waits() == pytest.approx(0)
    assert waits(tp=4) == waits(cp=4) == pytest.approx(0.02 * alone)
    kept = float(left_of_hunting(step_us)[0])
    assert kept < 0.06
    assert waits(dp=4, global_batch=4) == pytest.approx(0.02 * alone * kept)
    # experts lie over replicas and context together: four GPUs are four
    assert waits(cp=4, ep=4) == waits(cp=2, dp=2, ep=4, global_batch=2) == waits(tp=4)
    full, filling = waits(pp=4, global_batch=64), waits(pp=4, global_batch=4)
    assert 0.02 * alone > full > 2 * filling > 0


def test_the_interval_of_a_spread_holds_runs_that_differ_much() -> None:
    values = step_spread(512, 8, 0.02, np.full(2001, 15.0), Draws(2000))
    low, high = np.quantile(values[1:], [0.05, 0.95])
    assert high / low > 10


def test_goodput_of_drawn_failures() -> None:
    found: Any = goodput(16384)
    assert found["failure_every_hours"] == pytest.approx(54 * 24 / 419)
    assert found["share"]["low"] < 0.9 < found["share"]["high"]
    assert found["share"]["median"] == pytest.approx(0.9, abs=0.02)  # "higher than 90 %"
    # draws: work of a checkpoint's interval until it is done, every failure restarting it
    random = np.random.default_rng(0)
    mean_s, work = MTBF_HOURS * 3600 / 16384, found["checkpoint_every_s"]
    spent, whole = 0.0, 3000
    for _ in range(whole):
        while (alive := random.exponential(mean_s)) < work + 30:
            spent += alive
            while (again := random.exponential(mean_s)) < 300:  # a restart can fail too
                spent += again
            spent += 300
        spent += work + 30
    assert whole * work / spent == pytest.approx(found["share"]["median"], abs=0.01)


def test_goodput_falls_with_gpus_and_failures_and_never_below_nothing() -> None:
    shares = [goodput(gpus)["share"]["median"] for gpus in (8, 512, 8192, 10**6)]  # type: ignore[index]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0 <= goodput(10**6, 1.0)["share"]["median"] < 1e-6  # type: ignore[index]


PLAN = "--gpus 128 --tp 8 --pp 2 --global-batch 128 --system 4x-h200"


def test_every_what_if_of_a_projection_does_something(tmp_path: Path) -> None:
    plain = projected(tmp_path, PLAN)
    slow = projected(tmp_path, f"{PLAN} --slow-gpus 0.01:1.3 --gpu-mtbf-hours 1000")
    link = projected(tmp_path, f"{PLAN} --slow-link 4")
    wait = slow["breakdown_s"]["straggler"]
    assert wait > 0.2 * plain["step_time_s"]["median"]
    assert slow["goodput"]["share"]["median"] < plain["goodput"]["share"]["median"]
    assert slow["inputs"]["slow_gpus"] == {"share": 0.01, "factor": 1.3}
    names = [{one["name"] for one in value["provenance"]} for value in (plain, slow)]
    assert "failures.gpu_mtbf" in names[0] - names[1]
    assert link["step_time_s"]["median"] > plain["step_time_s"]["median"]
    assert "4 times slower" in link["inputs"]["fabric"]["name"]
    rates = [
        one["source"]
        for value in (plain, link)
        for one in value["provenance"]
        if one["name"] == "fabric.nic_gbits_per_s"
    ]
    assert rates == ["published", "assumed"]
    assert 0 < plain["step_spread"]["low"] < plain["step_spread"]["high"] < 0.1


def test_a_slow_link_slows_nodes_whose_own_sockets_were_measured(tmp_path: Path) -> None:
    own = "--system 4x-h200-2x2 --fabric loopback --gpus 16 --tp 8 --pp 1 --zero 1"
    own += " --global-batch 128"
    found = [projected(tmp_path, f"{own} {words}") for words in ("", "--slow-link 4")]
    times = [one["step_time_s"]["median"] for one in found]
    assert times[1] > 1.3 * times[0]
    # of what was measured, which is more than the fabric says
    used = [tier for one in found for tier in one["fabric"] if tier["tier"] == "nic"]
    assert all(0 < one["utilisation"] < one["while_sending"] <= 1 for one in used)


def test_a_slow_link_of_a_torus_with_a_rate_of_its_own(tmp_path: Path) -> None:
    """The link between nodes is the slow one, not only the ports that it hangs on."""
    fabric = load_fabric("torus-2d").model_dump(mode="json", exclude_none=True)
    write_json(tmp_path / "mine.yaml", fabric | {"link_gbits_per_s": 200})
    own = f"--system 8x-h200 --fabric {tmp_path / 'mine.yaml'} --gpus 128 --tp 8 --pp 1 --zero 1"
    own += " --model llama3-8b --no-overlap --microbatch 1 --recompute none"
    plain, slow = (
        projected(tmp_path, f"{own} {words}")["breakdown_s"]["dp_exposed"]
        for words in ("", "--slow-link 4")
    )
    assert slow == pytest.approx(4 * plain, rel=0.05)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--gpus 8 --slow-link 2", "no effect on 8 GPUs"),
        ("--gpus 64 --slow-link 0.5", "how many times slower"),
        ("--gpus 64 --slow-link nan", "how many times slower"),
        ("--gpus 64 --gpu-mtbf-hours 0", "1 hour or more"),
        ("--gpus 64 --tp 8 --pp 2 --slow-gpus 1:1", "FRACTION:FACTOR"),
    ],
)
def test_a_what_if_that_makes_no_sense_is_a_sentence(words: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        main([*words.split(), "--system", "4x-h200", "--results", str(ROOT / "results")])
