"""In the agent: each rank's gradients against the mean of what all ranks computed again.

Tolerance. The copy runs the same kernels in the same dtypes, so what remains is rounding where
micro-batches and ranks are added up: at most (64 + ranks + micro-batches) unit roundoffs of the
sum of absolute values, of which 64 are for kernels that add in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OWN = "got this rank's own gradient: it was not reduced"
_SLACK = 64  # unit roundoffs
_VISIBLE = 0.01  # share of a norm that is told where no cause is known


@dataclass(frozen=True)
class Deviation:
    """What is wrong with one rank's gradients.

    Attributes:
        name: of the tensor that is farthest off.
        words: how it differs, as a sentence after "expected ..., ".
        is_certain: False for a common factor that clipping by hand may have made.
        factor: what all gradients of the rank are multiplied by, if it is one number.
        others: how many further tensors of this rank are wrong.
        is_sum: the factor is the number of ranks, and the gradients were reduced by hand.
        is_own: the gradients are those of this rank alone.
    """

    rank: int
    name: str
    words: str
    is_certain: bool = True
    others: int = 0
    factor: float = 1.0
    is_sum: bool = False
    is_own: bool = False


@dataclass(frozen=True)
class Compared:
    """One tensor of one rank: what the optimizer was given, the mean over ranks, the rank's own."""

    name: str
    kind: str
    actual: Tensor
    mean: Tensor
    own: Tensor | None
    allowed: float  # of the norm of the difference
    last: Tensor | None = None  # the mean of the last micro-batch alone
    earlier: Tensor | None = None  # the gradient of the step before

    def share(self) -> float:
        """Return how far the gradient is from the mean, as a share of the mean's norm."""
        return float((self.actual - self.mean).norm() / self.mean.norm().clamp_min(1e-30))

    def off(self, factor: float) -> float:
        """Return how many tolerances the gradient is away from `factor` times the mean."""
        distance = float((self.actual - factor * self.mean).norm())
        return distance / max(self.allowed * abs(factor), 1e-30) if distance else 0.0


def judge(
    files: Sequence[Path], batches: int, coefficients: Sequence[float], is_mean: bool
) -> list[Deviation]:
    """Hold each rank's gradients against the mean of what all ranks computed again.

    Args:
        files: what `Recording.finish` wrote, one of each rank.
        batches: micro-batches of the step.
        coefficients: what clipping and unscaling multiplied each rank's gradients by.
        is_mean: the loss of each rank is known to be a mean over its own batch.
    """
    ranks = [torch.load(file, weights_only=True) for file in files]
    found: list[Deviation] = []
    for rank, coefficient in enumerate(coefficients):
        tensors = [_compared(ranks, rank, name, batches) for name in ranks[rank]["actual"]]
        found += _deviation(
            rank, len(ranks), [t for t in tensors if t is not None], coefficient, is_mean
        )
    return _apart(found, len(ranks)) or found


def _apart(found: Sequence[Deviation], size: int) -> list[Deviation]:
    """Return a certain deviation where ranks scale their gradients by factors of their own."""
    factors = {each.rank: each.factor for each in found}
    if not found or any(each.is_certain for each in found):
        return []
    others = [1.0] * (size - len(factors)) + list(factors.values())
    if max(others) - min(others) < 0.01 * max(map(abs, others)):
        return []
    rank, factor = max(factors.items(), key=lambda pair: abs(pair[1] - 1))
    words = (
        f"got {factor:.3f} x it, while factors on the ranks are from {min(others):.3f} to "
        f"{max(others):.3f}: each rank scales, or clips, by a number of its own"
    )
    return [Deviation(rank, found[0].name, words)]


def _compared(ranks: Sequence[Any], rank: int, name: str, batches: int) -> Compared | None:
    kind, part = ranks[rank]["parts"][name]
    actual = ranks[rank]["actual"][name]
    computed = [of["expected"][name] for of in ranks if name in of["expected"]]
    mean = _cut(sum(total for total, _ in computed) / len(ranks), part)
    size = _cut(sum(absolute for _, absolute in computed) / len(ranks), part)
    if actual.shape != mean.shape or not actual.numel():
        return None
    own = ranks[rank]["expected"].get(name)
    roundoff = torch.finfo(actual.dtype).eps / 2
    allowed = float(size.norm()) * roundoff * (_SLACK + len(ranks) + batches)
    last = [of["last"][name] for of in ranks if name in of.get("last", {})]
    return Compared(
        name,
        kind,
        actual.double(),
        mean,
        own and _cut(own[0], part),
        allowed,
        _cut(torch.stack(last).sum(0) / len(ranks), part) if last else None,
        ranks[rank].get("earlier", {}).get(name),
    )


def _cut(full: Any, part: tuple[int, int, int] | None) -> Any:
    if part is None:
        return full
    dim, parts, index = part
    pieces = torch.chunk(full, parts, dim=dim)
    return pieces[index] if index < len(pieces) else full.narrow(dim, 0, 0)


def _deviation(
    rank: int, size: int, tensors: Sequence[Compared], coefficient: float, is_mean: bool
) -> list[Deviation]:
    """Return what is wrong on one rank: nothing, one factor for all tensors, or single tensors."""
    wrong = [t for t in tensors if t.off(coefficient) > 1]
    if not wrong:
        return []
    if not any(bool(t.actual.any()) for t in tensors):
        return [Deviation(rank, wrong[0].name, "got zeros", True, len(wrong) - 1)]
    common = _factor([(t.mean, t.actual) for t in tensors])
    common = 1.0 if common is None else common
    if len(tensors) > 1 and all(t.off(common) <= 1 for t in tensors):
        ratio = common / coefficient
        # Reduced by hand, a sum is right where the loss was divided by the number of ranks.
        is_sum = abs(ratio / size - 1) < 0.01 and any(t.kind == "plain" for t in tensors)
        suspects = (size, 1.0 / size, size**2, 1.0 / size**2, 2.0, 0.5)
        is_odd = ratio > 1.01 or any(abs(ratio / each - 1) < 0.01 for each in suspects)
        is_certain = is_mean if is_sum else is_odd
        words = f"got {ratio:.3f} x it in every element of every gradient"
        rest = (is_certain, len(wrong) - 1, ratio, is_sum)
        return [Deviation(rank, wrong[0].name, words, *rest)]
    worst = max(wrong, key=lambda t: t.off(coefficient))
    words = _why(wrong, size, coefficient)
    if not words and worst.share() < _VISIBLE:
        return []  # a compressed reduction rounds so much
    certain = bool(words)
    words = words or f"got one that differs by {100 * worst.share():.1f} % of its norm"
    return [Deviation(rank, worst.name, words, certain, len(wrong) - 1, is_own=words == _OWN)]


def _why(wrong: Sequence[Compared], size: int, coefficient: float) -> str:
    """Return in words what fits all wrong gradients, or "" where nothing does."""

    def fits(found: Sequence[Tensor | None], also: float = 0.0) -> bool:
        return all(
            f is not None
            and f.shape == t.actual.shape
            and float((t.actual - f.double()).norm()) <= t.allowed + also * float(f.norm())
            for f, t in zip(found, wrong, strict=True)
        )

    scaled = [t.mean * coefficient for t in wrong]
    if size > 1 and fits([t.own for t in wrong]):
        return _OWN
    if fits([None if t.last is None else t.last * coefficient for t in wrong]):
        return "got that of the last micro-batch alone: the others were cleared before the step"
    # What is left of the step before is what that step was given, clipped where it clips.
    both = [None if t.earlier is None else t.mean + t.earlier for t in wrong]
    left = [
        None if t.earlier is None else m + t.earlier for m, t in zip(scaled, wrong, strict=True)
    ]
    if fits(left, 1e-4) or fits(_scaled_like(both, wrong), 1e-4):
        return "got it with that of the step before added: gradients were not cleared"
    return ""


def _scaled_like(found: Sequence[Tensor | None], wrong: Sequence[Compared]) -> list[Tensor | None]:
    """Return tensors times the one factor by which they are closest to the gradients."""
    pairs = [(f, t.actual) for f, t in zip(found, wrong, strict=True) if f is not None]
    if any(f.shape != actual.shape for f, actual in pairs):
        return [None] * len(found)
    factor = _factor(pairs)
    return [None if f is None or factor is None else f * factor for f in found]


def _factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Return the one factor by which the first of all pairs are closest to the second."""
    top = sum(float((f * actual).sum()) for f, actual in pairs)
    bottom = sum(float((f * f).sum()) for f, _ in pairs)
    return top / bottom if bottom else None
