"""Time, energy and cost of training on a budget of tokens, from a projected step."""

from math import ceil
from typing import Any

from simulate.cost.uncertainty import interval
from simulate.projection.projected import Projection
from spec.errors import UserError
from spec.interval import interval_text

DAY_S = 86_400.0
HOUR_S = 3_600.0
MWH_J = 3.6e9
MOST_TOKENS = 1e18  # beyond any training; a typing error is likelier
MOST_PRICE = 1e6  # of a GPU hour, in any currency


def check_budget(tokens: float | None, price: float | None) -> None:
    """Refuse budgets that make no sense."""
    for name, value, most in (
        ("--tokens", tokens, MOST_TOKENS),
        ("--price-per-gpu-hour", price, MOST_PRICE),
    ):
        if value is not None and not 0 < value <= most:
            raise UserError(
                f"{name} is {value:g}; it must be a number above 0 and at most {most:g}"
            )
    if price is not None and tokens is None:
        raise UserError("--price-per-gpu-hour needs --tokens, the tokens to train on")


def budget(projection: Projection, tokens: float, price: float | None) -> dict[str, Any]:
    """Steps for `tokens`, and what they take; as if no step were lost to restarts or data.

    `price` is per GPU and hour, in any currency; without one there is no cost.
    """
    r, e = projection.request, projection.estimate
    steps = ceil(tokens / (r.parallelism.global_batch * r.model.seq_len))
    seconds = steps * e.step_time_s
    gpu_hours = seconds * r.parallelism.gpus / HOUR_S
    energy = seconds * e.power_w * r.parallelism.gpus / MWH_J
    return {
        "tokens": tokens,
        "steps": steps,
        "days": interval(seconds / DAY_S),
        "gpu_hours": interval(gpu_hours),
        "gpu_energy_mwh": interval(energy),
        "price_per_gpu_hour": price,
        "cost": None if price is None else interval(gpu_hours * price),
    }


def lines(value: dict[str, Any]) -> list[str]:
    """The terminal summary of a budget."""

    def show(name: str, scale: float = 1.0) -> str:
        return interval_text(value[name], scale=scale, digits=4)

    text = [
        f"training          {value['tokens']:.3g} tokens in {value['steps']:,} steps: "
        f"{show('days')} days, {show('gpu_hours', 1e-6)} million GPU hours, "
        f"{show('gpu_energy_mwh')} MWh of the GPUs"
    ]
    if value["cost"]:
        text.append(
            f"cost              {show('cost', 1e-6)} million at "
            f"{value['price_per_gpu_hour']:g} a GPU hour"
        )
    return text
