"""Context parallelism that exchanges tokens for heads: what runs and is sent, and what it takes."""

import pytest
from pydantic import ValidationError

from calibrate.host.equations import equations
from measure.suites.host_time import HostCase, cases, in_order, measure
from measure.training.steps import StepTimes
from simulate.cost.costs import Costs
from simulate.cost.groups import layout
from simulate.cost.uncertainty import Draws
from simulate.hardware.as_run import as_run
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.communicators import communicators
from simulate.plans.find import smallest
from simulate.project import main as project
from simulate.validation.cases import kind_of, nearest
from spec.calibration import HostVisit
from spec.collective import Collective, busbw_factor
from spec.command import run
from spec.errors import UserError
from spec.fitted import changed
from spec.measurable import refuse
from spec.model import ModelSpec, load_model
from spec.nil import ON_GPU, nil_model
from spec.parallelism import Parallelism, describe
from spec.records import HostRow
from spec.step import layer
from spec.step_parts import Part
from spec.training_records import TrainingConfig, TrainingRow
from tests.simulated_steps import CALIBRATION, FABRIC, MOE, NODE, simulate
from tests.test_nil_steps import nil_row

LLAMA = load_model("llama3-8b").resized(seq_len=16384)
RING = Parallelism(cp=2, global_batch=2, transformer_impl="transformer_engine")
HEADS = RING.model_copy(update={"cp_comm_type": "a2a"})
NAMES = ("exchange", "attention", "exchange")


def core(model: ModelSpec, p: Parallelism) -> tuple[list[Part], list[Part]]:
    """The parts around attention, forward and backward."""
    forward, backward = ([one for one in way if one.name in NAMES] for way in layer(model, p))
    return forward, backward


def test_a_layers_kernels_and_messages_are_those_of_its_profile() -> None:
    """By a trace of Llama 3 8B over two H200, 16,384 tokens, rank 0, its second layer; cuDNN's
    count as one, memsets not. Values are copied out of the first product before all of it."""
    forward, backward = core(LLAMA, HEADS)
    assert [one.name for one in forward] == [one.name for one in backward] == list(NAMES)
    queries, keys = (8192, 32, 128), (8192, 8, 128)
    given = [("reorder", queries), ("reorder", keys), ("reorder", keys)]
    sizes = [4 * 8192 * heads * 128 for heads in (32, 8, 8)]
    for part in (forward[0], backward[2]):
        assert [one.bytes for one in part.hidden] == [one / 2 for one in sizes]
        assert part.exposed == ()
    assert [(one.op, one.dims) for one in forward[0].kernels[:3]] == given
    assert [one.bytes for one in forward[0].kernels[3:]] == sizes
    assert [one.bytes for one in backward[2].kernels[:3]] == sizes
    assert [(one.op, one.dims) for one in backward[2].kernels[3:]] == given
    for part, ops in ((forward[2], ["copy", "reorder"]), (backward[0], ["reorder", "copy"])):
        assert [one.op for one in part.kernels] == ops
        assert ([one.bytes for one in part.exposed], part.hidden) == ([sizes[0] / 2], ())
    *copied_out, own = forward[1].kernels
    assert [one.bytes for one in copied_out] == [sizes[1]]
    assert (own.dims, backward[1].kernels[-1].dims) == ((1, 16384, 16, 4, 128),) * 2


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_it_sends_what_its_paper_counts_and_a_ring_more(cp: int) -> None:
    """Of Ulysses (arXiv 2309.14509, section 3.2): each way four tensors' 1 / cp of a GPU's tokens
    to each other GPU. A ring sends all keys and values cp - 1 times, and their gradients cp."""
    share = LLAMA.seq_len // cp * LLAMA.head_dim * 2.0
    told = (2 * LLAMA.heads + 2 * LLAMA.kv_heads) * share * (cp - 1) / cp
    for way in core(LLAMA, HEADS.model_copy(update={"cp": cp})):
        sent = [one for part in way for one in (*part.exposed, *part.hidden)]
        assert {(one.kind, one.axis) for one in sent} == {("all_to_all", "cp")}
        assert sum(one.bytes * busbw_factor(one.kind, cp) for one in sent) == pytest.approx(told)


def test_messages_have_beside_them_all_but_the_first_and_the_last_kernel() -> None:
    """Of three tensors alike two thirds of the kernels' time, of few key heads less."""
    for heads, share in ((LLAMA.heads, 2 / 3), (LLAMA.kv_heads, 1 - (2.4 * 4 + 1) / (3.4 * 6))):
        alike = LLAMA.model_copy(update={"kv_heads": heads})
        assert core(alike, HEADS)[0][0].covers == pytest.approx(share)
    few, back = core(LLAMA, HEADS)[0][0], core(LLAMA, HEADS)[1][2]
    assert back.covers == pytest.approx(1 - (4 + 2.4) / (3.4 * 6))
    assert few.covers < back.covers


def test_attention_is_as_much_work_in_all_as_on_one_gpu() -> None:
    whole = core(LLAMA, RING.model_copy(update={"cp": 1}))
    for cp in (2, 4, 8):
        for way, one in zip(core(LLAMA, HEADS.model_copy(update={"cp": cp})), whole, strict=True):
            flops = [sum(k.flops for part in some for k in part.kernels) for some in (way, one)]
            assert cp * flops[0] == flops[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cp": 1}, r"a2a has no effect with cp 1; use a larger cp, or p2p"),
        (
            {"transformer_impl": "local"},
            r"local layers have a ring; use .* transformer_engine, or p2p",
        ),
        ({"cp_comm_type": "all_gather"}, "'p2p' or 'a2a'"),
    ],
)
def test_what_has_no_such_exchange_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Parallelism.model_validate(HEADS.model_dump() | fields)


def test_heads_must_be_as_many_as_ranks() -> None:
    few = LLAMA.model_copy(update={"kv_heads": 4})
    with pytest.raises(UserError, match=r"cp 2 does not divide the 1 kv_heads that tp 8 leaves"):
        HEADS.model_copy(update={"tp": 8}).check(few)
    HEADS.model_copy(update={"cp": 8}).check(LLAMA)
    with pytest.raises(UserError, match=r"cp 16 does not divide the 8 kv_heads that tp 1 leaves"):
        HEADS.model_copy(update={"cp": 16}).check(LLAMA)
    with pytest.raises(UserError, match=r"cp 4 does not divide the 2 kv_heads that tp 4 leaves"):
        HEADS.model_copy(update={"cp": 4, "tp": 4}).check(LLAMA)
    refuse(MOE, HEADS)
    refuse(LLAMA, HEADS.model_copy(update={"cuda_graphs": True}))


def test_it_is_named_in_cases_and_plans() -> None:
    assert "CP2 a2a" in describe(HEADS)
    assert "-CP2-a2a-" in TrainingConfig.name_of(LLAMA, HEADS)
    assert "a2a" not in describe(RING) + TrainingConfig.name_of(LLAMA, RING)


def test_attention_that_runs_again_exchanges_again() -> None:
    _, backward = core(LLAMA, HEADS.model_copy(update={"recompute": "selective"}))
    assert [one.name for one in backward] == list(NAMES) * 2
    assert [one.checkpoint for one in backward] == [True, *[False] * 5]


@pytest.mark.parametrize("fp8", [False, True])
def test_its_host_has_a_time_of_its_own_for_a_tensor(fp8: bool) -> None:
    p = HEADS.model_copy(update={"fp8": fp8})
    for way in core(LLAMA, p):
        assert sum(part.issued.get("te_exchange", 0) for part in way) == 4
        assert sum(sum(part.issued.values()) for part in way) == 5  # attention's part beside
    slow = changed(CALIBRATION, host=changed(CALIBRATION.host, te_exchange_us=1e5))
    for split, longer in ((RING, False), (p, True)):
        before, after = (float(simulate(split, one).step_time_s[0]) for one in (CALIBRATION, slow))
        assert (after > 1.5 * before) == longer
    older = changed(CALIBRATION, host=changed(CALIBRATION.host, te_exchange_us=0.0))
    with pytest.raises(
        UserError, match=r"cp_comm_type a2a: .* no host\.te_exchange_us, as it is older"
    ):
        as_run(older, p, NODE, LLAMA)
    assert as_run(older, RING, NODE, LLAMA).host.te_exchange_us == 0.0


def test_nil_steps_show_it_where_it_is_planned() -> None:
    found = cases("nvidia", devices=2, engine=True)
    (case,) = (one for one in found if one.cp_comm_type == "a2a")
    assert case.case_id.endswith("-CP2-a2a-TE")
    assert case.shows == {"transformer_engine", "te_a2a"}
    for p, first in ((HEADS, True), (RING, False)):
        needed = in_order(found, [(LLAMA, p)])
        ring = next(one for one in needed if one.shows == {"transformer_engine", "te_p2p"})
        assert (needed.index(case) < needed.index(ring)) == first


def test_a_nil_step_counts_its_tensors() -> None:
    case = HostCase(1.0, 2, cp=2, transformer_impl="transformer_engine", cp_comm_type="a2a")
    assert case.split(1).exchanges_heads
    row = nil_row(case, slower=1.0)
    forward, backward, *_ = equations(row, CALIBRATION.kernels, 1.0)
    assert forward.counts["te_exchange"] == backward.counts["te_exchange"] == 4
    parts = len(layer(nil_model(ON_GPU), HEADS)[0])
    assert forward.counts["te_part"] == backward.counts["te_backward_part"] == parts - 2
    for fields, lacking in (
        ({"cp": 1}, "cp 1"),
        ({"transformer_impl": "local"}, "transformer_impl local"),
        ({"gpus": 32, "tp": 4, "cp": 4}, r"tp \* cp 16, no divisor of 8 heads,"),
    ):
        with pytest.raises(ValidationError, match=f"is a2a; with {lacking} it must be p2p"):
            HostRow.model_validate(row.model_dump() | fields)
    assert HostRow.model_validate(row.model_dump() | {"gpus": 8, "tp": 2, "cp": 4}).cp == 4


def test_its_output_is_kept_twice_but_in_fp8() -> None:
    """By token as the projection takes it, and by head as attention left it, which in FP8 the
    projection keeps as it was cast, and which attention that runs again does not keep."""
    output = 2.0 * LLAMA.seq_len / 2 * LLAMA.heads * LLAMA.head_dim
    for more, twice in (({}, 1), ({"fp8": True}, 0), ({"recompute": "selective"}, 0)):
        kept = [layer_activation_bytes(LLAMA, p.model_copy(update=more)) for p in (RING, HEADS)]
        assert kept[1] - kept[0] == twice * output


def test_every_rank_sends_to_all_others_between_nodes() -> None:
    for p, pattern in ((RING, "send-recv"), (HEADS, "all-to-all")):
        wide = p.model_copy(update={"cp": 8, "tp": 8})
        assert layout(wide, NODE, FABRIC).paths["cp"].pattern == pattern


def test_experts_that_get_more_tokens_do_not_lengthen_it() -> None:
    """The fullest rank's load lengthens what experts exchange."""
    p = HEADS.model_copy(update={"dp": 2, "ep": 2, "global_batch": 4})
    for axis, times in (("cp", 1.0), ("ep", 2.0)):
        even, uneven = (
            Costs(CALIBRATION, NODE, FABRIC, p, Draws(0), fullest).collective_us(
                Collective("all_to_all", axis, 2.0**26)
            )
            for fullest in (None, 2.0)
        )
        assert uneven == pytest.approx(times * even)


def words(gpus: int, *more: str) -> list[str]:
    return ["--gpus", str(gpus), "--draws", "20", "--cp-comm-type", "a2a", *more]


ENGINE = ("--transformer-impl", "transformer_engine")
SPLIT = ("--tp", "1", "--pp", "1")


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (64, ("--global-batch", "64")),
        (64, ("--global-batch", "64", "--cp", "2")),
        (64, ("--global-batch", "16")),  # which cp 2 leaves no sequence for
        (8, ("--dp", "2")),
    ],
)
def test_a_projection_has_it_as_an_option(
    gpus: int, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not given is searched for: how many ranks exchange, too."""
    asked = words(gpus, "--model", "llama3-8b", *ENGINE, *SPLIT, *more, "--json")
    assert run(project, asked) == 0
    assert '"cp_comm_type": "a2a"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "model", "more", "why"),
    [
        (64, "llama3-8b", SPLIT, "local layers have a ring; use transformer_impl"),
        (3, "llama3-8b", (), "local layers have a ring; use transformer_impl"),
        (
            64,
            "falcon-7b",
            (*ENGINE, *SPLIT),
            "tp 1 leaves a GPU of falcon-7b, 1, and the GPUs that are left, 64",
        ),
        (
            9,
            "llama3-8b",
            ENGINE,
            "tp 1 leaves a GPU of llama3-8b, 8, and the GPUs that are left, 9",
        ),
        (1, "llama3-8b", ENGINE, "and the GPUs that are left, 1"),
        (8, "llama3-8b", (*ENGINE, "--tp", "8"), "tp 8 leaves a GPU of llama3-8b, 1, and"),
        (64, "llama3-8b", (*ENGINE, *SPLIT, "--dp", "64"), "and the GPUs that are left, 1"),
        (64, "falcon-7b", (*ENGINE, *SPLIT, "--cp", "2"), "of falcon-7b; use p2p\n"),
        (5, "smollm2-360m", (*ENGINE, "--ep", "2", "--seq-len", "2560"), "divide dp * cp = 5\n"),
        (64, "llama3-8b", (*ENGINE, "--tp", "8", "--cp", "8"), "use p2p or a smaller tp\n"),
        (
            64,
            "llama3-8b",
            (*ENGINE, "--tp", "2", "--cp", "8"),
            "use p2p or a smaller cp or a smaller tp\n",
        ),
    ],
)
def test_what_stands_in_its_way_is_named(
    gpus: int, model: str, more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(project, words(gpus, "--model", model, *more, "--global-batch", "64")) == 2
    assert why in capsys.readouterr().err


def test_another_plan_of_the_same_kind_is_named_where_none_fits() -> None:
    p = HEADS.model_copy(update={"global_batch": 64, "cp": 8})
    found = smallest(load_model("llama3-70b"), p, NODE, FABRIC)
    assert found is not None
    assert found.exchanges_heads


def test_ranks_have_channels_to_all_others() -> None:
    """A ring's have one each way."""
    for p, peers in ((RING, 1), (HEADS, 3)):
        wide = p.model_copy(update={"cp": 4})
        (own,) = (one for one in communicators(LLAMA, wide, 0, 4) if not one.collectives)
        assert (own.ranks, own.sends, own.receives) == (4, peers, peers)


def test_what_a_hosts_own_nil_steps_show_has_no_spread_of_its_own() -> None:
    """And what they do not makes an interval wider."""
    slow = changed(CALIBRATION.host, te_exchange_us=5e3, te_exchange_sd=0.5, visits=())
    times = {"te_exchange_us": 5e3, "part_us": slow.part_us}
    own = HostVisit(devices=("a",), slower=1.0, times_us=times)
    shown = changed(slow, visits=(own,)).on_devices(["a"])
    assert (slow.te_exchange_sd, shown.te_exchange_sd) == (0.5, 0.0)
    widths = []
    for host in (slow, changed(slow, te_exchange_sd=0.0)):
        drawn = simulate(HEADS, changed(CALIBRATION, host=host), draws=200).step_time_s
        widths.append(float(drawn.std() / drawn.mean()))
    assert widths[0] > 1.5 * widths[1]


def test_measured_rows_are_kinds_of_their_own_and_nearest_their_like() -> None:
    rows = {p: TrainingConfig.of("one", LLAMA, p) for p in (RING, HEADS)}
    assert [kind_of(rows[p]) for p in (RING, HEADS)] == ["CP, TE", "CP, a2a TE"]
    others = [
        TrainingRow.model_validate(
            rows[p].model_dump()
            | {"case_id": p.cp_comm_type, "status": "done", "framework": "", "steps": 1}
        )
        for p in (RING, HEADS)
    ]
    for p in (RING, HEADS):
        found = nearest(rows[p], [others[1], others[0]])
        assert found is not None
        assert found.case_id == p.cp_comm_type


def test_a_measured_nil_step_is_filed_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [{"layers_forward_s": 0.001, "layers_backward_s": 0.002}]
    found = StepTimes([0.1], passes, [0.01]), StepTimes([0.3], passes, [0.02])
    monkeypatch.setattr("measure.training.steps.step_times", lambda *_, **__: found)
    case = HostCase(1.0, 2, cp=2, transformer_impl="transformer_engine", cp_comm_type="a2a")
    assert measure(case, "nvidia").cp_comm_type == "a2a"


def test_copies_before_an_exchange_are_of_all_heads() -> None:
    """Of grouped queries without rotary positions keys and values, whatever the ranks."""
    model = load_model("gpt3-30b").resized(seq_len=4096)
    for kv_heads, copies in ((2, 2), (4, 2), (model.heads, 3)):
        grouped = model.model_copy(update={"kv_heads": kv_heads})
        *copied_out, _ = core(grouped, HEADS)[0][1].kernels
        assert len(copied_out) == copies


def test_exchanges_from_graphs_are_as_sure_as_steps_of_one_gpu() -> None:
    """Of two GPUs of an H200, where seven were measured; a ring's are less so."""
    one = RING.model_copy(update={"cp": 1})
    wider = HEADS.model_copy(update={"cp": 4})
    alone, two, four, ring = (
        as_run(CALIBRATION, p.model_copy(update={"cuda_graphs": True}), NODE, LLAMA).composition_sd
        for p in (one, HEADS, wider, RING)
    )
    assert alone == two < four == ring
