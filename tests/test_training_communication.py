"""What Megatron-Core really sends in a step, against what `spec.step` says it sends."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from simulate.memory.communicators import communicators
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import by_chunk, layer, optimizer, shared_gradients
from spec.step_ends import embedding, head
from spec.step_parts import Segment
from tests.real_steps import GPT, LATENT, LLAMA, NORMED, SHARED, logged
from tests.sharded import of_microbatch

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

LITE = LATENT.resized(name="tiny-deepseek-lite", q_lora_rank=0)
ADAPTED = LLAMA.resized(lora_rank=4)
FOUR = LLAMA.resized(layers=4)
EXPERTS = LLAMA.resized(name="tiny-moe", experts=4, top_k=2)
FIRST = EXPERTS.resized(name="tiny-first-dense", dense_layers=1, dense_ffn_hidden=192)

Sent = Counter[tuple[str, int]]  # (collective, nccl-tests' bytes), by ranks that take part
Call = tuple[str, int, tuple[int, ...], str]  # collective, bytes, ranks and name of the group
MESSAGES = ("isend", "irecv", "all_to_all")


def _record(log: list[Call]) -> None:
    """Note every collective of this process."""
    import torch.distributed as dist

    # what holds all ranks' data, by place and by name; FSDP of newer torch says `single`
    whole = {"all_reduce": (0, "tensor"), "all_to_all_single": (1, "input")}
    names = {"all_to_all_single": "all_to_all"}
    for ending in ("into_tensor", "single"):
        whole[f"all_gather_{ending}"] = (0, "output_tensor")
        names[f"all_gather_{ending}"] = "all_gather"
    for ending in ("tensor", "single"):
        whole[f"reduce_scatter_{ending}"] = (1, "input")
        names[f"reduce_scatter_{ending}"] = "reduce_scatter"

    def note(kind: str, tensor: Any, group: Any) -> None:
        group = group or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        log.append((kind, tensor.numel() * tensor.element_size(), ranks, group.group_name))

    def watch(name: str, place: int, argument: str) -> None:
        original = getattr(dist, name, None)
        if original is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = kwargs[argument] if argument in kwargs else args[place]
            note(names.get(name, name), tensor, kwargs.get("group"))
            return original(*args, **kwargs)

        for module in list(sys.modules.values()):  # some keep the function under their own name
            if module is dist or getattr(module, "__name__", "").startswith("megatron.core"):
                for own, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, own, call)

    for name, (place, argument) in whole.items():
        watch(name, place, argument)
    messages = dist.batch_isend_irecv

    def batch(operations: Any) -> Any:
        for one in operations:
            note(one.op.__name__, one.tensor, one.group)
        return messages(operations)

    dist.batch_isend_irecv = batch
    from megatron.core.pipeline_parallel import p2p_communication

    one_by_one = p2p_communication._p2p_ops  # what the interleaved schedule calls

    def operations(**tensors: Any) -> Any:
        for name, tensor in tensors.items():
            if name.startswith("tensor_") and tensor is not None:
                note("isend" if "send" in name else "irecv", tensor, tensors["group"])
        return one_by_one(**tensors)

    p2p_communication._p2p_ops = operations


@contextlib.contextmanager
def _collectives_called(log: list[Call]) -> Iterator[None]:
    _record(log)
    yield


def called(model: ModelSpec, p: Parallelism) -> tuple[list[Call], ...]:
    """The collectives that each rank called in one step."""
    return logged(model, p, _collectives_called)


def sent(model: ModelSpec, p: Parallelism) -> list[dict[tuple[int, ...], Sent]]:
    """What each rank sent in one step, by the group's ranks; groups of one send nothing."""
    found = []
    for calls in called(model, p):
        by_group: dict[tuple[int, ...], Sent] = {}
        for kind, nbytes, ranks, _ in calls:
            if len(ranks) > 1:
                by_group.setdefault(ranks, Counter())[kind, nbytes] += 1
        found.append(by_group)
    return found


def _collectives(segments: tuple[Segment, ...]) -> list[Collective]:
    parts = [part for segment in segments for part in segment]
    return [one for part in parts for one in (*part.exposed, *part.hidden)]


def _tensor_parallel(model: ModelSpec, p: Parallelism) -> Sent:
    """What `spec.step` says that tensor parallelism sends in a step without pipeline."""
    found: Sent = Counter()
    for segments, times in (
        *((layer(kind, p), count) for kind, count in p.layers_of(model, 0)),
        (embedding(model, p), 1),
        (head(model, p), 1),
    ):
        for one in _collectives(segments):
            found[one.kind, int(one.bytes)] += times * p.microbatches
    for one in shared_gradients(model, p, 0):
        found[one.kind, int(one.bytes)] += 1
    return found


@pytest.mark.parametrize("model", [LLAMA, GPT, NORMED, LATENT, LITE], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "split", [{}, {"sequence_parallel": True}, {"recompute": "full", "sequence_parallel": True}]
)
def test_tensor_parallel_traffic(model: ModelSpec, split: dict[str, Any]) -> None:
    p = Parallelism(tp=2, global_batch=2, **split)
    (observed,) = sent(model, p)[0].values()
    expected = _tensor_parallel(model, p)
    expected["all_reduce", 4] += 1  # the gradient norm
    assert observed == expected


@pytest.mark.parametrize("split", [{}, {"sequence_parallel": True}], ids=str)
def test_adapters_traffic(split: dict[str, Any]) -> None:
    p = Parallelism(tp=2, global_batch=2, **split)
    (observed,) = sent(ADAPTED, p)[0].values()
    expected = _tensor_parallel(ADAPTED, p)
    expected["all_reduce", 4] += 1  # the gradient norm
    assert observed == expected


def test_ring_of_attention_traffic() -> None:
    p = Parallelism(cp=2, global_batch=2)
    ring = [one for one in _collectives(layer(LLAMA, p)) if one.axis == "cp"]
    assert len({one.bytes for one in ring}) == 1
    for rank in sent(LLAMA, p):
        times = len(ring) * LLAMA.layers * p.microbatches
        messages = {key: count for key, count in rank[0, 1].items() if "send" in key[0]}
        assert messages == {("isend", ring[0].bytes): times}
        assert _large(rank[0, 1]) == pytest.approx(_replicas(LLAMA, p), rel=0.01)


def _replicas(model: ModelSpec, p: Parallelism) -> Counter[str]:
    """Bytes of gradient reduction and parameter gather."""
    _, reduction, gather = optimizer(model, p, 0)
    return Counter({one.kind: int(one.bytes) for one in (*reduction, *gather)})


def _large(observed: Sent) -> Counter[str]:
    """Bytes by collective, without messages and the gradient norm's."""
    found: Counter[str] = Counter()
    for (kind, nbytes), count in observed.items():
        if nbytes > 4 and kind not in ("isend", "irecv"):
            found[kind] += nbytes * count
    return found


def test_pipeline_traffic() -> None:
    p = Parallelism(pp=2, global_batch=4)
    message = 2 * LLAMA.seq_len * LLAMA.hidden
    for rank in sent(LLAMA, p):
        (observed,) = rank.values()
        assert observed["isend", message] == observed["irecv", message] == p.microbatches
        assert observed["all_reduce", 4] == 1  # the gradient norm
        assert sum(observed.values()) == 2 * p.microbatches + 1


@pytest.mark.parametrize("zero", [0, 1])
def test_data_parallel_traffic(zero: int) -> None:
    p = Parallelism(dp=2, global_batch=2, zero=zero)
    observed = sent(LLAMA, p)[0][0, 1]
    _, reduction, gather = optimizer(LLAMA, p, 0)
    for one in (*reduction, *gather):
        if one.bytes:
            sizes = [nbytes for kind, nbytes in observed if kind == one.kind and nbytes > 4]
            # Megatron-Core pads its buffers to a multiple of 64 elements per parameter
            assert sizes == [pytest.approx(one.bytes, rel=0.01)]


def test_sharded_weights_traffic() -> None:
    """In every microbatch each unit is gathered for forward and for backward, scattered once."""
    p = Parallelism(dp=2, zero=3, overlap=True, global_batch=4)
    observed = Counter({call: n for call, n in sent(LLAMA, p)[0][0, 1].items() if call[1] > 4})
    each = of_microbatch(LLAMA, p) * p.microbatches
    assert observed == Counter((one.kind, int(one.bytes)) for one in each)


@pytest.mark.parametrize("model", [EXPERTS, SHARED], ids=lambda model: model.name)
@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_beside_split_experts_are_gathered_twice(
    overlap: bool, model: ModelSpec
) -> None:
    p = Parallelism(dp=2, ep=2, global_batch=2, overlap=overlap)
    observed = sent(model, p)[0][0, 1]
    _, _, gather = optimizer(model, p, 0)
    assert len(gather) == (1 if overlap else 2)
    times = {n: times for (kind, n), times in observed.items() if kind == "all_gather" and n > 1e4}
    total = sum(nbytes * count for nbytes, count in times.items())
    assert total == pytest.approx(sum(one.bytes for one in gather), rel=0.02)


@pytest.mark.parametrize("model", [EXPERTS, FIRST], ids=lambda model: model.name)
def test_experts_exchange_traffic(model: ModelSpec) -> None:
    """Tokens and their probabilities; what one rank gets more the other gets less."""
    p = Parallelism(dp=2, ep=2, global_batch=4)
    calls: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    layers = model.layers - model.dense_layers
    for one in _collectives(layer(model, p)):
        calls[one.kind] += layers * p.microbatches
        expected[one.kind] += 2 * int(one.bytes) * layers * p.microbatches
    observed: Counter[str] = Counter()
    for rank in sent(model, p):
        exchanged = {key: n for key, n in rank[0, 1].items() if key[0] == "all_to_all"}
        assert sum(exchanged.values()) == calls["all_to_all"]
        for (kind, nbytes), times in exchanged.items():
            observed[kind] += nbytes * times
    assert observed["all_to_all"] == expected["all_to_all"]


def test_first_layers_without_experts_send_as_a_dense_models() -> None:
    p = Parallelism(tp=2, sequence_parallel=True, global_batch=2)
    for model in (EXPERTS, FIRST):
        (observed,) = sent(model, p)[0].values()
        expected = _tensor_parallel(model, p)
        for kind in ("all_gather", "reduce_scatter"):  # experts' go as lists, which are not noted
            activations = kind, 2 * model.seq_len * model.hidden
            assert 0 < observed[activations] == expected[activations], (model.name, kind)
        (summed,) = shared_gradients(model, p, 0)
        assert observed["all_reduce", int(summed.bytes)] == 1


@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_without_experts_sends_gradients_of_its_own_layers(zero: int) -> None:
    """Stages of two replicas; where it gathers parameters it does so twice, as all stages do."""
    p = Parallelism(pp=2, dp=2, ep=2, zero=zero, global_batch=4)
    ranks = sent(FIRST, p)
    for stage, group in enumerate(((0, 1), (2, 3))):
        _, reduction, gather = optimizer(FIRST, p, stage)
        expected = Counter[tuple[str, int]](
            (one.kind, int(one.bytes)) for one in reduction + gather
        )
        observed = {
            call: n
            for call, n in ranks[group[0]][group].items()
            if call[0] in ("all_reduce", "all_gather", "reduce_scatter") and call[1] > 1000
        }
        assert observed == expected
        exchanges = sum(n for (kind, _), n in ranks[group[0]][group].items() if "to_all" in kind)
        assert (exchanges > 0) == (stage == 1)


def test_what_a_shared_expert_sends_beside_others() -> None:
    p = Parallelism(tp=2, sequence_parallel=True, global_batch=2)
    told, seen = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for model, sign in ((SHARED, 1), (EXPERTS, -1)):
        for found, counts in ((told, _tensor_parallel(model, p)), (seen, sent(model, p)[0][0, 1])):
            found.update({key: sign * count for key, count in counts.items()})
    told, seen = (Counter({k: n for k, n in one.items() if n}) for one in (told, seen))
    assert seen == told
    assert sum(told.values()) > 0


def test_interleaved_pipeline_traffic() -> None:
    """Each chunk's activations and gradients, but into the first chunk and out of the last one."""
    p = Parallelism(pp=2, vpp=2, global_batch=4)
    message = 2 * FOUR.seq_len * FOUR.hidden
    for rank, observed in enumerate(one[0, 1] for one in sent(FOUR, p)):
        inside = p.vpp if rank == 0 else p.vpp - 1  # chunks with one after them, or before them
        passed = (inside + (p.vpp - 1 if rank == 0 else p.vpp)) * p.microbatches
        assert observed["isend", message] == observed["irecv", message] == passed


@pytest.mark.parametrize(
    ("model", "ep"),
    [(FOUR, 1), (FIRST.resized(layers=4), 2)],
    ids=lambda value: value.name if isinstance(value, ModelSpec) else str(value),
)
def test_each_chunk_reduces_and_gathers_by_itself(model: ModelSpec, ep: int) -> None:
    p = Parallelism(dp=2, pp=2, vpp=2, ep=ep, global_batch=4, overlap=True)
    ranks = sent(model, p)
    for stage, group in enumerate(((0, 1), (2, 3))):
        observed = ranks[group[0]][group]
        _, *both = optimizer(model, p, stage)
        for chunks in (by_chunk(one, model, p, stage) for one in both):
            kind = chunks[0][0].kind
            sizes = sorted(n for (own, n), count in observed.items() if own == kind and count == 1)
            expected = sorted(one.bytes for (one,) in chunks)
            assert sizes == pytest.approx(expected, rel=0.02)  # padded, see above


def test_shared_embeddings_are_reduced_between_first_and_last_stage() -> None:
    p = Parallelism(pp=2, global_batch=2)
    for rank in sent(GPT, p):
        assert rank[0, 1]["all_reduce", 4 * GPT.vocab * GPT.hidden] == 1


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (LLAMA, {"zero": 0, "dp": 2}),
        (LLAMA, {"zero": 3, "dp": 2, "overlap": True}),
        (LLAMA, {"tp": 2}),
        (LLAMA, {"cp": 2}),
        (GPT, {"pp": 2}),
        (EXPERTS, {"dp": 2}),
        (EXPERTS, {"dp": 2, "ep": 2}),
        (EXPERTS, {"zero": 0, "dp": 2, "ep": 2}),
        (FIRST, {"dp": 2, "ep": 2, "pp": 2}),
        (FIRST, {"zero": 0, "dp": 2, "ep": 2, "pp": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.name,
)
def test_groups_in_use_are_the_communicators_that_memory_counts(
    model: ModelSpec, split: dict[str, Any]
) -> None:
    """A group has one from its first use on, also where a rank is alone in it."""
    p = Parallelism(global_batch=2, **split)
    for rank, calls in enumerate(called(model, p)):
        ranks = {name: len(members) for _, _, members, name in calls}
        collective = {name for kind, _, _, name in calls if kind not in MESSAGES}
        observed = Counter((size, name in collective) for name, size in ranks.items())
        observed[p.gpus, True] += 1  # the world's, whose barriers are no part of a step
        stage = rank * p.pp // p.gpus
        counted = communicators(model, p, stage, p.gpus)
        assert Counter((one.ranks, one.collectives) for one in counted) == observed
