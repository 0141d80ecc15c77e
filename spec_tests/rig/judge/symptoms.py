"""What a wrong tensor looks like: from a difference to its likely cause.

A short table, tried from the most to the least specific. Each entry recognises one pattern, and
says no more of its cause than the pattern implies: where several causes give it, it names them all,
or none. A clause adds its own candidates as hints: "this is what you would hold if the
micro-batches under no_sync were lost".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

_Wrong = Mapping[str, torch.Tensor | None] | Sequence[Mapping[str, torch.Tensor | None]]


FEW_RIGHT = 4
"""Where less than one in so many elements is right, that says nothing about the others."""

MANY = 16
"""Elements from which on the size of the largest error says something about its cause."""


@dataclass(frozen=True)
class Hint:
    """A wrong value that has a name.

    Attributes:
        means: what it means to find it: "the local gradient: it was never reduced".
        tensors: name to value, for all ranks or one mapping per rank; or what computes that, for
            nearly always nothing is wrong and nobody asks.
    """

    means: str
    tensors: _Wrong | Callable[[], _Wrong]

    def value(self, rank: int, name: str) -> torch.Tensor | None:
        """The candidate for one rank and name."""
        tensors = self.tensors() if callable(self.tensors) else self.tensors
        return (tensors if isinstance(tensors, Mapping) else tensors[rank]).get(name)


@dataclass(frozen=True)
class Cause:
    """A recognised pattern: what was got, in words, and what that means; "" where it may be any."""

    got: str
    text: str


def gap(seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Absolute difference, elementwise; 0 where both are the same infinity, infinite at NaN."""
    difference = (seen.double() - wanted.double()).abs().nan_to_num(nan=float("inf"))
    if wanted.dtype == torch.int64:  # two large ones may have one float64
        difference = torch.where(difference < 2.0**62, (seen - wanted).abs().double(), difference)
    return difference.masked_fill(seen == wanted, 0.0)


@dataclass(frozen=True)
class Finding:
    """One tensor of one rank that is not what it should be."""

    rank: int
    name: str
    seen: torch.Tensor | None
    wanted: torch.Tensor | None
    error: float
    allowed: float

    def shape(self) -> str:
        """Shape of whichever tensor there is."""
        tensor = self.wanted if self.wanted is not None else self.seen
        return str(tuple(tensor.shape)) if tensor is not None else ""

    def has_several(self) -> bool:
        """Whether both sides are there, and of several elements."""
        return self.seen is not None and self.wanted is not None and self.wanted.numel() > 1

    def missing(self) -> str:
        """A sentence if one side is None or of another kind, else empty."""
        if self.seen is None:
            return "nothing ever arrived there: it is None"
        if self.wanted is None:
            return "something appeared where nothing belongs"
        if self.seen.shape != self.wanted.shape:
            return f"shape {tuple(self.seen.shape)} in place of {tuple(self.wanted.shape)}"
        if self.seen.dtype != self.wanted.dtype:
            return f"dtype {self.seen.dtype} in place of {self.wanted.dtype}"
        return ""

    def got(self, cause: Cause | None) -> str:
        """The second half of "expected ..., ..."."""
        if self.seen is None:
            return "got None"
        if self.wanted is None:
            return "which is None, got a tensor"
        if self.missing():
            return f"got {self.missing()}"
        return f"got {cause.got}" if cause else "got something else"

    def largest(self) -> float:
        """The largest number that is expected; 0 without one."""
        is_there = self.wanted is not None and self.wanted.numel()
        return float(self.wanted.double().abs().max()) if is_there else 0.0  # type: ignore[union-attr]  # above

    def difference(self) -> str:
        """Largest error and where, with both values."""
        if self.missing() or self.seen is None or self.wanted is None:
            return self.missing()
        errors = gap(self.seen, self.wanted)
        worst = int(errors.reshape(-1).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), errors.shape))
        wrong = int((errors > self.allowed).sum())
        wanted, seen = (side.reshape(-1)[worst].item() for side in (self.wanted, self.seen))
        pair = f"expected {wanted:.6g}, got {seen:.6g}"
        if isinstance(wanted, int):
            pair = f"expected {wanted}, got {seen}"
        return (
            f"largest error {self.error:.3g} at {where}: {pair}; "
            f"{wrong} of {errors.numel()} elements wrong"
        )


def explain(
    finding: Finding,
    hints: Sequence[Hint],
    *,
    world_size: int,
    all_of: Sequence[Finding] = (),
    is_mean: bool = True,
) -> Cause | None:
    """The most specific entry of the table that fits; None if nothing does.

    Args:
        is_mean: whether it is the mean over all ranks that is expected.
        all_of: every finding of the comparison: a rounding leaves none with a larger error.
    """
    if finding.seen is None or finding.wanted is None:
        return Cause("", finding.missing())
    if finding.missing():
        return Cause("", _misshapen(finding.seen, finding.wanted, world_size))
    seen, wanted = finding.seen.double(), finding.wanted.double()
    # Two right ways to form a wrong value differ by some roundings of its dtype.
    dtype = finding.wanted.dtype
    few = max(1e-9, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
    close = max(finding.allowed, few * float(wanted.abs().nan_to_num(0.0, 0.0).max()))
    return (
        _not_finite(seen, wanted)
        or _zero(seen, wanted)
        or _hinted(finding, hints, close)
        or _ratio(seen, wanted, world_size, is_mean)
        or _transposed(seen, wanted, close)
        or _rounded(finding, all_of)
        or _partly_right(seen, wanted, close)
    )


def _misshapen(seen: torch.Tensor, wanted: torch.Tensor, world_size: int) -> str:
    if seen.ndim and seen.shape[1:] == wanted.shape[1:] and len(seen) < len(wanted):
        whole, share = len(wanted) // world_size * world_size, -(-len(wanted) // world_size)
        if share != len(seen) == whole and torch.equal(seen, wanted[:whole]):
            return "the last rows are missing: those that the ranks do not divide were cut off"
        return "rows are missing: a part was not gathered, or it was divided twice"
    if seen.shape == wanted.shape:
        return "it was cast, and not brought back"
    return "it was reshaped, and not brought back" if seen.numel() == wanted.numel() else ""


def _not_finite(seen: torch.Tensor, wanted: torch.Tensor) -> Cause | None:
    bad = int((~seen.isfinite() & (seen != wanted)).sum())
    if not bad:
        return None
    if bool(wanted.isfinite().all()) and not bool(seen.isnan().any()):
        text = "it overflowed on the way: a number beyond the largest of its dtype, or over zero"
        return Cause(f"{bad} values that are infinite", text)
    return Cause(f"{bad} values that are not finite", "")


def _zero(seen: torch.Tensor, wanted: torch.Tensor) -> Cause | None:
    if bool(seen.any()) or not bool(wanted.any()):
        return None
    for dtype in (torch.float16, torch.bfloat16):
        if not bool(wanted.to(dtype).any()):
            name = str(dtype).removeprefix("torch.")
            return Cause("zero in every element", f"it is too small for {name}, or was cleared")
    return Cause("zero in every element", "")


def _hinted(finding: Finding, hints: Sequence[Hint], close: float) -> Cause | None:
    found = []
    for hint in hints:
        candidate = hint.value(finding.rank, finding.name)
        if candidate is None or finding.seen is None or candidate.shape != finding.seen.shape:
            continue
        # Near it, and not as near to what is right, which a small value may be as well.
        apart = float(gap(finding.seen, candidate).max())
        if apart <= close and 4 * apart < finding.error:
            found.append(hint.means)
    means = "; or ".join(dict.fromkeys(found))  # what two mistakes give, either may have given
    return Cause(f"what this gives: {means.partition(': ')[0]}", means) if means else None


def _ratio(
    seen: torch.Tensor, wanted: torch.Tensor, world_size: int, is_mean: bool
) -> Cause | None:
    where = wanted != 0
    if not bool(where.any()):
        return None
    ratios = seen[where] / wanted[where]
    ratio = float(ratios.median())
    if float((ratios - ratio).abs().max()) > 1e-6 * abs(ratio) or abs(ratio - 1) < 1e-6:
        return None
    text = _of_a_mean(ratio, world_size) if is_mean else ""
    text = "the sign is wrong" if abs(ratio + 1) < 1e-6 else text
    if ratios.numel() == 1 and not text:
        return None  # one number is some multiple of any other
    if ratios.numel() == 1 and ratio == float(world_size):
        text = "added up over the ranks, where it is the mean, or the largest, of all"
    return Cause(
        f"{ratio:.3f} x it in every element", text or f"off by the constant factor {ratio:.3g}"
    )


def _of_a_mean(ratio: float, world_size: int) -> str:
    """What makes a mean over ranks so many times what it should be; two ranks show less."""
    may_be = {2.0: ", or counted twice", 0.5: ", or halved"}.get(ratio, "")
    known = {
        float(world_size): "summed and not divided by the world size",
        1.0 / world_size: "divided by the world size twice",
        float(world_size**2): "reduced twice, or multiplied where one divides",
    }
    for factor, text in known.items():
        if abs(ratio - factor) < 1e-6 * factor:
            return text + may_be * (world_size == 2)
    divisor = round(world_size / ratio) if ratio > 0 else 0
    # Half of it, or a third, may have any cause.
    is_whole = divisor > 1 and abs(divisor * ratio - world_size) < 1e-6 * world_size
    if not is_whole or divisor % world_size == 0:
        return ""
    return f"divided by {divisor}, and the group has {world_size}{may_be}"


def _transposed(seen: torch.Tensor, wanted: torch.Tensor, close: float) -> Cause | None:
    if seen.dim() != 2 or seen.shape[0] != seen.shape[1]:
        return None
    if float((seen.T - wanted).abs().max()) > close:
        return None
    return Cause("its transpose", "the layout of the gradient is not that of the parameter")


def _rounded(finding: Finding, all_of: Sequence[Finding]) -> Cause | None:
    """The value in fewer bits than its dtype has, or an error of the size of their rounding."""
    assert finding.seen is not None
    assert finding.wanted is not None
    own = finding.wanted.dtype
    if not own.is_floating_point:
        return None
    narrow = {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if torch.finfo(dtype).eps >= 64 * torch.finfo(own).eps
    }
    rounded = ((name, finding.wanted.to(dtype).to(own)) for name, dtype in narrow.items())
    if equal := " or ".join(n for n, each in rounded if torch.equal(finding.seen, each)):
        return Cause(f"it rounded to {equal}", f"it went through {equal} on the way")
    for name, dtype in narrow.items():
        # Of many roundings to nearest the largest is seldom below a quarter of the last bit. A few
        # elements show nothing: an error of any cause has some dtype's size.
        if finding.seen.numel() >= MANY and all(
            _is_rounding(each, dtype) for each in all_of or [finding]
        ):
            return Cause(f"it with an error of the size of {name}'s rounding", "")
    return None


def _is_rounding(finding: Finding, dtype: torch.dtype) -> bool:
    """Whether a tensor's largest error is as large as rounding each number once makes it."""
    last_bit = finding.largest() * torch.finfo(dtype).eps
    has_many = finding.seen is not None and finding.seen.numel() >= MANY
    return last_bit / 8 * has_many < finding.error <= last_bit


def _partly_right(seen: torch.Tensor, wanted: torch.Tensor, close: float) -> Cause | None:
    right = ((seen - wanted).abs() <= close).reshape(-1)
    count = int(right.sum())
    # Zero on both sides, such as the rows of tokens that nobody has, is no part that came right.
    says_something = ((seen != 0) | (wanted != 0)).reshape(-1)
    if not (right & says_something).any() or count == right.numel():
        return None
    if count * FEW_RIGHT < right.numel():  # as many come right by chance, or among few numbers
        moved = _moved(seen.reshape(-1), wanted.reshape(-1), right, "positions")
        return Cause("its elements in another order", moved) if moved else None
    first_wrong = int((~right).int().argmax())
    if count == first_wrong:
        got = f"it in the first {count} elements only"
        return Cause(got, _moved(seen.reshape(-1), wanted.reshape(-1), right, "positions"))
    rows = right.reshape(seen.shape[0], -1) if seen.dim() > 1 else right.new_zeros(1, 2)
    if rows.any() and torch.equal(rows.all(dim=1), rows.any(dim=1)):
        got = f"it in {int(rows.all(dim=1).sum())} of {len(rows)} rows"
        return Cause(got, _moved(seen, wanted, rows.all(dim=1), "rows"))
    got = f"it in {count} of {right.numel()} elements"
    return Cause(got, _moved(seen.reshape(-1), wanted.reshape(-1), right, "positions"))


def _moved(seen: torch.Tensor, wanted: torch.Tensor, right: torch.Tensor, what: str) -> str:
    """That they are mixed up, where those that are wrong are there in another order."""
    there, missing = (sorted(each[~right].tolist()) for each in (seen, wanted))
    return f"{what} are mixed up" if there == missing and len(there) > 1 else ""
