"""What published rows leave open: chosen by memory and by time, for a series as for its rows."""

import pytest

from simulate.series.fit import SEARCHED_SD, fit, project
from simulate.series.plan import plan
from simulate.series.search import fastest, fits, own_choices, replanned, shared_choices
from simulate.series.step import Calibrations
from tests.made_up_series import row, simulated
from tests.simulated_steps import CALIBRATION


def test_a_series_recomputes_where_memory_asks_for_it_however_slow_its_anchor() -> None:
    by = Calibrations(CALIBRATION)

    def recompute(**changes: str) -> str:
        one = plan(row(recompute="", **changes))
        return str(shared_choices([one], [], by)["recompute"])

    large = {"gpu_type": "H100", "layers": "64", "micro_batch": "8", "value": "9"}
    time = float(simulated(CALIBRATION, row()))
    assert {recompute(value=repr(time * slow)) for slow in (0.9, 1.1, 1.3, 1.5)} == {"none"}
    assert recompute(**large) == "full"
    alone = shared_choices([], [plan(row(recompute="", **large))], by)
    assert alone["recompute"] == "selective"  # no anchor takes a wrong choice's time


def test_a_searched_split_wastes_no_replicas() -> None:
    """More GPUs than sequences: one is split over some, no replica is left without."""
    free = {"tp": "", "pp": "", "cp": "", "sharding": "", "micro_batch": "", "vpp": ""}
    by = Calibrations(CALIBRATION)
    fewer, more = (plan(row(**free, gpus=gpus, global_batch="8")) for gpus in ("64", "256"))
    for one in (fewer, more):
        assert replanned(one, fastest(one, {}, by)).batch.simulated == 8


def test_a_printed_split_stays_where_replicas_have_uneven_shares() -> None:
    """A split that other rows print is none to give up for a batch that it does not divide."""
    free = {"tp": "", "pp": "", "cp": "1", "sharding": "", "micro_batch": "", "vpp": ""}
    one = plan(row(**free, gpus="48", global_batch="100"))
    choices = fastest(one, {"printed": frozenset({(2, 2)})}, Calibrations(CALIBRATION))
    assert choices["split"] == (2, 2, 1)


def test_a_split_that_no_row_prints_is_searched_where_theirs_cannot_be() -> None:
    """Of as many GPUs a sequence as rows may be spread over, ranked by time as all are."""
    free = {"tp": "", "pp": "1", "cp": "", "seq_len": "8192", "micro_batch": "", "vpp": ""}
    one = plan(row(**free | {"pp": "", "sharding": ""}, gpus="128", global_batch="8"))
    by = Calibrations(CALIBRATION)
    beside = fastest(one, {"printed": frozenset({(1, 1)}), "recompute": "full"}, by)
    assert beside["split"] == (1, 1, 16)
    alone = fastest(one, {"recompute": "full"}, by)
    without = fastest(one, {"printed": frozenset({(5, 1)}), "recompute": "full"}, by)
    assert without["split"] == alone["split"]


def test_a_split_that_a_rows_gpus_are_no_multiple_of_is_searched_anew() -> None:
    """A series over 48 GPUs a sequence has another split at a power of two, not the least one."""
    by = Calibrations(CALIBRATION)
    free = {"tp": "", "pp": "", "cp": "1", "micro_batch": "", "vpp": "", "layers": "96"}
    free |= {"sharding": "", "global_batch": "1536", "value": "60"}
    alike, other = (plan(row(**free, row_id=gpus, gpus=gpus)) for gpus in ("96", "128"))
    shared = {"split": (4, 12, 1), "recompute": "none"}
    chosen = own_choices([alike], [other], shared, by)
    assert chosen["96"]["split"] == (4, 12, 1)
    searched = fastest(other, {"recompute": "none"}, by)
    assert chosen["128"]["split"] == searched["split"]
    taken = replanned(other, chosen["128"]).parallelism
    assert (taken.tp, taken.pp, taken.cp) == searched["split"]


def test_chunks_are_those_that_are_fastest_whatever_memory_they_take() -> None:
    """What frameworks free is not printed: a row that nothing fits has chunks, too."""
    by = Calibrations(CALIBRATION)
    free = {"pp": "4", "tp": "1", "layers": "32", "vpp": "", "global_batch": "16"}
    small, huge = (plan(row(**free, seq_len=length, value="900")) for length in ("2048", "131072"))
    assert not fits(huge, 1.25)
    assert fastest(small, {}, by)["vpp"] > 1
    assert fastest(huge, {}, by)["vpp"] > 1


def test_rows_without_room_for_it_leave_the_others_their_microbatch() -> None:
    by = Calibrations(CALIBRATION)
    free = {"micro_batch": "", "sharding": "ddp", "pp": "1", "vpp": ""}
    some = [
        plan(row(row_id=gpus, **free, gpus=gpus, global_batch="256")) for gpus in ("8", "16", "32")
    ]
    alone = own_choices([], some, {}, by)
    crowded = plan(row(row_id="512", **free, gpus="512", global_batch="256"))
    assert (crowded.batch.dp, crowded.batch.simulated) == (256, 256)
    beside = own_choices([], [*some, crowded], {}, by)
    assert alone["8"]["microbatch"] > 1
    assert {name: beside[name] for name in alone} == alone


MIXTURE = {"model": "Mixtral 8x7B", "layers": "", "hidden": "", "heads": "", "kv_heads": ""}
MIXTURE |= {"ffn_hidden": "", "vocab": "", "params": "", "tp": "1", "pp": "1", "cp": "1", "dp": ""}
MIXTURE |= {"sharding": "", "gpus": "64", "global_batch": "256", "micro_batch": "1"}
MIXTURE |= {"value": "90"}


def test_experts_are_spread_where_no_row_says_over_how_many() -> None:
    """On one GPU each, eight experts of 47 billion parameters fit no memory."""
    by = Calibrations(CALIBRATION)
    unsearched = plan(row(**MIXTURE))
    assert "ep" in unsearched.open
    assert "ep 8 assumed" in unsearched.assumed  # a node's
    shared = shared_choices([], [unsearched], by)
    one = replanned(unsearched, own_choices([], [unsearched], shared, by)["a"])
    assert one.parallelism.ep in (2, 4, 8)
    assert fits(one, 1.25)
    assert f"ep {one.parallelism.ep} searched" in one.assumed
    printed = plan(row(**MIXTURE, ep="4"))
    assert "ep" not in printed.open
    assert printed.parallelism.ep == 4


def test_experts_are_spread_as_in_the_row_of_the_series_that_is_nearest_in_gpus() -> None:
    """But where that had as many ranks as there are: more GPUs may have more."""
    by = Calibrations(CALIBRATION)

    def spread(sizes: dict[str, str]) -> list[int]:
        cells = MIXTURE | {"global_batch": "9216", "value": "900"}
        members = [
            plan(row(**cells | {"row_id": n, "gpus": n, "ep": ep})) for n, ep in sizes.items()
        ]
        shared = shared_choices(members[:1], members[1:], by)
        own = own_choices(members[:1], members[1:], shared, by)
        plans = [replanned(one, own[one.row.row_id]) for one in members]
        for one in plans:
            borrowed = f"ep {one.parallelism.ep} as in other rows of its series" in one.assumed
            assert borrowed == ("printed_ep" in shared and not one.row.whole("ep"))
            assert ("ep" in one.open) == (one.row.whole("ep") is None)
        return [one.parallelism.ep for one in plans]

    assert spread({"64": "2", "512": "4", "128": "", "1024": ""}) == [2, 4, 2, 4]
    few = spread({"2": "2", "64": "", "128": ""})
    assert few[0] == 2
    assert set(few[1:]) <= {1, 2, 4, 8}


def test_groups_that_share_a_copy_hold_whole_groups_of_experts() -> None:
    shards = {"sharding": "HSDP dp_replicate=16 dp_shard=4"}
    one = plan(row(**MIXTURE | shards))
    assert one.parallelism.ep == 4
    assert (one.parallelism.dp, one.copies) == (4, 16)


def test_a_mixture_whose_experts_ranks_are_searched_is_less_sure() -> None:
    by = Calibrations(CALIBRATION)
    system = fit([], by)
    searched, printed = plan(row(**MIXTURE)), plan(row(**MIXTURE, ep="8"))
    assert searched.parallelism == printed.parallelism
    sds = [project(one, system, by).sd for one in (searched, printed)]
    assert sds[0] ** 2 - sds[1] ** 2 == pytest.approx(SEARCHED_SD**2)
