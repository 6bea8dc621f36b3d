"""What a projection says beside the step: a training run's cost, and when links are the limit."""

from pathlib import Path
from typing import Any

import pytest

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from simulate.projection.budget import budget, check_budget, lines
from simulate.projection.projected import Projection, Request, project
from simulate.step.saturation import SIZES, messages, saturating_size
from spec.calibration import Calibration
from spec.collective import Collective
from spec.errors import UserError
from spec.files import write_json
from spec.hardware import Node
from spec.model import load_model
from spec.parallelism import Parallelism
from tests.made_up import calibration_json
from topologies import load_fabric, load_node
from topologies.tiers import SATURATED

CALIBRATION = Calibration.model_validate(calibration_json())
NODE, FABRIC = load_node("hgx-h200"), load_fabric("ndr400-rail")
MODEL = load_model("llama3-8b").resized(layers=8, seq_len=2048)


def projected(path: Path, node: Node = NODE, **changes: Any) -> Projection:
    fields = {"tp": 8, "pp": 2, "dp": 4, "global_batch": 32, "sequence_parallel": True}
    p = Parallelism.model_validate(fields | changes)
    file = path / "calibration.json"
    write_json(file, calibration_json())
    return project(Request(MODEL, p, node, FABRIC, CALIBRATION, file, draws=20))


def test_budget_is_steps_times_the_step(tmp_path: Path) -> None:
    one = projected(tmp_path)
    tokens = 32 * 2048
    value = budget(one, 10.5 * tokens, 2.0)
    assert value["steps"] == 11  # a last, partly filled one
    seconds = 11 * float(one.estimate.step_time_s[0])
    assert value["days"]["median"] == pytest.approx(seconds / 86400)
    assert value["gpu_hours"]["median"] == pytest.approx(seconds * 64 / 3600)
    assert value["cost"]["high"] == pytest.approx(2 * value["gpu_hours"]["high"])
    energy = seconds * float(one.estimate.power_w[0]) * 64
    assert value["gpu_energy_mwh"]["median"] == pytest.approx(energy / 3.6e9)
    assert len(lines(value)) == 2
    assert budget(one, tokens, None)["cost"] is None


@pytest.mark.parametrize(
    ("tokens", "price", "sentence"),
    [
        (0.0, None, "--tokens is 0; it must be a number above 0"),
        (float("nan"), None, "--tokens is nan"),
        (1e300, None, r"--tokens is 1e\+300; .* above 0 and at most 1e\+18"),
        (1e9, -1.0, "--price-per-gpu-hour is -1"),
        (1e15, 1e300, r"--price-per-gpu-hour is 1e\+300; .* above 0 and at most 1e\+06"),
        (1e15, float("inf"), "--price-per-gpu-hour is inf"),
        (None, 2.0, "needs --tokens"),
    ],
)
def test_budgets_that_make_no_sense(tokens: Any, price: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_budget(tokens, price)


def test_the_size_from_which_links_are_the_limit() -> None:
    p = Parallelism(tp=8, pp=2, dp=4, global_batch=32, sequence_parallel=True)
    costs = Costs(CALIBRATION, NODE, FABRIC, p, Draws(0))
    for kind, axis in (("all_gather", "tp"), ("reduce_scatter", "dp"), ("send_recv", "pp")):
        size = saturating_size(costs, kind, axis)

        def rate(nbytes: float, kind: str = kind, axis: str = axis) -> float:
            return nbytes / central(costs.collective_us(Collective(kind, axis, nbytes)))

        best = max(rate(2.0**power) for power in range(10, 35))
        assert rate(size) >= SATURATED * best > rate(size / 2)


def test_a_rate_that_falls_with_the_size_is_never_reached() -> None:
    value = calibration_json()
    for one in value["collectives"]:
        one["curves"][0]["points"][0]["time_us"] = 1e-3  # the smallest message's
        one["curves"] = one["curves"][:1]
    costs = Costs(Calibration.model_validate(value), NODE, FABRIC, Parallelism(tp=2), Draws(0))
    assert saturating_size(costs, "all_gather", "tp") == SIZES[-1]


def test_messages_that_grow_with_the_microbatch(tmp_path: Path) -> None:
    """Twice the microbatch: messages twice as large, bound by links from the same microbatch on."""
    one, two = projected(tmp_path), projected(tmp_path, microbatch=2)

    def by_axis(projection: Projection) -> dict[tuple[str, str], Any]:
        r = projection.request
        found = messages(r.model, r.parallelism, projection.estimate.priced.costs)
        return {(message["axis"], message["collective"]): message for message in found}

    small, large = by_axis(one), by_axis(two)
    assert small.keys() == large.keys()
    for key, message in small.items():
        grows = key[0] in ("tp", "pp")
        assert large[key]["bytes"] == pytest.approx((1 + grows) * message["bytes"])
        assert large[key]["from_microbatch"] == message["from_microbatch"]
        assert (message["from_microbatch"] is None) == (not grows)
        assert message["bound_by_links"] == (message["bytes"] >= message["from_bytes"])
    value = one.as_json()["fabric"]
    assert {tier["tier"] for tier in value} >= {"scale-up", "nic"}
    assert sum(len(tier["messages"]) for tier in value) == len(small)


def test_a_message_is_listed_at_the_tier_that_it_fills(tmp_path: Path) -> None:
    """With a port a GPU, 32 in a node send 1/32 of their bytes over it, the rest in the node."""
    wide = NODE.model_copy(update={"gpus": 32, "nics": 32})
    for node, tier in ((wide, "scale-up"), (NODE, "nic")):
        one = projected(
            tmp_path, node=node, tp=1, pp=1, dp=64, sequence_parallel=False, global_batch=64
        )
        tiers = {found["tier"]: found for found in one.as_json()["fabric"]}
        assert {message["axis"] for message in tiers[tier]["messages"]} == {"dp"}
        assert sum(len(found["messages"]) for found in tiers.values()) == len(
            tiers[tier]["messages"]
        )
