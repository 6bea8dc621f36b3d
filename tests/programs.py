"""Hand-made Programs for the Astra-Sim tests: 1F1B pipelines with every kind of parallelism."""

from collections.abc import Mapping, Sequence

from simulate.astra.program import Program, StageProgram, Task


class Builder:
    """Appends tasks to a stage; every method returns the new task's id."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(self, name: str, kind: str, deps: Sequence[int] = (), **fields: object) -> int:
        task = Task(len(self.tasks), name, kind, deps=tuple(deps), **fields)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task.id

    def compute(self, name: str, ns: float, deps: Sequence[int] = ()) -> int:
        return self.add(name, "compute", deps, duration_ns=ns)


def pipeline(
    axes: Mapping[str, int],
    microbatches: int = 8,
    *,
    forward_ns: Sequence[float] | float = 300_000.0,
    activation: int = 1 << 22,
    transfer_ns: float = 50_000.0,
    rest_ns: float | None = None,  # of a transfer that takes turns, asked for after the last pass
    layers: int = 1,
    tp: tuple[int, float] | None = None,  # bytes and ns of a tensor-parallel all-reduce
    ep: tuple[int, float] | None = None,  # of an all-to-all
    dp: tuple[int, float] | None = None,  # of the gradients' reduce-scatter and all-gather
    overlap: bool = False,  # the reduce-scatter in four buckets under the last backward pass
    norm_ns: float | None = None,
    optimizer_ns: float = 100_000.0,
) -> Program:
    """A 1F1B step: warm-up, steady state, cool-down, gradient reduction, norm, update, gather."""
    stages = axes.get("pp", 1)
    forward = [forward_ns] * stages if isinstance(forward_ns, float) else list(forward_ns)
    data = tuple(axis for axis in ("ep", "dp") if axes.get(axis, 1) > 1)
    programs = []
    for stage in range(stages):
        b = Builder()

        def layer(name: str, ns: float, after: Sequence[int], b: Builder = b) -> int:
            last = list(after)
            for number in range(layers):
                one = f"{name}.{number}"
                last = [b.compute(one, ns / layers, last)]
                if ep and axes.get("ep", 1) > 1:
                    last = [b.add(f"{one}.ep", "all_to_all", last, axes=("ep",), bytes=ep[0],
                                  time_ns=ep[1])]  # fmt: skip
                if tp and axes.get("tp", 1) > 1:
                    last = [b.add(f"{one}.tp", "all_reduce", last, axes=("tp",), bytes=tp[0],
                                  time_ns=tp[1])]  # fmt: skip
            return last[0]

        warm = min(stages - 1 - stage, microbatches)
        order = [(False, m) for m in range(warm)]
        for m in range(warm, microbatches):
            order += [(False, m), (True, m - warm)]
        order += [(True, m) for m in range(microbatches - warm, microbatches)]
        ends: dict[tuple[bool, int], int] = {}
        buckets: list[int] = []
        for backward, m in order:
            letter = "b" if backward else "f"
            source = stage + 1 if backward else stage - 1
            target = stage - 1 if backward else stage + 1
            after = [ends[False, m]] if backward else []
            if (tp or ep) and ends:  # a pass begins when the last one's collectives are through
                after.append(next(reversed(ends.values())))
            if 0 <= source < stages:
                asked = list(ends.values())[-1:] if rest_ns is not None else []
                after.append(b.add(f"recv.{letter}{m}", "recv", asked, bytes=activation,
                                   peer=source, tag=2 * m + backward))  # fmt: skip
            time = forward[stage] * (2 if backward else 1)
            if backward and overlap and dp and data and m == microbatches - 1:
                for part in range(4):
                    end = b.compute(f"b{m}.part{part}", time / 4, after)
                    after = [end]
                    buckets.append(b.add(f"grad.{part}", "reduce_scatter", after, axes=data,
                                         bytes=dp[0] // 4, time_ns=dp[1] / 4))  # fmt: skip
            else:
                end = layer(f"{letter}{m}", time, after)
            ends[backward, m] = end
            if 0 <= target < stages:
                b.add(f"send.{letter}{m}", "send", [end], bytes=activation, peer=target,
                      tag=2 * m + backward, time_ns=transfer_ns, rest_ns=rest_ns)  # fmt: skip
        last = [ends[True, microbatches - 1], *buckets]
        if dp and data and not buckets:
            last = [b.add("grad", "reduce_scatter", last, axes=data, bytes=dp[0], time_ns=dp[1])]
        if norm_ns is not None:
            wide = (*data, "pp") if stages > 1 else data
            if wide:
                last = [b.add("norm", "all_reduce", last, axes=wide, bytes=4, time_ns=norm_ns)]
        last = [b.compute("update", optimizer_ns, last)]
        if dp and data:
            b.add("gather", "all_gather", last, axes=data, bytes=dp[0] // 2, time_ns=dp[1] / 2)
        programs.append(StageProgram(tuple(b.tasks)))
    return Program(dict(axes), tuple(programs))
