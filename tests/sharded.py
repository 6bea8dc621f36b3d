"""What a microbatch gathers and scatters under zero 2 and 3, call by call."""

from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import sharded


def of_microbatch(model: ModelSpec, p: Parallelism) -> list[Collective]:
    """Every collective of both passes, where one stage has the whole model."""
    often = {"dense": model.dense_layers, "layer": model.layers - model.dense_layers}
    often |= {"embedding": 1, "head": 1}
    return [
        one
        for name, both in sharded(model, p).items()
        for way in both
        for one in way
        for _ in range(often[name])
    ]
