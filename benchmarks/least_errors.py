"""Fits a sum of terms without negative values: least squares, or least absolute errors."""

from __future__ import annotations

import numpy as np

IRLS_ROUNDS = 8
IRLS_FLOOR = 0.03  # relative errors below it weigh the same


def non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the least squares without negative values (Lawson and Hanson)."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    passive = np.zeros(matrix.shape[1], bool)
    found = np.zeros(matrix.shape[1])
    for _ in range(10 * len(found)):
        gradient = np.where(passive, -np.inf, scaled.T @ (wanted - scaled @ found))
        if gradient.max() < 1e-9:
            break
        passive[int(gradient.argmax())] = True
        while True:
            tried = np.zeros(len(found))
            tried[passive] = np.linalg.lstsq(scaled[:, passive], wanted, rcond=None)[0]
            if (tried[passive] > 0).all():
                break
            falling = passive & (tried <= 0)
            step = (found[falling] / (found[falling] - tried[falling])).min()
            found += step * (tried - found)
            passive &= found > 1e-15
            found[~passive] = 0.0
        found = tried
    return found / scale


def absolute_least(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the least sum of absolute errors without negative values, by reweighting."""
    found = non_negative(matrix, wanted)
    for _ in range(IRLS_ROUNDS):
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ found - wanted), IRLS_FLOOR))
        found = non_negative(matrix * weights[:, None], wanted * weights)
    return found
