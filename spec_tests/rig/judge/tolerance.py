"""How far two numbers may be apart, derived from how they were computed. Never guessed.

A sum of n products in floating point is off by at most about n * eps * (sum of the magnitudes)
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Different but equally right
orders of operation lie within twice that of each other. So a tolerance needs the dtype, the number
of terms, and a magnitude; nothing else.

>>> import torch
>>> exact().bound(torch.ones(3))
0.0
>>> rounding(torch.float64, terms=8).bound(torch.tensor([3.0])) < 1e-13
True
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """A bound relative to the largest magnitude of the expected tensor.

    Attributes:
        relative: allowed error over magnitude; 0.0 asks for equal bits.
        reason: where the number comes from, as the failure message shows it.
        floor: magnitude used where the expected tensor is smaller, zero for instance.
    """

    relative: float
    reason: str
    floor: float = 1.0

    def bound(self, expected: torch.Tensor) -> float:
        """The largest allowed absolute error for this expected tensor."""
        if self.relative == 0.0:
            return 0.0
        # Infinities and NaN have no magnitude: with them the bound would allow everything.
        magnitudes = expected.detach().abs()
        magnitudes = magnitudes[magnitudes.isfinite()]
        largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
        return self.relative * max(largest, self.floor)

    def plus(self, relative: float, reason: str) -> Tolerance:
        """The same with a further term, which has its own reason."""
        return Tolerance(self.relative + relative, f"{self.reason}, and {reason}", self.floor)


def exact(reason: str = "exact arithmetic: equal bits") -> Tolerance:
    """Equal bits. Only where the order of operations is the same, or cannot matter."""
    return Tolerance(0.0, reason)


def rounding(dtype: torch.dtype, *, terms: int, depth: int = 1, floor: float = 1.0) -> Tolerance:
    """Two right ways to sum `terms` products, `depth` such sums after one another.

    Args:
        dtype: in which the sums are formed.
        terms: length of the longest sum: batch times features, and the number of ranks.
        depth: how many sums feed one another: layers, and steps of training.
        floor: magnitude below which the bound does not shrink: the size of intermediate values.
    """
    eps = torch.finfo(dtype).eps
    name = str(dtype).removeprefix("torch.")
    return Tolerance(
        2.0 * terms * depth * eps, f"{name}, sums of {terms} terms, {depth} deep", floor
    )
