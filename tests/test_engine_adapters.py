"""Adapters beside frozen layers on Transformer Engine: kernels, host, memory, and what refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrate.host.equations import equations
from measure.megatron.lora import adapt
from measure.suites import host_time
from simulate.hardware.as_run import as_run
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.captured import handed_over_bytes
from simulate.memory.peak import memory, stage_memory
from simulate.memory.workspaces import WORKSPACE, sum_bytes, workspace_bytes
from spec.calibration import HostVisit
from spec.errors import UserError
from spec.fitted import changed
from spec.kernel import Kernel
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer, trained_parameters
from spec.step_parts import Part
from spec.step_transformer_engine import CAST
from tests.simulated_steps import CALIBRATION, FABRIC, LORA, MODEL, NODE, simulate
from tests.test_nil_steps import nil_row

TE = Parallelism(transformer_impl="transformer_engine", global_batch=1)
FP8 = TE.model_copy(update={"fp8": True})
TENSORS = {"tp": 2, "sequence_parallel": True}
PRODUCTS = ("qkv", "proj", "fc1", "fc2")


def parts(p: Parallelism) -> dict[tuple[str, int], Part]:
    """Parts of a layer with adapters that have products, by name and way."""
    segments = enumerate(layer(LORA, p))
    return {(one.name, way): one for way, some in segments for one in some if one.name in PRODUCTS}


def test_products_are_those_of_local_layers() -> None:
    """No weight gradient of a frozen one, and those of adapters are added up by kernels that do
    only that, as torch's are."""

    def products(p: Parallelism) -> dict[tuple[str, int], list[Kernel]]:
        wanted = ("gemm", "grad_accumulate")
        return {k: [one for one in v.kernels if one.op in wanted] for k, v in parts(p).items()}

    local = products(Parallelism(global_batch=1))
    assert products(TE) == local
    added = [one for some in local.values() for one in some if one.op == "grad_accumulate"]
    assert len(added) == 8
    narrow = {k: [one for one in v if LORA.lora_rank in one.dims] for k, v in products(FP8).items()}
    assert all(one.dtype == "bf16" for some in narrow.values() for one in some)
    assert sum(len(some) for some in narrow.values()) == 8 * 3  # and no more than those


@pytest.mark.parametrize("more", [{}, TENSORS])
def test_in_fp8_everything_is_cast_by_itself(more: dict[str, Any]) -> None:
    """Inputs once, as a norm's output goes to an adapter in bf16; a gradient behind a norm twice,
    as `LayerNormLinear` has it; what is gathered for a product before it is."""
    p = FP8.model_copy(update=more)
    rows, split = LORA.seq_len, p.tp
    outer = LORA.heads * LORA.head_dim
    qkv = outer + 2 * LORA.kv_heads * LORA.head_dim
    bytes_of = {
        ("qkv", 0): 3 * rows * LORA.hidden // split,
        ("qkv", 1): 4 * rows * qkv // split,
        ("proj", 0): 3 * rows * outer // split,
        ("proj", 1): 3 * rows * LORA.hidden // split,
        ("fc1", 0): 3 * rows * LORA.hidden // split,
        ("fc1", 1): 4 * rows * 2 * LORA.ffn_hidden // split,
        ("fc2", 0): 3 * rows * LORA.ffn_hidden // split,
        ("fc2", 1): 3 * rows * LORA.hidden // split,
    }
    found = parts(p)
    for where, nbytes in bytes_of.items():
        cast, product, *rest = found[where].kernels
        assert product.dtype == "fp8"
        assert cast.bytes == pytest.approx(CAST * nbytes, rel=1e-6), where
        # sums of outputs and of inputs' gradients are as long as copies, in bf16
        (summed,) = (one for one in rest if one.op == "copy")
        local = parts(Parallelism(global_batch=1, **more))[where]
        assert summed in local.kernels


def test_what_its_host_takes_has_a_name_of_its_own_in_either_pass() -> None:
    for p, name in ((TE, "te_adapter"), (FP8, "te_adapter")):
        assert [sum(one.issued[name] for one in way) for way in layer(LORA, p)] == [4, 4]
        assert not any(one.issued["adapter"] for way in layer(LORA, p) for one in way)
    local = layer(LORA, Parallelism(global_batch=1))
    assert [sum(one.issued["adapter"] for one in way) for way in local] == [0, 4]
    assert not any(one.issued["te_adapter"] for way in local for one in way)
    case = host_time.HostCase(1.0, 1, lora_rank=16, transformer_impl="transformer_engine")
    forward, backward, *_ = equations(nil_row(case, slower=1.0), (), 1.0)
    assert forward.counts["te_adapter"] == backward.counts["te_adapter"] == 4
    slow = changed(CALIBRATION, host=changed(CALIBRATION.host, te_adapter_us=1e5))
    waits, runs = simulate(TE, slow, model=LORA), simulate(TE, model=LORA)
    times = 2 * 4 * LORA.layers  # a tenth of a second each, most of which the device waits
    assert waits.step_time_s[0] > runs.step_time_s[0] + 0.07 * times


def test_an_older_calibration_says_what_it_lacks() -> None:
    older = changed(CALIBRATION, host=changed(CALIBRATION.host, te_adapter_us=0.0))
    with pytest.raises(UserError, match=r"no host\.te_adapter_us, as it is older; run calibrate"):
        as_run(older, TE, NODE, LORA)
    with pytest.raises(UserError, match=r"no host\.te_adapter_us"):
        as_run(older, FP8, NODE, LORA)
    as_run(older, TE, NODE, MODEL)
    as_run(older, Parallelism(global_batch=1), NODE, LORA)


def test_what_frozen_layers_keep_there() -> None:
    """Inputs as adapters have them; in FP8 a norm's output as cast, too (`LayerNormLinear`)."""
    bf16, eight = (layer_activation_bytes(LORA, p) for p in (TE, FP8))
    assert eight - bf16 == pytest.approx(2 * 1.0 * LORA.seq_len * LORA.hidden)
    held, trained = stage_memory(LORA, TE, 0), trained_parameters(LORA, TE, 0)[0]
    assert held.gradients == 4.0 * trained
    assert stage_memory(MODEL, TE, 0).weights > held.weights - 2.0 * trained  # nor stand-ins
    two = Parallelism(pp=2, transformer_impl="transformer_engine", global_batch=2)
    assert [workspace_bytes(one, two, 0) / WORKSPACE for one in (MODEL, LORA)] == [1, 3]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_of_it_has_peaks_in_order(fp8: bool, recompute: str) -> None:
    """Gradients of adapters are handed over as local layers' are: none was once less than none."""
    p = TE.model_copy(
        update={"fp8": fp8, "recompute": recompute, "cuda_graphs": True, "global_batch": 8}
    )
    local = p.model_copy(update={"fp8": False, "transformer_impl": "local"})
    assert handed_over_bytes(LORA, p, 0) == handed_over_bytes(LORA, local, 0) > 0
    for found in memory(LORA, p, NODE, FABRIC).intervals().values():
        assert 0 < found["low"] <= found["median"] <= found["high"]


def test_a_sum_over_rows_works_in_as_much_as_torchs_does() -> None:
    """A block of 135.0 MiB, by a memory snapshot of StarCoder2 7B's step on an H200."""
    assert sum_bytes(4096, 18432) == 135 * 2**20
    assert sum_bytes(1000, 18432) == 0.0  # each thread sums all of a column's
    biased = load_model("starcoder2-7b").resized(layers=2, seq_len=4096, vocab=1024)
    full = TE.model_copy(update={"recompute": "full"})
    plain = biased.model_copy(update={"linear_bias": False})
    more = stage_memory(biased, full, 0).temporary - stage_memory(plain, full, 0).temporary
    assert more == 135 * 2**20
    frozen = [one.resized(lora_rank=8) for one in (biased, plain)]  # whose biases have no gradient
    assert len({stage_memory(one, full, 0).temporary for one in frozen}) == 1


def test_a_sum_shares_columns_as_torchs_does() -> None:
    """By `setReduceConfig`, worked out for each of its limits."""
    assert (sum_bytes(1020, 18432), sum_bytes(1024, 18432)) == (0.0, 135 * 2**20)
    assert sum_bytes(1024, 5120) == 40 * 2**20  # sixteen rows each at least
    assert sum_bytes(65536, 131072) == 4.0 * 131072 * 64 * 128  # 256 at most
    assert sum_bytes(1024, 270336) == 0.0  # a block for each column
    assert sum_bytes(8192, 270336) == 4.0 * 270336 * 8 * 128
    assert sum_bytes(8192, 270464) == 0.0  # more blocks than run at once
    biased = load_model("starcoder2-7b").resized(layers=2, seq_len=1536, vocab=1024)
    full = TE.model_copy(update={"recompute": "full"} | TENSORS)
    plain = biased.model_copy(update={"linear_bias": False})
    more = stage_memory(biased, full, 0).temporary - stage_memory(plain, full, 0).temporary
    assert more == sum_bytes(1536, 18432 // 2) > 0.0  # of all tokens


def test_what_layers_keep_there_beside_products() -> None:
    """Angles are all layers'; an exchange's output lies twice; local layers keep as much in FP8."""
    kept = layer_activation_bytes(LORA, TE)
    two = {"microbatch": 2, "global_batch": 2}
    assert layer_activation_bytes(LORA, TE.model_copy(update=two)) == 2 * kept
    local = Parallelism(global_batch=1)
    twice = 2 * layer_activation_bytes(LORA, local)
    angles = 8.0 * LORA.seq_len * LORA.head_dim
    assert layer_activation_bytes(LORA, local.model_copy(update=two)) == twice - angles
    eight = local.model_copy(update={"fp8": True})
    assert layer_activation_bytes(LORA, eight) == layer_activation_bytes(LORA, local)
    ring, exchange = (
        FP8.model_copy(update={"cp": 2, "cp_comm_type": one}) for one in ("p2p", "a2a")
    )
    output = 2.0 * LORA.seq_len / 2 * LORA.heads * LORA.head_dim
    more = layer_activation_bytes(LORA, exchange) - layer_activation_bytes(LORA, ring)
    assert more == pytest.approx(output)


def test_a_gathered_gradient_is_gone_when_a_second_part_comes() -> None:
    """Under sequence parallelism: three widths at once, or two and what was gathered."""
    p = TE.model_copy(update=TENSORS | {"recompute": "full"})
    narrow = LORA.resized(vocab=1024)
    wide = 2.0 * LORA.seq_len * LORA.ffn_hidden / 2
    local = 2.0 * LORA.seq_len * LORA.hidden / 2
    held = layer_activation_bytes(narrow, p.model_copy(update={"recompute": "none"}))
    made = 3 * wide + local  # a first product, its adapter's and their sum, less what is kept
    assert stage_memory(narrow, p, 0).passes - workspace_bytes(narrow, p, 0) == made + held
    plain = load_model("starcoder2-7b").resized(layers=2, seq_len=4096, vocab=1024, lora_rank=8)
    wide, local = (2.0 * plain.seq_len * n / 2 for n in (plain.ffn_hidden, plain.hidden))
    held = layer_activation_bytes(plain, p.model_copy(update={"recompute": "none"}))
    parts = local + max(2 * local + wide, 2 * wide)  # its input's gradient in two
    assert stage_memory(plain, p, 0).passes - workspace_bytes(plain, p, 0) == parts + held


@pytest.mark.parametrize("biased", [False, True])
def test_an_adapter_lies_beside_what_the_layer_normalised(biased: bool) -> None:
    """With a layer that answers as Megatron-Core's on Transformer Engine do: (output, normalised)
    and no bias, or all three."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 4))
            self.sequence_parallel, self.return_layernorm_output = False, False
            self.tp_group = SimpleNamespace(size=lambda: 1)

        def forward(self, x: torch.Tensor) -> Any:
            normalised = x / 2
            output = normalised @ self.weight.T
            assert self.return_layernorm_output
            return (output, torch.ones(6), normalised) if biased else ((output, normalised), None)

    block = SimpleNamespace(linear_qkv=Own, linear_proj=torch.nn.Module)
    mlp = SimpleNamespace(linear_fc1=Own, linear_fc2=torch.nn.Module)
    spec = SimpleNamespace(
        submodules=SimpleNamespace(
            self_attention=SimpleNamespace(submodules=block), mlp=SimpleNamespace(submodules=mlp)
        )
    )
    adapt(spec, 2)
    for adapted in (block.linear_qkv, mlp.linear_fc1):
        one = adapted()
        torch.nn.init.normal_(one.lora_b)
        x = torch.randn(3, 4)
        output, bias = one(x)
        told = (x / 2) @ (one.weight + one.lora_b @ one.lora_a).T
        assert torch.allclose(output, told, atol=1e-5)
        assert (bias is None) is not biased


def test_nil_steps_of_what_a_plan_has_come_first() -> None:
    """Before others of what it has, too: a local layer over tp whose activations run again."""
    cases = host_time.cases("nvidia", 2, engine=True)
    again = TE.model_copy(update=TENSORS | {"recompute": "full"})

    def needed(p: Parallelism, model: Any) -> set[tuple[int, bool, int]]:
        found = host_time.in_order(cases, [(model, p)])
        last = next(k for k, one in enumerate(found) if one.tp > 1 and one.recompute != "none")
        there = (one for one in found[:last] if one.transformer_impl != "local")
        return {(one.tp, one.fp8, one.lora_rank) for one in there}

    assert (1, False, 16) in needed(again, LORA) - needed(again, MODEL)
    eight = again.model_copy(update={"fp8": True})
    assert (2, True, 0) in needed(eight, MODEL) - needed(again, MODEL)
    assert (2, True, 16) in needed(eight, LORA) - needed(eight, MODEL)


def test_its_time_has_a_spread_until_the_hosts_own_nil_steps_show_it() -> None:
    host = changed(CALIBRATION.host, te_adapter_us=5e3, te_adapter_sd=0.5, part_us=5e3, visits=())
    sure = changed(host, te_adapter_sd=0.0)
    widths = []
    for one in (host, sure):
        times = simulate(TE, changed(CALIBRATION, host=one), model=LORA, draws=200).step_time_s
        widths.append(times.std() / times.mean())
    assert widths[0] > 1.5 * widths[1]
    own = HostVisit(devices=("a",), slower=1.0, times_us={"te_adapter_us": 4e3})
    assert changed(host, visits=(own,)).on_devices(["a"]).te_adapter_sd == 0.0


def test_a_rank_is_no_more_than_the_models_width() -> None:
    with pytest.raises(UserError, match=r"lora_rank 4097 is more than .* hidden 4096; use less"):
        TE.check(MODEL.resized(lora_rank=4097))
    TE.check(MODEL.resized(lora_rank=4096))
