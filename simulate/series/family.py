"""What a whole family of anchors says beyond four factors: how its kernels' efficiency goes.

Software of another time runs other kernels: how fast its products and its host are at a width, a
micro-batch and a split is not in our calibration. A family of anchors (`.fit.FAMILY`) tells:
a Gaussian process over the logarithms of what the rows differ in, on what the four factors leave of
them. Away from the anchors it fades to nothing and its spread grows to what it had to explain.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulate.series.plan import Plan

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

Array = NDArray[np.float64]
_SPLIT = ("tp", "dp", "microbatch", "microbatches")


def features(one: Plan) -> list[float]:
    """Logarithms of a row's width and length, and of what its split leaves a GPU to run.

    Layers are a stage's: what pipelines do is simulated. Scores are in batches of heads of a GPU's
    sequences, which decides the kernels of unfused attention.
    """
    m, p = one.model, one.parallelism
    layers, scores = m.layers / p.pp, p.microbatch * m.heads / p.tp
    sizes = [m.hidden, m.seq_len, layers, scores, *(getattr(p, name) for name in _SPLIT)]
    return [log2(size) for size in sizes]


@dataclass(frozen=True)
class Correction:
    """A fitted process; `varies` are the features in which the anchors differ, all if in none."""

    process: "GaussianProcessRegressor"
    varies: Array

    def of(self, one: Plan) -> tuple[float, float]:
        """To be added to a row's log step time, and the spread of what it stands for."""
        x = np.array([features(one)])[:, self.varies]
        mean, sd = self.process.predict(x, return_std=True)
        return float(mean[0]), float(sd[0])


def learn(anchors: Sequence[Plan], missing: Array) -> Correction:
    """A correction from log(printed / simulated) of the anchors."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x = np.array([features(one) for one in anchors])
    varies = np.ptp(x, axis=0) > 0
    varies |= not varies.any()  # one configuration, repeated: it holds near that one
    amplitude = max(float(np.mean(missing**2)), 1e-4)
    kernel = ConstantKernel(amplitude, (amplitude / 4, 4 * amplitude)) * RBF(
        np.full(int(varies.sum()), 2.0), (0.5, 20.0)
    ) + WhiteKernel(amplitude / 4, (1e-4, 4 * amplitude + 1e-3))
    with warnings.catch_warnings():  # a length at its bound is an answer
        warnings.simplefilter("ignore", ConvergenceWarning)
        process = GaussianProcessRegressor(kernel, normalize_y=False).fit(x[:, varies], missing)
    return Correction(process, varies)
