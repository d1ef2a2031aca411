"""Least squares over sums of products: no sample is needed, and no coefficient is negative.

The errors of a fit are absolute, not relative: so the mean of all samples is exact. Kinds of
samples that differ much in size, and so in noise, are weighted before (`weighted`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

MAX_CONDITION = 1e8  # of the normal equations: terms that vary together more are one term
MAX_UNSEEN_SHARE = 1e-3  # of a sample, along directions that no sample of the sums has
STANDARD_ERRORS = 1.96  # in half of a 95 % interval
MIN_SAMPLES = 30  # of a kind, to know its noise
MIN_DEVIATION_SHARE = 0.01  # of a kind's mean seconds: no sum of terms fits closer than that

Sums = Mapping[str, float]  # by the names of `product_names`


class SumsFit(msgspec.Struct, frozen=True):
    """Coefficients of quantities, and their covariances."""

    coefficients: list[float]
    covariances: list[list[float]]
    variance: float  # of the seconds of a sample around the fit

    def value(self, sample: Sequence[float]) -> float:
        """Returns the fitted seconds of a sample."""
        return sum(c * x for c, x in zip(self.coefficients, sample, strict=True))

    def half_interval(self, sample: Sequence[float]) -> float:
        """Returns half of the 95 % interval of the mean seconds of such samples."""
        variance = 0.0
        for first, row in zip(sample, self.covariances, strict=True):
            for second, covariance in zip(sample, row, strict=True):
                variance += first * second * covariance
        return STANDARD_ERRORS * math.sqrt(max(0.0, variance))


def fit(sums: Sums, quantities: Sequence[str]) -> SumsFit:
    """Fits the last quantity, seconds, as a sum of the others times coefficients >= 0.

    The first quantity is 1 in each sample. The optimum is a least squares over the terms that are
    not zero in it, so all sets of terms are tried, small ones first.
    """
    import numpy as np  # noqa: PLC0415  (100 ms that most commands do not need)

    gram, moments, square = _equations(sums, quantities)
    scale = np.sqrt(np.diag(gram))
    present = [term for term in range(len(scale)) if scale[term] > 0]
    least = square
    best: tuple[list[int], Any] = ([], np.zeros(0))
    for size in range(1, len(present) + 1):
        for terms in map(list, combinations(present, size)):
            scaled = gram[np.ix_(terms, terms)] / np.outer(scale[terms], scale[terms])
            if np.linalg.cond(scaled) > MAX_CONDITION:
                continue
            found = np.linalg.solve(scaled, moments[terms] / scale[terms]) / scale[terms]
            residual = square - float(found @ moments[terms])
            # Rounding is no reason for one more term.
            if (found >= 0).all() and residual < least - 1e-9 * square:
                best = (terms, found)
                least = residual
    terms, found = best
    variance = max(0.0, least) / max(1.0, gram[0, 0] - len(terms))
    coefficients = np.zeros(len(scale))
    covariances = np.zeros_like(gram)
    if terms:
        coefficients[terms] = found
        scaled = gram[np.ix_(terms, terms)] / np.outer(scale[terms], scale[terms])
        inverse = np.linalg.inv(scaled) / np.outer(scale[terms], scale[terms])
        covariances[np.ix_(terms, terms)] = variance * inverse
    return SumsFit(coefficients.tolist(), covariances.tolist(), variance)


def weighted(kinds: Sequence[Sums], quantities: Sequence[str]) -> dict[str, float]:
    """Adds up the sums of several kinds of samples, each divided by the variance of its kind.

    The variance is that around a fit of the kind alone. So the noise of long samples does not hide
    what short ones show. The weights leave the number of all samples as it is. Kinds have equal
    weights if one of them has too few samples.
    """
    counts = [kind.get(f"{quantities[0]}*{quantities[0]}", 0.0) for kind in kinds]
    weights = [1.0] * len(kinds)
    if min(counts) >= MIN_SAMPLES:
        variances = [
            _variance(kind, quantities, count) for kind, count in zip(kinds, counts, strict=True)
        ]
        if min(variances) > 0:
            parts = [count / variance for count, variance in zip(counts, variances, strict=True)]
            weights = [sum(counts) / sum(parts) / variance for variance in variances]
    total: dict[str, float] = {}
    for kind, weight in zip(kinds, weights, strict=True):
        for name, value in kind.items():
            total[name] = total.get(name, 0.0) + weight * value
    return total


def _variance(sums: Sums, quantities: Sequence[str], count: float) -> float:
    """Returns the variance of a kind's seconds around a fit of its own."""
    mean = sums.get(f"{quantities[0]}*{quantities[-1]}", 0.0) / count
    return max(fit(sums, quantities).variance, (MIN_DEVIATION_SHARE * mean) ** 2)


def half_interval_elsewhere(
    sums: Sums, quantities: Sequence[str], fitted: SumsFit, sample: Sequence[float]
) -> float:
    """Returns half of the 95 % interval of the mean seconds of samples unlike those of the sums.

    The covariances of a fit have only the terms that it chose, and another choice may fit as well.
    So here all terms count. Infinity if the sums hold no such direction: with prompts of one length
    they do not show what two of them take.
    """
    import numpy as np  # noqa: PLC0415 - as in `fit`

    gram, moments, square = _equations(sums, quantities)
    scale = np.sqrt(np.diag(gram))
    wanted = np.asarray(sample, dtype=float)
    present = scale > 0
    if wanted[~present].any():
        return math.inf
    values, vectors = np.linalg.eigh(
        gram[np.ix_(present, present)] / np.outer(scale[present], scale[present])
    )
    parts = vectors.T @ (wanted[present] / scale[present])
    held = values > values[-1] / MAX_CONDITION
    if np.linalg.norm(parts[~held]) > MAX_UNSEEN_SHARE * np.linalg.norm(parts):
        return math.inf
    found = np.asarray(fitted.coefficients)
    residual = max(0.0, square - 2 * float(found @ moments) + float(found @ gram @ found))
    freedom = max(1.0, gram[0, 0] - int(held.sum()))
    leverage = float((parts[held] ** 2 / values[held]).sum())
    return STANDARD_ERRORS * math.sqrt(residual / freedom * leverage)


def _equations(sums: Sums, quantities: Sequence[str]) -> tuple[Matrix, Matrix, float]:
    """Returns the normal equations: matrix, right side, and the sum of squared seconds."""
    import numpy as np  # noqa: PLC0415 - as in `fit`

    size = len(quantities)
    products = np.zeros((size, size))
    for row, first in enumerate(quantities):
        for column in range(row, size):
            value = sums.get(f"{first}*{quantities[column]}", 0.0)
            products[row, column] = value
            products[column, row] = value
    return products[:-1, :-1], products[:-1, -1], float(products[-1, -1])
