"""Training steps over all devices of several hosts, as data."""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from measure.plans.emulation import communication_s
from measure.training.plan import QUICK_CASES, WARM_UP, TrainingCase, case_of
from spec.errors import UserError
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig

# (model, layers, sequence) by what it runs on; the second is the mixture of experts
_MODELS = {
    True: (("llama3-8b", 32, 4096), ("mixtral-8x7b", 4, 4096)),
    False: (("tiny", 4, 128), None),
}
# of one rank between hosts, 1e9 bytes/s: a NIC for each GPU, a core's share of Ethernet. For
# estimates of durations only.
GBYTES_PER_S = {True: 20.0, False: 0.1}


def _splits(hosts: int, per_host: int) -> Iterator[tuple[int, int, int, int]]:
    """(TP, PP, DP, EP) over all devices, most instructive first."""
    world = hosts * per_host
    yield per_host, 1, hosts, 1
    yield 1, 1, world, 1
    yield per_host, hosts, 1, 1
    yield 1, 1, world, min(world, 8)
    yield 1, per_host, hosts, 1
    if hosts % 2 == 0:
        yield per_host, 2, hosts // 2, 1
    if per_host % 2 == 0:
        yield 2, per_host // 2, hosts, 1
        yield per_host // 2, 1, 2 * hosts, 1
    yield world, 1, 1, 1


def cases(hosts: int, per_host: int, device_kind: str, quick: bool) -> list[TrainingCase]:
    """Steps over all devices of so many hosts; those that a model cannot be split into are left."""
    gpu = device_kind in ("nvidia", "amd")
    dense, sparse = _MODELS[gpu]
    found: dict[str, TrainingCase] = {}
    for tp, pp, dp, ep in _splits(hosts, per_host):
        chosen = dense if ep == 1 else sparse
        if chosen is None:
            continue
        name, layers, seq_len = chosen
        if gpu and tp * pp * ep == 1:
            layers //= 2  # or 80 GiB would not hold them
        model = load_model(name).resized(layers=layers, seq_len=seq_len)
        try:
            split = Parallelism(
                tp=tp,
                pp=pp,
                dp=dp,
                ep=ep,
                sequence_parallel=tp > 1,
                overlap=gpu and dp > 1 and pp == 1,  # a CPU's model has one bucket
                global_batch=dp * max(2, 2 * pp),
            )
            split.check(model)
            case = on_hosts(case_of(model, split, device_kind, quick), hosts, device_kind)
        except (UserError, ValidationError):
            continue
        found.setdefault(case.case_id, case)
    return list(found.values())[: QUICK_CASES if quick else None]


def on_hosts(case: TrainingCase, hosts: int, device_kind: str) -> TrainingCase:
    """The case over so many hosts, with the time that its communication takes about."""
    p = case.parallelism
    own = case.case_id == TrainingConfig.name_of(case.model, p)
    seconds = case.seconds
    if hosts > 1:
        rate = GBYTES_PER_S[device_kind in ("nvidia", "amd")]
        step = communication_s(case.model, p, hosts, rate)
        seconds += step * (case.steps + WARM_UP + 2)
    return replace(
        case,
        nodes=hosts,
        seconds=round(seconds, 1),
        case_id=TrainingConfig.name_of(case.model, p, hosts) if own else case.case_id,
    )
