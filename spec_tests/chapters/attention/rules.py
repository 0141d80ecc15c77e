"""How far attention may be from its definition: rules derived from rounding, in two norms.

`ref` is the definition in float64 on the rounded inputs, `base` a plain attempt in the inputs' own
dtype, u the unit roundoff, err(x) = x - ref. A value passes when each rule of its dtype holds.

    N1    |err| <= u |ref|, 1.25 u |ref| for gradients      float16, bfloat16; Frobenius norms
    N2    |err| <= 1.25 |err(base)|                         likewise
    M     max |err| <= 2 max |err(base)| + floor            likewise; 3 for gradients
    F32   |err| <= 4 |err(base)| + (16 + 8 s) u |ref|       float32 and float64
    LSE   |err| <= 4e-6 max(1, max |ref|)                   every dtype: statistics are float32
    BIT   equal bits

Right tiled code was measured at 0.5 to 0.8 u and 0.45 to 0.95 of the baseline; the gradients of
PyTorch's own kernel at up to 1.07 u, where few keys are seen. The largest error
alone (M, as the field tests) misses accumulators in bfloat16: those spread a little everywhere, and
the norm sees them. The floor of M is the rounding of ref + 0.3 - 0.3 in the dtype, twice. In F32, s
is the largest log-sum-exp: gradients, and an output whose parts are merged by their L, are made of
exp(score - L), which is off by u |L| where the baseline has the softmax itself (PyTorch's kernels
were measured at 7 s u). Where
float32 may mean TF32 (see `law.is_tf32`), u is that of its eleven bits. In half
precision, where data is not normal, dP - delta is a difference of large numbers, one of which was
rounded with O: dQ and dK are then held to four times the baseline (right code: 1.25) and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spec_tests.chapters.attention.problem import (
    GRADIENTS,
    Problem,
    baseline,
    dense,
    inputs,
    narrow,
    reference,
)
from spec_tests.rig import judge

UNIT = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
"""Unit roundoff: half the distance from one to the next number."""
TF32 = 2.0**-11
LSE_ERROR = 4e-6
BY_PLAIN = "norm of the error, by a plain attempt's ({} x that of plain attention in this dtype)"


@dataclass(frozen=True)
class Bound:
    """One rule on one tensor: what was measured and what is allowed."""

    rule: str
    error: float
    allowed: float

    @property
    def is_kept(self) -> bool:
        """Whether the error is within what is allowed."""
        # NaN is neither: it must not pass for being no larger.
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.rule}: {self.error:.3g}, allowed {self.allowed:.3g}"


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def _largest(x: torch.Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def bounds(
    name: str,
    seen: torch.Tensor,
    ref: torch.Tensor,
    base: torch.Tensor,
    *,
    largest_lse: float = 0.0,
    tf32: bool = False,
    gentle: bool = True,
) -> list[Bound]:
    """The rules for one tensor. `seen` has the dtype of the inputs, `ref` is float64."""
    if name == "L":
        rule = "largest error of L (some roundings of its largest value)"
        return [Bound(rule, *_lse(seen, ref, tf32=tf32))]
    error, own, unit = _norm(seen.double() - ref), base.double() - ref, UNIT[seen.dtype]
    if seen.dtype in (torch.float32, torch.float64):
        # Of eleven bits are the scores, whatever is made of them.
        is_rounded = tf32 and seen.dtype == torch.float32
        unit, roundings = (TF32, 1.0) if is_rounded else (unit, 16.0)
        # The reference itself is float64: beside it, float64 gets its rounding once more.
        spare = 4.0 if seen.dtype == torch.float64 else 1.0
        rounded = (roundings + 8.0 * largest_lse) * unit * _norm(ref)
        rule = f"{BY_PLAIN.format(int(4 * spare))}, and some roundings of each element"
        return [Bound(rule, error, spare * (4.0 * _norm(own) + rounded))]
    if name in ("dQ", "dK") and not gentle:
        return [Bound(BY_PLAIN.format(4), error, 4.0 * _norm(own))]
    roundings, factor = (1.25, 3.0) if name in GRADIENTS else (1.0, 2.0)
    stored = ref.to(seen.dtype)
    floor = 2.0 * _largest((stored + 0.3 - 0.3).double() - stored.double())
    most = factor * _largest(own) + floor
    by_dtype = f"norm of the error, by the dtype ({roundings:g} x the rounding of each element)"
    return [
        Bound(by_dtype, error, roundings * unit * _norm(ref)),
        Bound(BY_PLAIN.format(1.25), error, 1.25 * _norm(own)),
        Bound(
            f"largest error ({factor:g} x plain attention's)", _largest(seen.double() - ref), most
        ),
    ]


def _lse(seen: torch.Tensor, ref: torch.Tensor, *, tf32: bool = False) -> tuple[float, float]:
    finite = ref.isfinite()
    if not torch.equal(seen.double()[~finite], ref[~finite]):
        return float("nan"), 0.0
    unit = LSE_ERROR if seen.dtype != torch.float64 else 64 * UNIT[torch.float64]
    unit = TF32 if tf32 else unit
    return _largest(seen.double()[finite] - ref[finite]), unit * max(1.0, _largest(ref[finite]))


def close(
    seen: Mapping[str, torch.Tensor],
    problem: Problem,
    *,
    names: Iterable[str] = ("O",),
    tf32: bool = False,
    likely: str = "",
) -> None:
    """Every named tensor must keep the rules of its dtype; `likely` is for values that look right.

    Raises:
        Violation: it names the tensors, the broken rule of each and what the values look like.
    """
    __tracebackhide__ = True
    wrong = faults(seen, problem, names=names, tf32=tf32)
    if not wrong:
        return
    (finding, looks_like, detail), *others = wrong
    lines = [detail, *(", ".join(part for part in other if part) for other in others)]
    raise judge.violated(
        finding, likely=looks_like or likely, detail="\n".join(lines).strip(), given=repr(problem)
    )


def faults(
    seen: Mapping[str, torch.Tensor], problem: Problem, *, names: Iterable[str], tf32: bool
) -> list[tuple[str, str, str]]:
    """Of each tensor that breaks a rule: what is wrong, what it looks like, and where."""
    ref, base, found = reference(problem), baseline(problem), []
    given: dict[str, Any] = {
        "largest_lse": _largest(ref["L"][ref["L"].isfinite()]),
        "gentle": problem.data == "normal",
        "tf32": tf32 and problem.torch_dtype == torch.float32,
    }
    for name in names:
        if malformed := _malformed(name, seen[name], ref[name], problem):
            found.append(malformed)
            continue
        kept = bounds(name, seen[name], ref[name], base[name], **given)
        for bound in kept:
            note(bound)
        if broken := next((bound for bound in kept if not bound.is_kept), None):
            said = f"{name} {tuple(ref[name].shape)}: expected the definition's values, {broken}"
            looks_like = _narrow(name, seen[name], problem) or _looks_like(
                name, seen[name], problem
            )
            found.append((said, looks_like, _where(seen[name], ref[name])))
    return found


def apart(name: str, found: torch.Tensor, wanted: torch.Tensor, *, tf32: bool = False) -> Bound:
    """How far two answers are apart that the definition says are equal.

    Each is within its own rule of the definition, so they are within twice that of each other.
    float32 has 32 roundings in norm, where F32 allows four times a plain attempt's and 16.
    """
    wide = wanted.double()
    if name == "L":
        error, allowed = _lse(found, wide, tf32=tf32)
        return Bound("largest difference of L", error, 2 * allowed)
    unit = TF32 if tf32 and found.dtype == torch.float32 else UNIT[found.dtype]
    factor = 2.0 if unit >= TF32 else 32.0
    allowed = factor * unit * _norm(wide)
    return Bound("norm of the difference", _norm(found.double() - wide), allowed)


def note(bound: Bound) -> None:
    """Record the margin for the report."""
    judge.SITUATION.get().margins.append(
        {
            "tolerance": bound.allowed,
            "error": bound.error,
            "ratio": bound.error / bound.allowed if bound.allowed else float(bound.error > 0),
        }
    )


def _malformed(
    name: str, seen: torch.Tensor | None, ref: torch.Tensor, problem: Problem
) -> tuple[str, str, str] | None:
    """None if a tensor has the shape and dtype that the contract says, and nothing is NaN."""
    dtype = problem.torch_dtype
    if name == "L":
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = f"{name}: expected a tensor {tuple(ref.shape)} of {dtype}"
    if not isinstance(seen, torch.Tensor):
        return f"{wanted}, got {seen!r:.60}", "", ""
    if seen.shape != ref.shape or seen.dtype != dtype:
        return f"{wanted}, got {tuple(seen.shape)} of {seen.dtype}", "", ""
    bad = ~seen.isfinite() & ref.isfinite()
    if not bool(bad.any()):
        return None
    return (
        f"{name} {tuple(seen.shape)}: expected finite values, got {int(bad.sum())} that are not, "
        f"the first at {_first(bad)}",
        "an overflow, or inf times zero: in padding, in rows that see nothing, in a maximum",
        "",
    )


def _first(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in flags.nonzero()[0]) if bool(flags.any()) else ()


def _where(seen: torch.Tensor, ref: torch.Tensor) -> str:
    """The largest error and its place, and the rows that hold most of it."""
    error = (seen.double() - ref).abs().nan_to_num(nan=torch.inf)
    error = error.masked_fill(seen.double() == ref, 0.0)
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"largest error {float(error[place]):.3g} at {place}: expected {float(ref[place]):.6g}, "
        f"got {float(seen[place]):.6g}"
    )


class TopLeft(Problem):
    """A causal problem in which row i sees the keys j <= i."""

    def visible(self) -> torch.Tensor:
        """As PyTorch's `is_causal` has it."""
        return torch.ones(self.seq_q, self.num_keys, dtype=torch.bool).tril()


# Near definitions, and what it means to have computed one of them.
_OTHERS: dict[str, Callable[[Problem], Problem]] = {
    "the causal mask is not applied": lambda p: p.but(causal=False),
    "a causal mask is applied where none is asked for": lambda p: p.but(causal=True),
    "the scale is ignored: it is head_dim ** -0.5": lambda p: p.but(scale=None),
    "the scale is not applied at all": lambda p: p.but(scale=1.0),
    "the scale is applied twice": lambda p: p.but(scale=p.factor**2),
    "causal is aligned top-left (row i sees keys j <= i), the contract's is bottom-right": (
        lambda p: TopLeft(**vars(p)) if p.causal and p.seq_q != p.num_keys else p
    ),
    "the gradient of the log-sum-exp is left out": lambda p: p.but(lse_gradient=False),
}
_RATIOS = {
    0.0: "zero in every element",
    1.4426950408889634: "a factor of 1/ln 2: a base-2 logarithm where the natural one is meant",
    0.6931471805599453: "a factor of ln 2: base 2 and base e are mixed",
    -1.0: "the sign is wrong",
    2.0: "twice what it should be",
    0.5: "half of what it should be",
}

MOST_SCORES = 2**18
"""Of a problem for which causes are looked for: each candidate is an oracle of its own."""


def _looks_like(name: str, seen: torch.Tensor, problem: Problem) -> str:
    """A near definition that gives the same values, if there is one."""
    if problem.seq_q * problem.num_keys > MOST_SCORES:
        return ""
    ref, scale = reference(problem)[name], problem.factor
    for means, changed in _OTHERS.items():
        other = changed(problem)
        if other != problem:
            answer = dense(other, inputs(problem), torch.float64, scale_on_keys=False)
            if _same(seen, answer[name], ref):
                return means
    if any(_same(seen, other, ref) for other in _padded(name, problem)):
        return "keys that are padding enter the softmax: those that fill up the last tile"
    ratios = dict(_RATIOS)
    if scale not in (0.0, 1.0):
        said = f"the scale of {scale:.3g} is {{}} applied to {name}"
        ratios |= {scale: said.format("once too often"), 1 / scale: said.format("not")}
    for ratio, means in ratios.items():
        if _same(seen, ratio * ref, ref):
            return means
    return _partly(name, seen, ref, baseline(problem)[name])


def _padded(name: str, problem: Problem) -> Iterator[torch.Tensor]:
    """Yield O or L with the score of keys of zeros in each row, as many as fill up a usual tile."""
    wide, own = (reference(problem)[each] for each in ("O", "L"))
    for tile in (16, 32, 64, 128):
        if name in ("O", "L") and (more := -problem.num_keys % tile):
            padded = own.logaddexp(torch.tensor(float(more), dtype=own.dtype).log())
            yield padded if name == "L" else wide * (own - padded).exp()[..., None]


def _narrow(name: str, seen: torch.Tensor, problem: Problem) -> str:
    """What it means if the error is mostly that of narrow scores and sums, for a usual tile."""
    ref = reference(problem)[name]
    error, is_narrow = _norm(seen.double() - ref), seen.dtype in (torch.float16, torch.bfloat16)
    if seen.dtype == torch.float64 and error <= 32 * UNIT[torch.float32] * _norm(ref):
        return "scores, maxima or sums are rounded to float32: keep all of them in float64"
    if name != "O" or not is_narrow or problem.seq_q * problem.num_keys > MOST_SCORES:
        return ""
    tiles = (narrow(problem, tile).double() for tile in (16, 32, 64, 128))
    if not any(2 * _norm(seen.double() - tile) < error for tile in tiles):
        return ""
    return f"scores, maxima or sums are rounded to {problem.dtype}: keep all of them in float32"


def _same(seen: torch.Tensor, other: torch.Tensor, ref: torch.Tensor) -> bool:
    """Whether it is another value than the right one, and much nearer to that."""
    finite = seen.isfinite() & other.isfinite()
    apart, off = (_norm((seen.double() - each)[finite]) for each in (other, ref))
    is_near = apart <= 1e-2 * _norm(other[finite]) and 4 * apart < off
    return is_near and torch.equal(seen.isfinite(), other.isfinite())


APART = 8.0
"""So many times smaller than in any wrong row are errors in the others, if these are right."""


def _partly(name: str, seen: torch.Tensor, ref: torch.Tensor, base: torch.Tensor) -> str:
    """Which rows are wrong, where the others are as near as a plain attempt is."""
    scale = max(1e-12, _largest(ref[ref.isfinite()]))
    errors, own = ((each.double() - ref).abs().nan_to_num(0.0) / scale for each in (seen, base))
    rows = errors if name == "L" else errors.amax(dim=-1)
    usual = 4.0 * max(_largest(own), UNIT[seen.dtype])
    if (which := _apart(rows.flatten(0, -2).amax(dim=0), usual)).any():
        listed = which.nonzero().flatten().tolist()
        return f"rows {listed[:6]}{' ...' if len(listed) > 6 else ''} are wrong, the others right"
    if (which := _apart(rows.amax(dim=-1), usual)).any():
        return f"(batch, head) {which.nonzero().tolist()[:4]} are wrong, the others right"
    own_factors = "each row is off by a factor of its own, as from a wrong or rounded log-sum-exp"
    return own_factors if _by_factors(name, seen, ref) else ""


def _apart(errors: torch.Tensor, usual: float) -> torch.Tensor:
    """Which errors are large, where all others are usual and far smaller; else none."""
    large = errors > usual
    if not bool(large.any()) or bool(large.all()):
        return torch.zeros_like(large)
    is_apart = float(errors[large].min()) >= APART * float(errors[~large].max())
    return large & is_apart


def _by_factors(name: str, seen: torch.Tensor, ref: torch.Tensor) -> bool:
    """Whether rows are right but for a factor each, as from rounded statistics of the softmax."""
    if name == "L" or not bool(ref.isfinite().all()):
        return False
    wide = seen.double()
    squares = (ref * ref).sum(dim=-1, keepdim=True).clamp_min(1e-30)
    left = _norm(wide - (wide * ref).sum(dim=-1, keepdim=True) / squares * ref)
    return left <= 1.25 * UNIT[seen.dtype] * _norm(ref) and 2 * left < _norm(wide - ref)
