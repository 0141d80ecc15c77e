"""In the agent: each rank's gradients against the mean of what all ranks computed again.

Tolerance. The copy runs the same kernels in the same dtypes, so what remains is rounding where
micro-batches and ranks are added up: at most (64 + ranks + micro-batches) unit roundoffs of the
sum of absolute values, of which 64 are for kernels that add in another order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_tests.watch.norm import About, Finding, rank_norm, step_norm
from spec_tests.watch.regime import NAME_REPLICAS, Regime
from spec_tests.watch.run import Event, Step

if TYPE_CHECKING:
    from torch import Tensor

_LI = "Li et al. 2020, section 3.2"
_OWN = "got this rank's own gradient: it was not reduced"
_SLACK = 64  # unit roundoffs
_VISIBLE = 0.01  # share of a norm that is told where no cause is known
_CLOSE = 1e-3


@step_norm(
    "watch.replay.gradients",
    source=f"{_LI}; ZeRO, Rajbhandari et al. 2020",
    about=About.EQUAL,
)
def replayed_gradients(step: Step) -> Iterator[Finding]:
    """The optimizer MUST be given the mean over ranks of what the outputs' gradients demand."""
    replays = {rank: event["replay"] for rank, event in step.events.items() if event.get("replay")}
    if not replays:
        return
    why = _why_not(step, replays)
    found = None if why else _first_deviation(step, replays)
    if found is not None and _are_reduced_in_the_step(step):
        why = "the optimizer reduces gradients inside its step()"
    is_exact = all(of.get("is_exact") for of in replays.values())
    if found is not None and found.factor == 1.0 and not is_exact:
        why = "the compiled model draws random numbers in an order of its own"
    if why:
        step.run.notes.append(f"step {step.number} was not replayed: {why}")
        return
    step.run.replayed = f"; step {step.number} computed again"
    if found is None:
        return
    if not found.is_certain and found.factor != 1.0 and not found.is_sum:
        step.run.notes.append(
            f"step {step.number}: all gradients are one factor times the mean over ranks "
            f"({found.words}): right if they are clipped by hand, or if the loss is scaled so"
        )
        return
    others = f" ({found.others + 1} tensors)" if found.others else ""
    likely = "a loss that uses parameters directly, or gradients that are changed by hand after "
    likely += "the backward: then this is right"
    if found.is_sum:
        likely = "gradients were summed over the ranks and not divided; right if the loss was"
    yield step.finding(
        found.rank,
        f"expected the mean over ranks of the step's own gradients, {found.words}{others}",
        found.name,
        likely="" if found.is_certain else likely,
        is_advice=not found.is_certain,
    )


def _why_not(step: Step, replays: dict[int, Any]) -> str:
    """Return why a step cannot be judged, or ""."""
    regime = step.run.regimes.of(step.whose, step.kind())
    if regime is Regime.ALONE:
        return "each rank trains weights of its own, and nothing reduces their gradients"
    if regime is Regime.PARTS:
        return f"{step.run.regimes.doubt(step.whose)}; {NAME_REPLICAS}"
    reasons: dict[str, list[int]] = {}
    for rank, of in replays.items():
        if "reason" in of:
            reasons.setdefault(of["reason"], []).append(rank)
    said = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in reasons.items()]
    if said or len(replays) < len(step.events):
        return "; ".join(said) or "not all ranks took it"
    is_here = all(Path(of["path"]).is_file() for of in replays.values())
    return "" if is_here else "ranks on other nodes wrote to their own disks"


def _are_reduced_in_the_step(step: Step) -> bool:
    """Return whether ranks step with gradients of their own and have the same weights after it."""
    grads, *weights = (any(step.unequal(k, every=True)) for k in ("grads", "before", "after"))
    return grads and not any(weights)


@rank_norm("watch.reduction.mean", source=_LI, about=About.PEERS)
def summed_by_hand(step: Step, rank: int, event: Event) -> Finding | None:
    """Gradients that a script sums over the ranks SHOULD be divided by their number."""
    given = math.sqrt(sum(norm**2 for norm in event["norms"] if norm))
    sums = (event["sums"] or 0.0) * _coefficient(event)
    of_losses = _weight(event) * step.run.world
    # Where the loss is not known, whoever asks for a step's values is told what is known.
    is_refused = "reason" in (event["replay"] or {}) and abs(of_losses - 1) > _CLOSE
    is_asked = is_refused or (_is_mean(step) and not event["replay"])
    if not is_asked or not abs(given - sums) < _CLOSE * sums:  # NaN is close to nothing
        return None
    right = "; right if the loss is divided by their number" * (not _is_mean(step))
    return step.finding(
        rank,
        "expected the mean over ranks of the gradients, got their sum in the step, as all_reduce "
        "left it",
        likely="the sums are not divided by the number of ranks" + right,
    )


def _is_mean(step: Step) -> bool:
    """Return whether each rank's loss is a mean over its own batch, as far as losses were seen."""
    # What a mean by hand is a mean of may be divided already.
    is_by_hand = any(x["of"] == "mean()" for e in step.events.values() for x in e["losses"])
    return not is_by_hand and all(abs(_weight(e) - 1) <= _CLOSE for e in step.events.values())


def _weight(event: Event) -> float:
    """Return what the losses of a rank that were seen weigh together."""
    return float(sum(loss["weight"] or 0.0 for loss in event["losses"]) / event["scale"])


def _coefficient(event: Event) -> float:
    """Return what clipping and unscaling multiplied the gradients of a step by."""
    clip, scale = event["clip"], event["scale"]
    clipped = clip["clipped"] / clip["norm"] if clip and clip["norm"] else 1.0
    return float(clipped / scale)


# ---------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Deviation:
    """What is wrong with one rank's gradients.

    Attributes:
        name: of the tensor that is farthest off.
        words: how it differs, as a sentence after "expected ..., ".
        is_certain: False for a common factor that clipping by hand may have made.
        others: how many further tensors of this rank are wrong.
        factor: what all gradients of the rank are multiplied by, if it is one number.
        is_sum: the factor is the number of ranks, and the gradients were reduced by hand.
    """

    rank: int
    name: str
    words: str
    is_certain: bool = True
    others: int = 0
    factor: float = 1.0
    is_sum: bool = False


@dataclass(frozen=True)
class Compared:
    """One tensor of one rank: what the optimizer was given, the mean over ranks, the rank's own."""

    name: str
    kind: str
    actual: Tensor
    mean: Tensor
    own: Tensor | None
    allowed: float  # of the norm of the difference
    factor: float  # what clipping and unscaling multiplied it by
    last: Tensor | None = None  # the mean of the last micro-batch alone
    earlier: Tensor | None = None  # the gradient of the step before

    def off(self, ratio: float = 1.0) -> float:
        """Return how many tolerances it is away from `ratio` times the clipped mean."""
        factor = ratio * self.factor
        distance = float((self.actual - factor * self.mean).norm())
        return distance / max(self.allowed * abs(factor), 1e-30) if distance else 0.0


def _first_deviation(step: Step, replays: dict[int, Any]) -> Deviation | None:
    batches = max(of["batches"] for of in replays.values())
    for group in step.run.regimes.named or [list(replays)]:
        files = [Path(replays[rank]["path"]) for rank in group]
        for found in judge(files, batches, _is_mean(step)):
            return replace(found, rank=group[found.rank])
    return None


def judge(files: Sequence[Path], batches: int, is_mean: bool) -> list[Deviation]:
    """Hold each rank's gradients against the mean of what all ranks computed again.

    Args:
        files: what `replay.finish` wrote, one of each rank.
        batches: micro-batches of the step.
        is_mean: the loss of each rank is known to be a mean over its own batch.
    """
    import torch  # needed here alone

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11: of sparse gradients in a file
        ranks = [torch.load(file, weights_only=True) for file in files]
    deviations: list[Deviation | None] = []
    for rank in range(len(ranks)):
        tensors = [_compared(ranks, rank, name, batches) for name in ranks[rank]["actual"]]
        known = [t for t in tensors if t is not None]
        deviations.append(_deviation(rank, len(ranks), known, is_mean))
    found = [each for each in deviations if each is not None]
    return _apart(found, len(ranks)) or found


def _apart(found: Sequence[Deviation], size: int) -> list[Deviation]:
    """Return a certain deviation where ranks scale their gradients by factors of their own."""
    if not found or any(each.is_certain for each in found):
        return []
    others = [1.0] * (size - len(found)) + [each.factor for each in found]
    if max(others) - min(others) < 0.01 * max(map(abs, others)):
        return []
    worst = max(found, key=lambda each: abs(each.factor - 1))
    words = (
        f"got {worst.factor:.3f} x it, while factors on the ranks are from {min(others):.3f} to "
        f"{max(others):.3f}: each rank scales, or clips, by a number of its own"
    )
    return [Deviation(worst.rank, found[0].name, words)]


def _compared(ranks: Sequence[Any], rank: int, name: str, batches: int) -> Compared | None:
    import torch

    from spec_tests.watch.layout import cut

    kind, part = ranks[rank]["parts"][name]
    actual = ranks[rank]["actual"][name]
    computed = [of["expected"][name] for of in ranks if name in of["expected"]]
    mean = cut(sum(total for total, _ in computed) / len(ranks), part)
    size = cut(sum(absolute for _, absolute in computed) / len(ranks), part)
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
        own and cut(own[0], part),
        allowed,
        ranks[rank].get("factors", {}).get(name, 1.0),
        cut(sum(last) / len(ranks), part) if last else None,
        ranks[rank].get("earlier", {}).get(name),
    )


def _deviation(
    rank: int, size: int, tensors: Sequence[Compared], is_mean: bool
) -> Deviation | None:
    """Return what is wrong on one rank: nothing, one factor for all tensors, or single tensors."""
    wrong = [t for t in tensors if t.off() > 1]
    if not wrong:
        return None
    others = len(wrong) - 1
    if not any(bool(t.actual.any()) for t in tensors):
        return Deviation(rank, wrong[0].name, "got zeros", True, others)
    ratio = _factor([(t.mean * t.factor, t.actual) for t in tensors])
    if len(tensors) > 1 and all(t.off(ratio) <= 1 for t in tensors):
        if abs(ratio - 1) < _CLOSE:
            return None  # the factor of clipping is a quotient of rounded norms
        # Reduced by hand, a sum is right where the loss was divided by the number of ranks.

        def is_just(factor: float) -> bool:
            return all(t.off(factor) <= 1 for t in tensors)

        is_sum = is_just(size) and any(t.kind == "plain" for t in tensors)
        suspects = (size, 1.0 / size, size**2, 1.0 / size**2, 2.0, 0.5)
        is_odd = ratio > 1.01 or any(map(is_just, suspects))
        words = f"got {ratio:.3f} x it in every element of every gradient"
        is_certain = is_mean if is_sum else is_odd
        return Deviation(rank, wrong[0].name, words, is_certain, others, ratio, is_sum)
    worst = max(wrong, key=Compared.off)
    words = _why(wrong, size)
    if words:
        return Deviation(rank, worst.name, words, True, others)
    wanted = worst.factor * worst.mean
    share = float((worst.actual - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if share < _VISIBLE:
        return None  # a compressed reduction rounds so much
    much = f"{100 * share:.1f} % of its norm" if share < 10 else f"{share:.0f} times its norm"
    words = f"got one that differs by {much}"
    return Deviation(rank, worst.name, words, False, others)


def _why(wrong: Sequence[Compared], size: int) -> str:
    """Return in words what fits all wrong gradients, or "" where nothing does."""

    def fits(found: Sequence[Tensor | None], also: float = 0.0) -> bool:
        return all(
            f is not None
            and f.shape == t.actual.shape
            and float((t.actual - f.double()).norm()) <= t.allowed + also * float(f.norm())
            for f, t in zip(found, wrong, strict=True)
        )

    if size > 1 and fits([t.own for t in wrong]):
        return _OWN
    if fits([None if t.last is None else t.last * t.factor for t in wrong]):
        return "got that of the last micro-batch alone: the others were cleared before the step"
    # What is left of the step before is what that step was given, clipped where it clips.
    known = [t for t in wrong if t.earlier is not None and t.earlier.shape == t.mean.shape]
    both = [(t.mean + t.earlier, t.actual) for t in known if t.earlier is not None]
    left = [t.mean * t.factor + t.earlier for t in known if t.earlier is not None]
    factor = _factor(both)
    if len(known) == len(wrong) and (
        fits(left, 1e-4) or fits([factor * of for of, _ in both], 1e-4)
    ):
        return "got it with that of the step before added: gradients were not cleared"
    return ""


def _factor(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the one factor by which the first of all pairs are closest to the second, or 1."""
    top = sum(float((f * actual).sum()) for f, actual in pairs)
    bottom = sum(float((f * f).sum()) for f, _ in pairs)
    return top / bottom if bottom else 1.0
