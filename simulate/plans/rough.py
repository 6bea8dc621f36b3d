"""A step's time in closed form, from a few priced parts: to rank parallelisms, not to report them.

It knows what the simulation knows but for four things: the pipeline is a formula instead of a
timeline, the clock is that of the layers alone, nobody waits for stragglers, and messages between
stages leave passes their ports. A plan takes some microseconds, so all of thousands are ranked
before the promising ones are simulated.
"""

from dataclasses import dataclass
from operator import add
from typing import Any

from simulate.cost.costs import Costs
from simulate.cost.exchange import neighbours, of_boundary
from simulate.cost.imbalance import share_of_fullest
from simulate.cost.issue import caught_up, repeated_us
from simulate.cost.uncertainty import Array, Draws, central
from simulate.hardware.as_run import as_run
from simulate.step.clocks import layer_us
from simulate.step.overlap import Chunk, by_axis, gather_in_turn, waited_us
from simulate.step.passes import Pieces, chunks, unit_of
from simulate.step.pipeline_order import BACKWARD, FORWARD
from simulate.step.sharding import waits
from simulate.step.updates import waits_us
from spec.buckets import Bucket, gradient_buckets
from spec.calibration import Calibration
from spec.collective import Collective
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism, as_asked
from spec.step import by_chunk, copied_alone, optimizer, shard_kernels
from spec.step_ends import embedding, head
from spec.step_kinds import layers_by_kind, two_widths
from spec.step_parts import shapes

Times = tuple[float, ...]  # by boundary of stages, or one for all


@dataclass(frozen=True)
class Pass:
    """Forward and backward of a microbatch through a layer and through the model's ends, us."""

    whole: dict[str, float]  # by unit
    free: dict[str, list[float]]  # forward, backward of each, while it leaves the ports to replicas


@dataclass(frozen=True)
class Update:
    """What a stage does once a step, us."""

    reduction: list[dict[str, Array]]  # of each model chunk, by axis
    gather: list[dict[str, Array]]
    kernels: float
    buckets: tuple[Bucket, ...]  # of the first chunk


class Rough:
    """Ranks parallelisms of one model on one cluster."""

    def __init__(
        self, model: ModelSpec, node: Node, fabric: Fabric, calibration: Calibration
    ) -> None:
        """Nothing is priced yet."""
        self.model, self.node, self.fabric, self.calibration = model, node, fabric, calibration
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._clocks: dict[tuple[Any, ...], float] = {}
        self._layouts: dict[tuple[Any, ...], Costs] = {}
        self._updates: dict[tuple[Any, ...], list[Update]] = {}

    def step_us(self, p: Parallelism) -> float:
        """Step time."""
        one, m, model = self._pass(p), p.microbatches, self.model
        stages = [layers * one.whole["layer"] for layers in p.stage_layers(model)]
        for stage in range(p.pp if model.dense_layers else 0):
            units = [(unit_of(kind, model), count) for kind, count in p.layers_of(model, stage)]
            stages[stage] = sum(count * one.whole[name] for name, count in units)
        stages[0] += one.whole["embedding"]
        stages[-1] += one.whole["head"]
        if p.zero > 1:
            stages = list(map(add, stages, self._sharded_us(p, one)))
        transfers, lates = self._transfers_us(p) if p.pp > 1 else ((0.0,), (0.0,))
        pipeline = _pipeline_us(stages, m, p.vpp, transfers, lates)
        return pipeline + self._update_us(p, one)

    def _costs(self, p: Parallelism) -> Costs:
        key = (p.tp, p.pp, p.cp, p.dp, p.ep, as_asked(p), caught_up(p))
        if key not in self._layouts:
            fullest = share_of_fullest(self.model, p, Draws(0))
            calibration = as_run(self.calibration, p, self.node, self.model)
            self._layouts[key] = Costs(calibration, self.node, self.fabric, p, Draws(0), fullest)
        return self._layouts[key]

    def _pass(self, p: Parallelism) -> Pass:
        """Depends on how a layer is split, not on how many layers a stage has."""
        key = (
            *(p.tp, p.cp, p.ep, p.microbatch, p.recompute, p.sequence_parallel),
            *(as_asked(p), p.pp == 1, caught_up(p), p.zero == 3 and p.dp * p.cp),
            two_widths(self.model, p),
        )
        if key not in self._passes:
            costs = self._costs(p)
            layers = layers_by_kind(self.model, p, two_widths(self.model, p))
            units = {
                **layers,
                "embedding": embedding(self.model, p),
                "head": head(self.model, p),
            }
            times = {name: repeated_us(both, costs) for name, both in units.items()}
            slower = self._slower(p, costs, sum(times["layer"]))
            for name in (*layers, "head"):
                times[name] = [time * slower for time in times[name]]
            self._passes[key] = Pass(
                whole={name: sum(both) for name, both in times.items()},
                free={
                    name: [
                        time - central(costs.ports_us(segment)) * slower
                        for time, segment in zip(times[name], both, strict=True)
                    ]
                    for name, both in units.items()
                },
            )
        return self._passes[key]

    def _slower(self, p: Parallelism, costs: Costs, whole_us: float) -> float:
        """What the clock that power leaves makes of a layer; much the same for all microbatches."""
        key = (p.tp, p.cp, p.ep, p.sequence_parallel, as_asked(p), caught_up(p))
        if key not in self._clocks:
            self._clocks[key] = layer_us(self.model, p, costs) / whole_us
        return self._clocks[key]

    def _transfers_us(self, p: Parallelism) -> tuple[Times, Times]:
        """A message between stages, and what a stage that is late waits for of it."""
        size = 2.0 * shapes(self.model, p).local_tokens * self.model.hidden
        message, costs = Collective("send_recv", "pp", size), self._costs(p)
        both = costs.transfers_us(message), costs.lates_us(message)
        transfers, lates = (tuple(map(central, times)) for times in both)
        return transfers, lates

    def _sharded_us(self, p: Parallelism, one: Pass) -> list[float]:
        """What each stage's passes last longer with zero 2 and 3, for every microbatch."""
        every = [chunks(self.model, p, stage) for stage in range(p.pp)]
        costs, found = self._costs(p), {}
        for each in set(every):
            copies = shard_kernels(self.model, p, every.index(each))
            found[each] = sum(central(costs.kernel_us(kernel)) for kernel in copies)
            found[each] += sum(count * self._waits_us(p, one, units) for units, count in each)
        return [found[each] for each in every]

    def _waits_us(self, p: Parallelism, one: Pass, units: Pieces) -> float:
        """The same of a model chunk."""
        costs, total = self._costs(p), 0.0
        work = [
            {name: costs.draws.zero + one.free[name][way] for _, name in units}
            for way in (FORWARD, BACKWARD)
        ]
        for way in (FORWARD, BACKWARD):
            for each in waits(way, units, work, costs, self.model, p):
                slowing = costs.slowing(each.hidden, costs.slowed(each.one.axis))
                total += central(each.exposed + slowing)
        return total

    def _update_us(self, p: Parallelism, one: Pass) -> float:
        """Gradient reduction, parameter gather and update of the slowest stage in each.

        A stage ends its passes at least one backward pass before the first does. Stages that gather
        in turn: of all, those between as the last.
        """
        parts = [
            (
                self._waited_us(p, end.reduction, one, end.buckets, BACKWARD),
                self._waited_us(p, end.gather, one, end.buckets, FORWARD),
                end.kernels,
            )
            for end in self._of_ends(p)
        ]
        slowest: list[float] = [max(times) for times in zip(*parts, strict=True)]
        slowest[0] = max(parts[0][0], parts[-1][0] - self._chunk_us(p, one, BACKWARD))
        if gather_in_turn(p):
            slowest[1] = parts[0][1] + (p.pp - 1) * parts[-1][1]
        return self.calibration.host.step_us * self.calibration.host.slower + sum(slowest)

    def _waited_us(
        self,
        p: Parallelism,
        sent: list[dict[str, Array]],
        one: Pass,
        buckets: tuple[Bucket, ...],
        way: int,
    ) -> float:
        """What a stage waits for of what its chunks send, beside passes or not."""
        layers = self._costs(p).draws.zero + self._chunk_us(p, one, way)
        chunks = [Chunk(each, layers, layers) for each in sent]
        return central(waited_us(chunks, p, buckets, self._costs(p), way))

    def _chunk_us(self, p: Parallelism, one: Pass, way: int) -> float:
        """The pass of a model chunk's layers, on the mean."""
        model, free_us = self.model, one.free["layer"][way] * self.model.layers
        if model.dense_layers:
            free_us += model.dense_layers * (one.free["dense"][way] - one.free["layer"][way])
        return free_us / (p.pp * p.vpp)

    def _of_ends(self, p: Parallelism) -> list[Update]:
        """Of the first and the last stage."""
        key = (
            *(p.tp, p.pp, p.vpp, p.cp, p.dp, p.ep, p.zero, p.overlap, p.layers_per_stage),
            as_asked(p),
        )
        if key not in self._updates:
            costs, found = self._costs(p), []
            for stage in sorted({0, p.pp - 1}):
                kernels, *sent = optimizer(self.model, p, stage)
                if self.calibration.host.serial:
                    kernels += copied_alone(self.model, p, stage)
                reduction, gather = (
                    [self._sent_us(p, chunk) for chunk in by_chunk(one, self.model, p, stage)]
                    for one in sent
                )
                kernels_us, _ = costs.kernels(kernels)
                late_us = waits_us(self.model, p, costs, stage, kernels_us)
                updated_us = central(kernels_us + late_us)
                buckets = gradient_buckets(self.model, p, stage)
                found.append(Update(reduction, gather, updated_us, buckets))
            self._updates[key] = found
        return self._updates[key]

    def _sent_us(self, p: Parallelism, sent: tuple[Collective, ...]) -> dict[str, Array]:
        """By axis."""
        costs = self._costs(p)
        return by_axis((one, costs.collective_us(one)) for one in sent)


def _pipeline_us(
    stages: list[float], microbatches: int, chunks: int, transfers: Times, lates: Times
) -> float:
    """A pipeline whose stages take so long for a microbatch's forward and backward pass.

    Every microbatch on the slowest stage, and once through all others (arXiv 2104.04473, section
    2.2), with two transfers per stage. In 1F1B as many microbatches are in flight from a stage on
    as stages follow, so each also takes its share of a round trip from there to the last stage, or
    what it waits for of its exchanges with its neighbours.
    Interleaved, twice as many are, with two transfers per chunk, which take turns over a boundary:
    all of them, or between two stages those of each direction (see `simulate.step.messages`).
    """
    m, last = microbatches, len(stages) - 1
    ways = [2 * of_boundary(transfers, boundary) for boundary in range(last)]
    if chunks > 1:
        fill = (sum(stages) - max(stages)) / chunks + sum(ways) * chunks
        round_trip = sum(stages) / len(stages) / 2 + chunks * sum(ways) / last / 2
        turns = (chunks if last > 1 else chunks - 0.5) * m * max(ways)
        return max(m * max(stages) + fill, m * round_trip + fill / 2, turns)
    slowest, behind = 0.0, 0.0
    for count, stage in enumerate(reversed(stages), start=1):
        behind += stage
        number = len(stages) - count
        round_trip = (behind + sum(ways[number:])) / count
        before = sum(stages) - behind + sum(ways[:number])
        waits = sum(of_boundary(lates, boundary) for boundary in neighbours(number, len(stages)))
        slowest = max(slowest, before + m * max(stage + waits, round_trip))
    return slowest
