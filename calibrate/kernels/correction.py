"""The learned correction: a Gaussian process on log(measured / physics), and its honest spread.

scikit-learn finds the length scales; what is kept are numbers, and `spec.kernel_fit.KernelFit`
evaluates the same formula.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.interval import Z90

Array = NDArray[np.float64]

# Fewest points to learn length scales from; fewer take the defaults.
LEARN_FROM = 12
DEFAULT_LENGTH = 1.5  # of log size: correlated over a factor of about four
DEFAULT_AMPLITUDE = 0.25
DEFAULT_NOISE = 0.05
FREE_LENGTH = 10.0  # of a dimension that does not vary in the data
AMPLITUDES = (0.05, 1.0)
NOISES = (0.003, 0.3)
# a factor of twelve in a size, at most: shapes of models lie along lines and say little beside them
LENGTHS = (0.3, 2.5)
LEAST_STRUCTURE = 0.01  # sd that a shape has of its own, however smooth its neighbours
STARTS = (0.05, 0.01)  # noise to start the search from: the likelihood has several maxima
MOST_POINTS = 300  # to learn from: the cost grows with the cube
# scale of the spread where too few left-out points say anything
FEW_POINTS_SCALE = 1.5
SCALES = (0.7, 6.0)


@dataclass(frozen=True)
class Correction:
    """Hyperparameters of the process: squared exponential over log dimensions, zero mean."""

    length_scales: tuple[float, ...]
    amplitude: float
    noise: float

    def predict(
        self, x: Array, y: Array, at: Array, sd: Array | float = 0.0
    ) -> tuple[Array, Array]:
        """Mean and sd at `at`, (points, n), given residuals `y`, of `sd` each, at features `x`.

        Without what `spec.kernel_fit.Reach` adds for what is unlike `x`.
        """
        own = np.maximum(self.noise, np.broadcast_to(sd, len(x))) ** 2
        covariance = self._covariance(x, x) + np.diag(own)
        cross = self._covariance(at, x)
        solved = np.linalg.solve(covariance, cross.T)
        mean = solved.T @ y
        variance = self.amplitude**2 - (cross * solved.T).sum(axis=1) + self.noise**2
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def lean(self, x: Array, y: Array, sd: Array) -> tuple[Array, Array]:
        """Best estimate of each known residual and its sd: measured, and expected from the others.

        Both are weighted by their variance; what is expected comes from leaving the point out
        (Rasmussen & Williams, "Gaussian Processes for Machine Learning", section 5.4.2).
        """
        own = np.maximum(self.noise, sd) ** 2
        inverse = np.linalg.inv(self._covariance(x, x) + np.diag(own))
        expected = y - (inverse @ y) / np.diag(inverse)
        spread = np.maximum(1 / np.diag(inverse) - sd**2, LEAST_STRUCTURE**2)
        weight = spread / (spread + sd**2)
        return expected + weight * (y - expected), np.sqrt(weight) * sd

    def _covariance(self, a: Array, b: Array) -> Array:
        scale = np.array(self.length_scales)
        squared = (((a[:, None, :] - b[None, :, :]) / scale) ** 2).sum(axis=2)
        return np.asarray(self.amplitude**2 * np.exp(-0.5 * squared))


def fit_correction(x: Array, y: Array) -> Correction:
    """Learn the hyperparameters from residuals `y`, (points,), at log dimensions `x`."""
    varies = x.max(axis=0) - x.min(axis=0) > 1e-9
    lengths = np.where(varies, DEFAULT_LENGTH, FREE_LENGTH)
    spread = float(np.clip(np.sqrt(np.mean(y**2)), *AMPLITUDES))
    if len(y) < LEARN_FROM or not varies.any():
        amplitude = max(spread, DEFAULT_AMPLITUDE) if len(y) < LEARN_FROM else spread
        return Correction(tuple(float(one) for one in lengths), amplitude, DEFAULT_NOISE)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    if len(y) > MOST_POINTS:
        chosen = np.linspace(0, len(y) - 1, MOST_POINTS).round().astype(int)
        x, y = x[chosen], y[chosen]
    best = None
    for noise in STARTS:
        kernel = ConstantKernel(spread**2, (AMPLITUDES[0] ** 2, AMPLITUDES[1] ** 2)) * RBF(
            np.full(int(varies.sum()), DEFAULT_LENGTH), LENGTHS
        ) + WhiteKernel(noise**2, (NOISES[0] ** 2, NOISES[1] ** 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a bound is an answer too
            found = GaussianProcessRegressor(kernel, alpha=1e-10).fit(x[:, varies], y)
        if best is None or found.log_marginal_likelihood_value_ > best[0]:
            best = (found.log_marginal_likelihood_value_, found.kernel_)
    assert best is not None
    product, white = best[1].k1, best[1].k2
    lengths[varies] = np.atleast_1d(product.k2.length_scale)
    return Correction(
        tuple(float(one) for one in lengths),
        float(product.k1.constant_value) ** 0.5,
        float(white.noise_level) ** 0.5,
    )


def folds(families: Sequence[Hashable], count: int) -> list[set[int]]:
    """Indices in at most `count` folds; rows of one family stay together."""
    ordered = sorted(set(families), key=repr)
    place = {one: index % count for index, one in enumerate(ordered)}
    split: list[set[int]] = [set() for _ in range(min(count, len(ordered)))]
    for index, one in enumerate(families):
        split[place[one]].add(index)
    return split


def conformal_scale(scores: Sequence[float]) -> float:
    """Factor on the spread with which 90 % of left-out points lie inside their interval.

    `scores` are |error| / sd of points that the model had not seen. Split-conformal quantile (Vovk
    et al., "Algorithmic Learning in a Random World"): of n scores the one of rank
    ceil(0.9 (n + 1)); above the largest where n is too small for that rank.
    """
    count = len(scores)
    if count < 5:
        return FEW_POINTS_SCALE
    rank = int(np.ceil(0.9 * (count + 1)))
    ordered = np.sort(np.array(scores))
    value = float(ordered[rank - 1]) if rank <= count else float(ordered[-1]) * 1.2
    return float(np.clip(value / Z90, *SCALES))
