"""How much more than its share the fullest expert-parallel rank gets, as a distribution.

Loads of a layer's experts are drawn from a symmetric Dirichlet distribution of a given coefficient
of variation; a capacity cuts each expert's load (Switch Transformer, arXiv 2101.03961, section 2.2;
Megatron-Core's `moe_expert_capacity_factor`, which drops the rest). All ranks wait for the fullest
one in every layer and microbatch, so a step's time goes by the mean of the maximum, and memory by
nearly the largest. Every share is one where nothing is uneven.

Experts that are as full as one another on the mean still get other numbers of tokens each, which
tiles do not divide.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from simulate.cost.uncertainty import Draws
from spec.kernel import LARGE_TILE, STREAMED, Kernel, tiles
from spec.model import ModelSpec
from spec.parallelism import Parallelism

Array = NDArray[np.float64]

SAMPLES = 2048
# Of the logarithm of the coefficient of variation: routers differ from layer to layer and over
# training. Assumed.
IMBALANCE_SD = 0.5
LARGEST = 0.99  # quantile that memory must hold
GRID = np.exp(np.linspace(-2.0, 2.0, 9))  # multiples of the coefficient at which shares are drawn


# Products in streams on random shares of the rows over those on equal ones: the mean of 36 (twelve
# shapes, three directions) on an H200, 0.83 to 1.33 (`benchmarks/transformer_engine.csv`).
IN_STREAMS = 1.035


@lru_cache(maxsize=8192)
def unequal_rows(products: Kernel, multiprocessors: int) -> float:
    """How much longer experts' products last than those of whole tiles of rows, which are timed.

    Where tokens pick their experts, half a tile of each expert's rows is empty on average. An
    expert's product of less than a wave of tiles has multiprocessors to spare for it. In streams
    one fills what another leaves: `IN_STREAMS`.
    """
    if products.op == STREAMED:
        return IN_STREAMS
    groups, rows, n, k = products.dims
    product = Kernel("gemm", products.direction, (max(rows // groups, 1), n, k))
    if products.direction == "wgrad" or tiles(product) <= multiprocessors:
        return 1.0
    own, tile = rows / groups, LARGE_TILE[0]
    return max(own + tile / 2, tile) / max(own, tile)


@lru_cache(maxsize=512)
def shares(experts: int, ep: int, cv: float, capacity: float | None) -> tuple[float, float]:
    """(mean, `LARGEST` quantile) of the fullest rank's load over the mean load.

    The Dirichlet's concentration follows from the coefficient of variation of one expert's load:
    cv^2 = (experts - 1) / (experts * concentration + 1); it is at most (experts - 1)^0.5.
    """
    if cv == 0 or ep == 1:
        return 1.0, 1.0
    concentration = ((experts - 1) / min(cv, 0.999 * (experts - 1) ** 0.5) ** 2 - 1) / experts
    rng, size = np.random.default_rng(0), (SAMPLES, experts)
    # a gamma deviate of a small shape underflows: in logs, of one more and a uniform's power
    logs = np.log(rng.standard_gamma(concentration + 1, size))
    logs -= rng.standard_exponential(size) / concentration
    loads = experts * softmax(logs, axis=1)
    if capacity is not None:
        loads = np.minimum(loads, capacity)
    fullest = loads.reshape(SAMPLES, ep, -1).mean(axis=2).max(axis=1)
    return float(fullest.mean()), float(np.quantile(fullest, LARGEST))


def share_of_fullest(model: ModelSpec, p: Parallelism, draws: Draws) -> Array | None:
    """Mean share of the fullest rank, (draws,); None where all are alike."""
    if not model.expert_imbalance or p.ep == 1:
        return None
    args = model.experts, p.ep
    cv, capacity = model.expert_imbalance, model.capacity_factor
    means = [shares(*args, round(float(cv * factor), 6), capacity)[0] for factor in GRID]
    factors = draws.factor("expert imbalance", IMBALANCE_SD)
    found = np.interp(np.log(factors), np.log(GRID), means)
    return float(found) if draws.central else found  # type: ignore[return-value]


def largest_share(model: ModelSpec, p: Parallelism) -> float:
    """What the fullest rank must hold in memory, over the mean."""
    args = model.experts, p.ep, model.expert_imbalance, model.capacity_factor
    return shares(*args)[1] if model.experts else 1.0
