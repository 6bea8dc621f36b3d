"""How long GPUs wait for a host, pass by pass, by hand: what it is ahead of them it keeps."""

import numpy as np
import pytest

from simulate.cost.costs import Costs
from simulate.cost.issue import host_waits, late_us, once_waits
from simulate.cost.segment_cost import Cost
from simulate.cost.works import Energy
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer
from tests.simulated_steps import costs_with, host_that_takes


@pytest.mark.parametrize(
    ("pp", "vpp", "waited"), [(1, 1, [2.0, 0.0]), (2, 1, [5.0, 0.0]), (2, 2, [2.0, 0.0])]
)
def test_what_a_host_gets_ahead_it_keeps_until_stages_exchange(
    pp: int, vpp: int, waited: list[float]
) -> None:
    p = Parallelism(pp=pp, vpp=vpp, global_batch=4)
    assert late_us([-5.0, 3.0], p) == waited  # type: ignore[list-item, comparison-overlap]
    draws = late_us([np.array([-5.0, 1.0]), np.array([3.0, -1.0])], p)
    assert draws[0] == pytest.approx([waited[0], 0.0])
    assert draws[1] == pytest.approx([0.0, 0.0 if pp == 1 or vpp > 1 else 1.0])


@pytest.mark.parametrize(
    ("ahead", "each", "more"),
    [((-5.0, 7.0), 0.0, 5.0), ((-5.0, 3.0), 2.0, 3.0), ((5.0, -3.0), 0.0, 0.0)],
)
def test_the_first_pass_of_a_step_finds_a_host_that_is_not_ahead(
    ahead: tuple[float, float], each: float, more: float
) -> None:
    """Microbatch by microbatch, as a queue would: what the host is ahead it keeps."""
    costs = costs_with(host_that_takes(), Parallelism(global_batch=4))
    ways = [[(1.0, Cost(0.0, {}, 0.0, one, Energy()))] for one in ahead]  # type: ignore[arg-type]
    waits, _, first = host_waits(ways, costs)
    queue = waited = 0.0
    for _ in range(4):
        for one in ahead:
            waited += max(-one - queue, 0.0)
            queue = max(queue + one, 0.0)
    assert (sum(waits), first) == (each, more)
    assert waited == pytest.approx(4 * sum(waits) + first)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("ahead", [(-5.0, 7.0), (-5.0, 3.0), (5.0, -3.0), (4.0, 4.0), (-1.0, -2.0)])
@pytest.mark.parametrize("bucket_us", [0.0, 1.0, 4.0])
def test_buckets_make_a_host_late_once_a_step(
    ahead: tuple[float, float],
    microbatches: int,
    bucket_us: float,
    zero: int,
) -> None:
    """Parameters before the first forward pass' end, gradients before the last backward one's."""

    def waited(gather: float, reduction: float) -> float:
        queue = total = 0.0
        for number in range(microbatches):
            sent = gather * (number == 0), reduction * (number == microbatches - 1)
            for one, more in zip(ahead, sent, strict=True):
                queue += one - more
                total, queue = total + max(-queue, 0.0), max(queue, 0.0)
        return total

    p = Parallelism(dp=2, global_batch=2 * microbatches, overlap=True, zero=zero)
    costs = costs_with(host_that_takes(bucket_us=bucket_us), p)
    first, last = (np.array([one]) for one in ahead)
    found = once_waits(first, last, first + last, 3, costs)
    sent = 3 * bucket_us
    assert found == pytest.approx(waited(sent * zero, sent) - waited(0.0, 0.0))
    alone = costs_with(host_that_takes(bucket_us=9.0), p.model_copy(update={"overlap": False}))
    assert once_waits(first, last, first + last, 3, alone) == 0


def test_buckets_are_sent_while_a_host_would_wait_in_each_layer() -> None:
    p = Parallelism(dp=2, global_batch=8, overlap=True)
    costs = costs_with(host_that_takes(bucket_us=1.0), p)
    late = np.array([-1.0])
    assert once_waits(late, late, 2 * late, 5, costs, (5.0, 5.0)) == 0
    assert once_waits(late, late, 2 * late, 5, costs, (3.0, 5.0)) == 2
    assert once_waits(late, late, 2 * late, 5, costs) == 5 + 5


def test_weights_are_cast_beside_the_first_pass_alone() -> None:
    """By a host that is `ahead` of it by so much, or would stand still in each of its layers."""
    fp8 = {"transformer_impl": "transformer_engine", "fp8": True}
    costs = costs_with(host_that_takes(bucket_us=9.0), Parallelism(global_batch=4, **fp8))
    last = np.array([2.0])
    for ahead, spare, waited in (
        (-1.0, 0.0, 5.0),
        (3.0, 0.0, 2.0),
        (7.0, 0.0, 0.0),
        (-1.0, 4.0, 1.0),
    ):
        first = np.array([ahead])
        found = once_waits(first, last, first + last, 5, costs, (spare, 0.0), 5.0)
        assert found == pytest.approx(waited)


def test_stages_that_exchange_wait_for_each_bucket() -> None:
    """Each pass begins with its host no further than the device."""
    p = Parallelism(dp=2, pp=2, global_batch=8, overlap=True)
    costs = costs_with(host_that_takes(bucket_us=1.0), p)
    first, last = np.array([2.0]), np.array([-1.0])
    assert once_waits(first, last, first + last, 5, costs) == pytest.approx((5 - 2) + 5)


def _pieces(*ahead_us: float, pass_us: float = 0.0) -> tuple[Costs, list[tuple[float, Cost]]]:
    costs = costs_with(host_that_takes(pass_us=pass_us), Parallelism(global_batch=4))
    nothing = costs.segment(layer(load_model("tiny"), costs.parallelism)[0])
    zero = costs.draws.zero
    return costs, [(1, nothing._replace(host=zero, ahead=zero + one)) for one in ahead_us]


@pytest.mark.parametrize(
    ("forward", "backward", "waited", "first"),
    [
        # what the head makes up for comes too late for the layers before it
        ([-1.0, -9.0, 30.0], [5.0, 20.0, 0.0], 0.0, 10.0),
        ([-1.0, -9.0, 4.0], [3.0, 8.0, 0.0], 0.0, 10.0),
        ([3.0, -2.0, 1.0], [0.0, 0.0, 0.0], 0.0, 0.0),  # the embedding comes before
        # it never gets ahead for good: it is, by a pass, when the step ends
        ([0.0, -10.0, 3.0], [0.0, 1.0, 0.0], 6.0, 4.0),
    ],
)
def test_in_the_first_pass_a_host_has_nothing_ahead(
    forward: list[float],
    backward: list[float],
    waited: float,
    first: float,
) -> None:
    """By hand: pieces in their order, embedding, layers and head; us."""
    costs, pieces = _pieces(*forward, *backward)
    late, _, more = host_waits([pieces[:3], pieces[3:]], costs)
    assert sum(late) == pytest.approx(waited)
    assert more == pytest.approx(first)


@pytest.mark.parametrize(
    ("forward", "backward", "waited", "ahead"),
    [
        # what the head makes up for comes too late for the layers before it, every time
        ([-1.0, -9.0, 30.0], [0.0, 20.0, 5.0], [10.0, 0.0], [-9.0, 25.0]),
        # backward it comes before them
        ([3.0, -2.0, 1.0], [0.0, -4.0, 6.0], [0.0, 0.0], [1.0, 2.0]),
        ([3.0, -2.0, 1.0], [0.0, -4.0, 3.0], [0.0, 1.0], [1.0, -1.0]),
        ([0.0, -4.0, 1.0], [-3.0, 2.0, 0.0], [4.0, 1.0], [-4.0, -1.0]),
        # an embedding's lag has been waited for before its layers, where its host gets ahead
        ([-5.0, 9.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0], [9.0, 0.0]),
    ],
)
@pytest.mark.parametrize("once", [0.0, 1.0])
def test_where_stages_exchange_no_pass_has_a_host_that_is_ahead(
    forward: list[float],
    backward: list[float],
    waited: list[float],
    ahead: list[float],
    once: float,
) -> None:
    """By hand: pieces in the forward pass's order, embedding, layers and head; us. What a host does
    once a pass comes at its end."""
    p = Parallelism(pp=2, global_batch=2)
    costs, pieces = _pieces(*forward, *backward, pass_us=2 * once)
    costs.parallelism = p
    ways = [pieces[:3], pieces[3:]]
    late, left, more = host_waits(ways, costs, before=1)
    _, without, _ = host_waits([one[1:] for one in (ways[0], ways[1])], costs, before=0)
    assert float(without[0]) == min(forward[1], forward[1] + forward[2] - once)
    ends = [sum(one) - once for one in (forward, backward)]
    waited_before = (max(-forward[0], 0.0), max(-backward[-1], 0.0))  # the layers
    assert [float(one) for one in late] == [
        max(was, -end) for was, end in zip(waited, ends, strict=True)
    ]
    assert [float(one) for one in left] == [
        min(was, end + more) for was, end, more in zip(ahead, ends, waited_before, strict=True)
    ]
    assert float(more) == 0.0
    # interleaved ones do not wait for each other: all of it is one queue
    costs.parallelism = p.model_copy(update={"vpp": 2})
    queue, _, _ = host_waits(ways, costs)
    total = sum(forward) + sum(backward) - 2 * once / 2
    assert sum(map(float, queue)) == pytest.approx(max(-total, 0.0))


def test_casts_are_waited_for_behind_layers_that_waited() -> None:
    """What a queue would wait: 10 us behind in the layers, 5 more of casts, 20 ahead at the end."""
    p = Parallelism(pp=2, global_batch=2, fp8=True, transformer_impl="transformer_engine")
    costs, pieces = _pieces(-1.0, -9.0, 30.0, 0.0, 20.0, 0.0)
    costs.parallelism = p
    late, ahead, _ = host_waits([pieces[:3], pieces[3:]], costs, before=1)
    more = once_waits(ahead[0], ahead[1], sum(ahead, costs.draws.zero), 0, costs, casts=5.0)
    assert (float(late[0]), float(more)) == (10.0, 5.0)
