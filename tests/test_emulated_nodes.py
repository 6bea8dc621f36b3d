"""A made-up system of emulated nodes, from its collective rows to a validated training step."""

import json
import shutil
from pathlib import Path

import pytest

from calibrate import fit as fitting
from calibrate.network.between_nodes import path_of
from calibrate.network.own import Crossing, concurrent, curves
from simulate import validate
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from simulate.validation.cases import predict
from simulate.validation.measured import fabric_of
from spec.calibration import Calibration, read_calibration
from spec.collective import COLLECTIVES, Collective
from spec.command import run
from spec.files import read_table, write_json, write_table
from spec.model import load_model
from spec.network_fit import NetworkFit
from spec.parallelism import Parallelism
from spec.records import CollectiveRow, KernelRow
from spec.training_records import StepRow, TrainingConfig, TrainingRow
from tests.emulated import BASE, SPANS, SYSTEM, about, across_us, rows, rows_of, with_network
from tests.made_up import write_calibration
from tests.synthetic import write_result_set
from topologies import load_fabric, load_node
from topologies.placement import group_path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host with kernel rows, and the same host as two nodes with collectives only."""
    root = tmp_path_factory.mktemp("emulated") / "results"
    host = write_result_set(root, system=BASE)
    few = [one for one in read_table(host / "kernels.csv", KernelRow) if one.op in ("gemm", "copy")]
    write_table(host / "kernels.csv", KernelRow, few)
    folder = root / SYSTEM / "run-1"
    write_table(folder / "collectives.csv", CollectiveRow, list(rows()))
    write_json(folder / "manifest.json", about(SYSTEM).model_dump(mode="json", by_alias=True))
    assert run(fitting.main, [str(root), "--json", str(root / "fit.json")]) == 0
    return root


@pytest.fixture(scope="module")
def calibration(results: Path) -> Calibration:
    return read_calibration(results / SYSTEM / "calibration.json")


@pytest.fixture(scope="module")
def network(calibration: Calibration) -> NetworkFit:
    return next(one for one in calibration.networks if one.protocol == "tcp")


def test_kernels_come_from_the_host_and_the_network_from_its_own_rows(
    results: Path, calibration: Calibration, network: NetworkFit
) -> None:
    assert calibration.system == SYSTEM
    assert {one.path.split("/")[0] for one in calibration.inputs} >= {BASE, SYSTEM}
    assert network.source == "measured"
    assert network.max_nodes == 2
    host = read_calibration(results / BASE / "calibration.json")
    assert host.kernels == calibration.kernels
    assert next(one for one in host.networks if one.protocol == "tcp").source == "assumed"
    judged = {one.split: one for one in calibration.held_out if one.model == "network.tcp"}
    assert judged["rows of role judge"].rows == len(COLLECTIVES) * len(SPANS)
    assert judged["rows of role judge"].median_error < 0.03
    assert judged["every other size left out"].median_error < 0.1


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(("size", "stride", "groups"), [(4, 1, 1), (2, 2, 2)])
def test_measured_layouts_are_looked_up(
    network: NetworkFit, kind: str, size: int, stride: int, groups: int
) -> None:
    node = load_node("4x-h200").model_copy(update={"gpus": 2})
    path = group_path(node, load_fabric("loopback"), 4, size, stride)
    assert path.concurrent == groups
    for nbytes in (2**12, 2**21, 2**27, 2**32):
        expected = across_us(kind, size, groups, nbytes)
        assert network.time_us(kind, path, nbytes, 300.0) == pytest.approx(expected, rel=0.05)
    latency, bandwidth = network.spreads(kind, path, 2**20)
    assert 0 < latency < 0.1
    assert 0 < bandwidth < 0.1
    # farther from the measured sizes an error is likelier
    layout = kind, size, path.nodes, groups
    (curve,) = (
        one
        for one in network.curves
        if (one.collective, one.ranks, one.nodes, one.concurrent) == layout
    )
    points = [one.model_dump() for one in curve.points if one.bytes != 2**16]
    bent = curve.model_dump() | {"latency_bend": 0.05, "points": points}
    without = NetworkFit.model_validate(network.model_dump() | {"curves": [bent]})
    at, between = (without.spreads(kind, path, nbytes)[0] for nbytes in (2**20, 2**16))
    assert between > at


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_other_counts_of_nodes_take_the_nearest_ones_deviation(
    network: NetworkFit, kind: str
) -> None:
    """What software makes of a collective goes with it; a layout unlike any measured has none."""
    measured, larger = path_of(4, 2, 1.0), path_of(8, 4, 1.0)
    for nbytes in (2**12, 2**21, 2**27):
        off = network.time_us(kind, measured, nbytes, 300.0) / network._formula_us(
            kind, measured, nbytes, 300.0
        )
        expected = network._formula_us(kind, larger, nbytes, 300.0) * off
        assert network.time_us(kind, larger, nbytes, 300.0) == pytest.approx(expected)
        other = path_of(12, 4, 1.0)  # three ranks in a node
        plain = network._formula_us(kind, other, nbytes, 300.0)
        assert network.time_us(kind, other, nbytes, 300.0) == plain
    assert network.spreads(kind, larger, 2**21) == (network.latency_sd, network.efficiency_sd)


def test_where_all_groups_send_at_once_those_rows_count(network: NetworkFit) -> None:
    # four nodes of one device: pairs never share a node, yet share the host's processors
    spans = {1: 1000.0, 2: 1300.0}
    rows = [
        Crossing(one.model_copy(update={"groups": groups, "median_us": time}), path_of(2, 2, 1.0))
        for one in list(rows_of("all_reduce"))[:1]
        for groups, time in spans.items()
    ]
    assert {concurrent(one.row, per_node=1) for one in rows} == {1}
    (curve,) = curves(network.model_copy(update={"curves": ()}), rows)
    assert curve.points[0].time_us == 1300.0


def test_few_messages_between_stages_leave_a_node(network: NetworkFit, tmp_path: Path) -> None:
    used = with_network(tmp_path, network)
    node = load_node("4x-h200").model_copy(update={"gpus": 2})
    message = Collective("send_recv", "pp", 2**25)
    times = {}
    for split in ({"pp": 4}, {"pp": 2, "dp": 2}):
        p = Parallelism(**split, global_batch=8)
        costs = Costs(used, node, load_fabric("loopback"), p, Draws(0))
        sent = tuple(map(central, costs.transfers_us(message)))
        times[p.pp] = sent, central(costs.collective_us(message))
    assert times[2][0] == (times[2][1],)  # every message changes the node
    inside, _ = used.collective_fits["send_recv"].time_us(2, 2**25)
    across = times[4][1]
    assert times[4][0] == pytest.approx((inside, across, inside, across), rel=0.01)


def test_sockets_draw_less_power_than_links(network: NetworkFit, tmp_path: Path) -> None:
    used = with_network(tmp_path, network.model_copy(update={"active_w": 70.0}))
    node = load_node("4x-h200").model_copy(update={"gpus": 2})
    p = Parallelism(tp=2, dp=2, global_batch=2)
    costs = Costs(used, node, load_fabric("loopback"), p, Draws(0))
    assert costs.communication_w("dp") == 70.0
    assert costs.communication_w("tp") == used.clock.communication_w
    assert costs.waiting_w == used.clock.waiting_w  # stages there are none
    stages = Parallelism(pp=4, global_batch=4)
    costs = Costs(used, node, load_fabric("loopback"), stages, Draws(0))
    assert costs.waiting_w == 70.0  # of a message from another node
    joined = network.model_copy(update={"active_w": 70.0, "active_inside_w": 95.0})
    whole = Parallelism(tp=4, global_batch=1)  # two ranks in each node
    costs = Costs(with_network(tmp_path, joined), node, load_fabric("loopback"), whole, Draws(0))
    assert costs.communication_w("tp") == 95.0
    plain = Costs(with_network(tmp_path, network), node, load_fabric("loopback"), p, Draws(0))
    slow, waiting = plain.communication_w("dp"), used.clock.waiting_w
    share = plain.layout.paths["dp"].gbytes_per_s / node.scale_up_gbytes_per_s
    assert 0 < share < 0.1  # the less, the nearer to a GPU that waits
    assert slow == pytest.approx(waiting + share * (used.clock.communication_w - waiting))


def test_kernels_slow_what_the_gpu_moves_not_what_processors_copy(
    network: NetworkFit, tmp_path: Path
) -> None:
    used = with_network(tmp_path, network).model_copy(update={"communication_slowed": 0.4})
    cards = used.networks[0].model_copy(update={"protocol": "infiniband"})
    used = used.model_copy(update={"networks": (*used.networks, cards)})
    node = load_node("hgx-h200").model_copy(update={"gpus": 2})
    p = Parallelism(tp=2, dp=2, global_batch=2)
    for fabric, slowed in (("loopback", 1.0), ("ndr400-rail", 1.4)):
        costs = Costs(used, node, load_fabric(fabric), p, Draws(0))
        assert costs.slowed("tp") == 1.4  # inside a node
        assert costs.slowed("dp") == slowed
        assert costs.slowed("dp", "tp") == 1.4
    # on a CPU processors do both
    host = used.host.model_copy(update={"serial": True})
    costs = Costs(
        used.model_copy(update={"host": host}), node, load_fabric("loopback"), p, Draws(0)
    )
    assert costs.slowed("dp") == 1.4


def test_groups_at_once_share_a_node_as_they_were_measured_to(network: NetworkFit) -> None:
    # 6 instead of 8 GB/s: between each having all of it (0) and each having half (1)
    assert 0.2 < network.sharing < 0.8


def test_validation_simulates_steps_across_nodes(
    results: Path, network: NetworkFit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, path = with_network(tmp_path, network), tmp_path / "calibration.json"
    assert fabric_of(used) == "loopback"
    model = load_model("llama3-8b").resized(layers=2, seq_len=2048)
    split = Parallelism(tp=2, dp=2, sequence_parallel=True, global_batch=4, zero=0)
    config = TrainingConfig.of("case", model, split, nodes=2)
    predicted = predict(config, used, load_node("hgx-h200"), load_fabric("loopback"), draws=20)
    reduced = 4 * model.parameters() / 2  # fp32 gradients of a tensor-parallel rank
    expected = across_us("all_reduce", 2, 2, int(reduced)) * 1e-6
    assert predicted.breakdown_s["dp_exposed"] == pytest.approx(expected, rel=0.05)

    real = predicted.step_time_s["median"] * 1.02
    fields = {"status": "done", "framework": "made up", "steps": 10, "step_time_median_s": real}
    row = TrainingRow.model_validate(config.model_dump() | fields)
    folder = tmp_path / "results" / SYSTEM / "run-1"
    write_table(folder / "training.csv", TrainingRow, [row])
    step = StepRow(case_id="case", role="judge", step=0, step_time_s=real)
    write_table(folder / "steps.csv", StepRow, [step])
    write_json(folder / "manifest.json", about(SYSTEM).model_dump(mode="json", by_alias=True))
    words = [str(tmp_path / "results"), "--calibration", str(path), "--json", "--draws", "20"]
    assert run(validate.main, words) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["error"] == pytest.approx(1 / 1.02 - 1, rel=1e-3)
    assert case["kind"] == "TP+DP"


def test_configurations_are_drawn_for_the_nodes(
    results: Path, tmp_path: Path, network: NetworkFit, capsys: pytest.CaptureFixture[str]
) -> None:
    system = tmp_path / "results" / SYSTEM
    whole = write_calibration(system / "calibration.json", system=SYSTEM)
    value = whole.model_dump(mode="json", by_alias=True)
    write_json(system / "calibration.json", value | {"networks": [network.model_dump(mode="json")]})
    folder = system / "run-1"
    write_json(folder / "manifest.json", about(SYSTEM).model_dump(mode="json", by_alias=True))
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "gpus: [4]\nnodes: 2\nfamilies: [{model: llama3-8b, layers: [2, 4], seq_len: [2048]}]\n"
    )
    plan, sealed = tmp_path / "plan.csv", tmp_path / "sealed.json"
    words = ["predict", str(grid), "--draw", "3", "--seed", "1a2b3c4", "--plan-out", str(plan)]
    words += ["--out", str(sealed), "--results", str(tmp_path / "results"), "--draws", "20"]
    assert run(validate.main, words) == 0, capsys.readouterr().err
    drawn = read_table(plan, TrainingConfig)
    assert {row.nodes for row in drawn} == {2}
    assert all(row.case_id.endswith("-2nodes") for row in drawn)
    steps = {one["config"]["case_id"]: one for one in json.loads(sealed.read_text())["cases"]}
    for row in drawn:
        again = predict(
            row,
            read_calibration(system / "calibration.json"),
            load_node("hgx-h200"),
            load_fabric("loopback"),
            draws=5,
        )
        assert steps[row.case_id]["step_time_s"]["median"] == again.step_time_s["median"]


def test_a_system_without_kernels_does_not_stop_the_others(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "results"
    shutil.copytree(results / SYSTEM, root / "alone")
    write_alone(root, "f")
    assert run(fitting.main, [str(root)]) == 2
    assert "system alone: no kernel row" in capsys.readouterr().err
    shutil.copytree(results / BASE, root / BASE)
    assert run(fitting.main, [str(root)]) == 0
    assert "left out, no kernel rows: alone" in capsys.readouterr().err
    # the other's devices, several hosts with one each, say: its kernels are theirs
    write_alone(root, "0")
    assert run(fitting.main, [str(root)]) == 0
    assert "left out" not in capsys.readouterr().err
    borrowed = read_calibration(root / "alone" / "calibration.json")
    assert borrowed.kernels == read_calibration(root / BASE / "calibration.json").kernels


def write_alone(root: Path, digit: str) -> None:
    """A run that names no other system, on devices whose hashes begin with a digit."""
    value = about("alone").model_dump(mode="json", by_alias=True) | {"base_system": None}
    for device in value["hosts"][0]["devices"]:
        device["uuid_hash"] = digit + device["uuid_hash"][1:]
    write_json(root / "alone" / "run-1" / "manifest.json", value)


def test_a_host_that_is_not_there_is_one_sentence(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fitting.main, [str(results / SYSTEM)]) == 2
    assert "name another with --kernels-from" in capsys.readouterr().err
    assert run(fitting.main, [str(results), "--kernels-from", BASE]) == 2
    assert "--kernels-from is for one system" in capsys.readouterr().err
    assert run(fitting.main, [str(results), "--system", BASE, "--kernels-from", "x"]) == 2
    assert f"--kernels-from is x; {results} does not hold it" in capsys.readouterr().err
