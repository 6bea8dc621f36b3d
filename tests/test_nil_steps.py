"""What nil steps tell of a host that issues a step; their cases are in test_nil_cases.py."""

import csv
from typing import get_args

import numpy as np
import pytest

from calibrate.evidence import Ledger
from calibrate.host.equations import (
    HOST_SD,
    Equation,
    beside_kernels,
    by_ranges,
    equations,
    told_apart,
)
from calibrate.host.issue import (
    CALLS,
    WHAT,
    by_others,
    host_sd,
    middles,
    on_middle_host,
    usual_us,
)
from measure.suites import host_time
from spec.calibration import HostFit, HostTime
from spec.model import load_model
from spec.nil import LAYERS
from spec.parallelism import Parallelism
from spec.records import HostRow
from spec.step import layer
from spec.step_parts import EXPERT_BACKWARD
from tests.commands import RESULTS

TAKES = {
    "part": 100.0,
    "backward_part": 40.0,
    "collective": 150.0,
    "uneven": 170.0,
    "expert": 300.0,
    "routing": 1700.0,
    "ring": 250.0,
    "checkpoint": 500.0,
    "adapter": 90.0,
    "bucket": 130.0,
    "pass": 2000.0,
    "step": 1500.0,
    "tensor": 50.0,
    "te_part": 220.0,
    "te_backward_part": 130.0,
    "te_checkpoint": 800.0,
    "te_ring": 420.0,
    "te_exchange": 380.0,
    "te_adapter": 160.0,
    "te_expert": 70.0,
    "te_backward_expert": 95.0,
    "te_tensor": 30.0,
    "fp8_part": 290.0,
    "fp8_backward_part": 180.0,
    "fp8_checkpoint": 900.0,
    "fp8_expert": 110.0,
    "fp8_backward_expert": 140.0,
    "fp8_pass": 2500.0,
    "fp8_weight": 45.0,
}
MICROBATCHES = 5
FULL_THERE = {"recompute", "transformer_engine"}


def nil_row(case: host_time.HostCase, slower: float, updates: bool = False) -> HostRow:
    """Steps, and their updates, that take what `TAKES` says on a host so many times slower."""
    names = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
    sizes = {"gpus": case.gpus, "tp": case.tp, "cp": case.cp, "ep": case.ep}
    sizes |= {"experts": case.experts, "overlap": case.overlap, "recompute": case.recompute}
    sizes |= {"lora_rank": case.lora_rank}
    sizes |= {"transformer_impl": case.transformer_impl, "fp8": case.fp8}
    sizes |= {"cp_comm_type": case.cp_comm_type}
    once = dict.fromkeys(("forward_us", "backward_us", *names), 1.0) | {"single_us": 0.5}
    row = HostRow(
        case_id=case.case_id,
        role="fit",
        repeats=40,
        std_us=0.0,
        layers=case.layers,
        microbatches=MICROBATCHES,
        parts=1,
        **sizes,
        **once,
    )
    counts = [one.counts for one in equations(row, (), slower)]
    *layers, step_us = (
        slower * sum(TAKES[name] * count for name, count in one.items()) for one in counts
    )
    if case.recompute == "full" and case.transformer_impl == "transformer_engine":
        layers = [1.0, *layers]  # a forward pass that keeps nothing is not read
    forward_us, backward_us, ends_us = layers or (1.0, 1.0, 1.0)  # those with buckets are not read
    microbatch_us = case.layers * (forward_us + backward_us) + ends_us
    several_us = step_us + MICROBATCHES * microbatch_us
    found = {
        "forward_us": forward_us,
        "backward_us": backward_us,
        "single_us": step_us + microbatch_us,
        "update_us": step_us if updates else None,  # all that a step has once is in it
    }
    return row.model_copy(update=found | dict.fromkeys(names, several_us))


def test_what_one_time_alone_shows_is_drawn_to_what_is_usual() -> None:
    """As of a checkpoint in FP8, by the one case that has it, in a moment half as slow again."""
    seen = []
    for case in host_time.cases("nvidia", 2, engine=True):
        slow = 1.5 if case.fp8 and case.recompute == "full" else 1.0
        seen += equations(nil_row(case, slower=slow), (), 1.0)
    alone, drawn = beside_kernels(seen), beside_kernels(seen, TAKES)
    assert alone["fp8_checkpoint"] > 2 * TAKES["fp8_checkpoint"]
    assert drawn["fp8_checkpoint"] < 1.5 * TAKES["fp8_checkpoint"]
    for name in ("part", "te_part", "fp8_part", "expert", "fp8_expert"):
        assert drawn[name] == pytest.approx(TAKES[name], rel=0.1)


def test_what_is_usual_is_the_middle_hosts_or_assumed_where_few_show_it() -> None:
    own = {(name,): {"part": us} for name, us in (("a", 90.0), ("b", 110.0), ("c", 300.0))}
    own["a",]["ring"] = 999.0  # of one host alone
    usual = usual_us(own, {("c",): 3.0}, issue=10.0)
    assert usual["part"] == 100.0
    assert usual["ring"] == 10.0 * CALLS["ring"]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_what_nil_steps_take_is_told_apart(gpus: int, engine: bool) -> None:
    rows = [nil_row(case, slower=2.0) for case in host_time.cases("nvidia", gpus, engine=engine)]
    found = beside_kernels([one for row in rows for one in equations(row, (), 2.0)])
    there = {name for name in TAKES if name.startswith(("te_", "fp8_"))}
    alone = (
        {"collective", "uneven", "ring", "te_ring", "te_exchange", "bucket"}
        if gpus == 1
        else set[str]()
    )
    assert found.keys() == TAKES.keys() - alone - (set() if engine else there)
    assert found == pytest.approx({name: TAKES[name] for name in found})
    alone = beside_kernels(list(equations(rows[0], (), 2.0)))
    assert alone == {}  # a step and its tensors cannot be told apart


def test_steps_of_one_depth_do_not_tell_what_an_update_has_once() -> None:
    """A second off in one of them would be all of the other; passes are told as ever."""
    cases = host_time.cases("nvidia", 1, engine=True)
    shallow = [one for one in cases if one.layers == LAYERS and not one.experts]  # few tensors
    for some, told in ((cases, True), (shallow, False)):
        rows = [nil_row(case, slower=2.0, updates=True) for case in some]
        seen = told_apart([one for row in rows for one in equations(row, (), 2.0)])
        takes = beside_kernels(by_ranges(seen))
        assert ({"step", "tensor", "te_tensor"} <= takes.keys()) == told
        assert takes["part"] == pytest.approx(TAKES["part"])


def test_layers_of_one_number_of_experts_do_not_tell_what_one_takes_there() -> None:
    """What a mixture has once, such as rows padded in FP8, would be an eighth of each's."""
    cases = host_time.cases("nvidia", 1, engine=True)
    few = [one for one in cases if one.experts != host_time.MORE_EXPERTS]
    for some, told in ((cases, True), (few, False)):
        rows = [nil_row(case, slower=2.0) for case in some]
        takes = beside_kernels(by_ranges([one for row in rows for one in equations(row, (), 2.0)]))
        for name in ("te_expert", "te_backward_expert", "fp8_expert", "fp8_backward_expert"):
            assert (name in takes) == told
        assert takes["expert"] == pytest.approx(TAKES["expert"])  # routing is forward alone


def test_updates_by_themselves_tell_what_a_tensor_takes() -> None:
    """Whatever steps say, which are many times as long."""
    cases = host_time.cases("nvidia", 1)
    rows = [nil_row(case, slower=2.0, updates=True) for case in cases]
    found = beside_kernels([one for row in rows for one in equations(row, (), 2.0)])
    assert found["tensor"] == pytest.approx(TAKES["tensor"])
    (deep,) = [n for n, case in enumerate(cases) if case.layers > LAYERS]
    for longer in (0.9, 1.1):
        off = [row.model_copy() for row in rows]
        off[deep] = rows[deep].model_copy(update={"single_us": longer * rows[deep].single_us})
        found = beside_kernels([one for row in off for one in equations(row, (), 2.0)])
        assert found["tensor"] == pytest.approx(TAKES["tensor"], rel=0.05)


def test_what_goes_with_issuing_is_judged_by_other_hosts() -> None:
    own = {("a",): {"pass": 100.0}, ("b",): {"pass": 80.0}, ("c",): {"pass": 120.0}}
    seen = {host: [Equation(takes["pass"], 0.0, {"pass": 1.0}, 1.0)] for host, takes in own.items()}
    slower = {("a",): 1.0, ("b",): 1.2}
    # the third's speed is unknown: no part of the others' mean, and not judged
    found = by_others(seen, own, slower)
    assert [one.python for one in found] == pytest.approx([np.log(80 / 100), np.log(100 / 80)])
    # a host that nobody knows is taken to issue as the others do
    whole = [np.log(80 * 1.2 / 100), np.log(100 / 80 / 1.2)]
    assert [one.whole for one in found] == pytest.approx(whole)
    # a visit to one of a host's devices is of that host
    same = {("a", "d") if host == ("b",) else host: takes for host, takes in own.items()}
    seen[("a", "d")] = seen.pop(("b",))
    assert by_others(seen, same, {("a",): 1.0, ("a", "d"): 1.2}) == []


def test_the_middle_hosts_passes_are_told_as_long_as_they_take() -> None:
    """Middles of what one host cannot tell apart would add up to less."""
    shares = {("a",): (0.0, 12.0), ("b",): (1.0, 9.0), ("c",): (9.0, 2.0)}  # 12, 10 and 11
    own = {host: {"part": part, "expert": expert} for host, (part, expert) in shares.items()}
    counts = {"part": 1.0, "expert": 1.0}
    seen = {
        host: [Equation(sum(both) + 5.0, 5.0, counts, 20.0), Equation(1.0, 0.0, {"step": 1.0}, 1.0)]
        for host, both in shares.items()
    }
    assert sum(middles(own, {}).values()) == 10.0
    found = on_middle_host(seen, own, {})
    assert found == pytest.approx({"part": 1.1, "expert": 9.9})
    # a host of unknown speed scales nothing where others' is known, nor one that tells nothing
    assert sum(on_middle_host(seen, own, {("b",): 1.0}).values()) == pytest.approx(10.0)
    dumb = {("d",): [Equation(90.0, 0.0, {"ring": 1.0}, 90.0)]}
    assert on_middle_host(seen | dumb, own | {("d",): {}}, {}) == found
    # nor one whose kernels alone are told longer than its passes took
    longer = {("d",): [Equation(1.0, 50.0, counts, 20.0)]}
    again = on_middle_host(seen | longer, own | {("d",): own["c",]}, {})
    assert sum(again.values()) == pytest.approx(11.0)


def test_what_few_hosts_show_is_told_as_of_the_middle_one() -> None:
    """One that was slow throughout says nothing of rings by that; nor one of unknown slowness."""
    paces = {"a": 1.0, "b": 1.1, "c": 1.6, "d": 3.0}
    own = {
        (name,): {one: pace * TAKES[one] for one in ("part", "backward_part", "pass")}
        for name, pace in paces.items()
    }
    own["c",]["ring"], own["d",]["adapter"] = 1.6 * 300.0, 3.0 * 80.0
    seen = {
        host: [Equation(us, 0.0, {name: 1.0}, us) for name, us in takes.items()]
        for host, takes in own.items()
    }
    found = on_middle_host(seen, own, {("a",): 1.0, ("b",): 1.0, ("c",): 1.0})
    for name in ("part", "backward_part", "pass"):
        assert found[name] == pytest.approx(1.1 * TAKES[name])
    assert found["ring"] == pytest.approx(1.1 * 300.0)
    assert found["adapter"] == pytest.approx(1.1 * 80.0)


def test_a_host_of_unknown_speed_is_no_part_of_the_mean() -> None:
    own = {("a",): {"ring": 2.0, "pass": 9.0}, ("b",): {"ring": 4.0}, ("c",): {"ring": 90.0}}
    known = {("a",): 1.0, ("b",): 1.2}
    assert middles(own, known) == {"ring": 3.0, "pass": 9.0}
    assert middles({("c",): {"ring": 90.0}}, known) == {"ring": 90.0}


def test_steps_are_off_by_what_nil_steps_leave() -> None:
    """Times that scatter by a third, most of them fitted: a new one is off by about that."""
    cases = host_time.cases("nvidia", 4)
    rng = np.random.default_rng(0)

    def found(sd: float, hosts: int) -> float:
        seen, ledger = {}, Ledger()
        for host in range(hosts):
            rows = [nil_row(case, slower=1.0) for case in cases]
            exact = [one for row in rows for one in equations(row, (), 1.0)]
            seen[(str(host),)] = [
                one._replace(time_us=one.time_us + one.of_us * rng.normal(0, sd)) for one in exact
            ]
        own = {host: beside_kernels(some) for host, some in seen.items()}
        value = host_sd(seen, own, ledger)
        source = "measured" if value > HOST_SD else "assumed"
        (noted,) = ledger.parameters
        assert (noted.name, noted.source) == ("host.sd", source)
        assert noted.value == pytest.approx(value, rel=1e-4)
        return value

    # what is left understates the scatter by what the fit took up; a new step has both
    count = sum(len(list(equations(nil_row(case, 1.0), (), 1.0))) for case in cases)
    assert found(0.4, hosts=30) == pytest.approx(0.4 * (1 + len(TAKES) / count) ** 0.5, rel=0.1)
    assert found(0.01, hosts=3) == HOST_SD
    assert host_sd({}, {}, Ledger()) == HOST_SD
    few = {("a",): list(equations(nil_row(cases[0], 1.0), (), 1.0))}
    assert host_sd(few, {("a",): {}}, Ledger()) == HOST_SD  # told nothing apart


def test_every_time_of_a_host_is_fitted_and_named() -> None:
    """What parts of a step issue, what is fitted, and what a calibration holds are the same."""
    p = Parallelism(tp=2, ep=2, cp=2, dp=2, recompute="full", global_batch=2)
    passes = layer(load_model("mixtral-8x7b"), p)
    issued = {name for way in passes for one in way for name in one.issued}
    for fp8 in (False, True):
        there = {"cp": 1, "fp8": fp8, "transformer_impl": "transformer_engine"}
        passes = layer(load_model("llama3-8b"), p.model_copy(update=there))
        issued |= {name for way in passes for one in way for name in one.issued}
    once = {"pass", "tensor", "bucket", "step", "te_tensor", "fp8_pass", "fp8_weight"}
    assert issued | once == CALLS.keys() == WHAT.keys()
    assert {f"{name}_us" for name in CALLS} == set(get_args(HostTime)) <= set(HostFit.model_fields)


def test_autograd_takes_an_expert_longer_as_measured() -> None:
    """Kernels are issued as often for 8 experts as for 32, in what nil steps' equations count."""
    found = []
    for path in RESULTS.glob("*/*/host.csv"):
        rows = {
            row["experts"]: (float(row["forward_us"]), float(row["backward_us"]))
            for row in csv.DictReader(path.open())
            if row.get("forward_us") and row["tp"] == row.get("ep") == "1"
        }
        if {"8", "32"} <= rows.keys():
            forward, backward = np.subtract(rows["32"], rows["8"])
            found.append(backward / forward)
    assert len(found) >= 13
    assert np.median(found) == pytest.approx(EXPERT_BACKWARD, rel=0.03)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tp": 3}, "tp is 3; it must divide gpus, 4"),
        ({"cp": 3}, "cp is 3; it must divide gpus / tp, 4, and 8"),
        ({"ep": 3}, "ep is 3; it must divide gpus / tp / cp, 4, and experts, 8"),
        ({"experts": 0, "ep": 2}, "ep is 2"),
        ({"tp": 4, "overlap": True}, "overlap is true; with gpus and tp 4 it must be false"),
        ({"experts": 1}, "experts is 1"),
        ({"experts": 10**30}, "experts"),
        ({"layers": 10**6}, "layers"),
        ({"microbatches": 1}, "microbatches"),
        ({"fp8": True}, "fp8 is true; with transformer_impl local it must be false"),
        (
            {"transformer_impl": "transformer_engine", "experts": 0, "kernels_us": 1.0},
            "transformer_impl must be local with a CPU's kernels_us",
        ),
        ({"single_us": 1e9}, "single_us is 1e+09"),
        ({"update_us": 1.0, "single_us": 0.5}, "update_us is 1; it must be shorter than"),
        ({"forward_us": None}, "forward_us and backward_us must be given"),
        ({"kernels_us": 1.0}, "or kernels_us and single_kernels_us"),
    ],
)
def test_an_impossible_host_row_is_refused(changed: dict[str, float], words: str) -> None:
    row = nil_row(host_time.HostCase(1.0, 4, experts=8), slower=1.0)
    with pytest.raises(ValueError, match=words.replace("+", "[+]")):
        HostRow.model_validate(row.model_dump() | changed)


def test_one_hosts_slow_moment_moves_no_other() -> None:
    """As on an H100 whose step with adapters took twice as long as the one beside it."""
    own = {(name,): {"adapter": us} for name, us in (("a", 66.0), ("b", 172.6), ("c", 725.4))}
    assert middles(own, dict.fromkeys(own, 1.0)) == {"adapter": 172.6}


def test_an_update_of_no_time_tells_nothing() -> None:
    """By its own error it would count for more than all others."""
    row = nil_row(host_time.HostCase(1.0), slower=1.0, updates=True)
    none = row.model_copy(update={"update_us": 1e-3 * row.single_us})
    assert len(list(equations(row, (), 1.0))) == 1 + len(list(equations(none, (), 1.0)))
