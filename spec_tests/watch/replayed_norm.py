"""The norm of a step that was computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_tests.watch.norm import Finding, rank_norm, step_norm
from spec_tests.watch.run import NAME_REPLICAS, Event, Step

if TYPE_CHECKING:
    from spec_tests.watch.replayed import Deviation

_CLOSE = 1e-3


@step_norm(
    "watch.replay.gradients", source="Li et al. 2020, section 3.2; ZeRO, Rajbhandari et al. 2020"
)
def replayed_gradients(step: Step) -> Iterator[Finding]:
    """The optimizer MUST be given the mean over ranks of what the outputs' gradients demand."""
    replays = {rank: event["replay"] for rank, event in step.events.items() if event.get("replay")}
    if not replays:
        return
    why = _why_not(step, replays)
    found = None if why else _first_deviation(step, replays)
    if found is not None and _are_reduced_in_the_step(step, found.name):
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
    is_part_wrapped = any(entry["kind"] == "ddp" for entry in step.layout(found.rank))
    if found.is_own and is_part_wrapped and step.optimizer in step.run.unequal_starts:
        yield _unwrapped(step, found)
    yield _finding(step, found)


def _unwrapped(step: Step, found: Deviation) -> Finding:
    """Parameters that began unequal and are not reduced, in an optimizer where others are."""
    said = step.finding(
        found.rank,
        "expected the weights of the other ranks before the first step and reduced gradients, got "
        f"others and its own ({found.others + 1} tensors)",
        found.name,
        likely="its model is not wrapped, while that of other parameters of the optimizer is",
    )
    return replace(said, norm="watch.replicas.begin-equal")


@rank_norm("watch.reduction.mean", source="Li et al. 2020, section 3.2")
def summed_by_hand(step: Step, rank: int, event: Event) -> Finding | None:
    """Gradients that a script sums over the ranks SHOULD be divided by their number."""
    given = math.sqrt(sum(norm**2 for norm in event["norms"] if norm))
    sums = (event["sums"] or 0.0) * _coefficient(event)
    of_losses = _weight(event) * step.run.world
    # Where the loss is not known, whoever asks for a step's values is told what is known.
    is_refused = "reason" in (event["replay"] or {}) and abs(of_losses - 1) > _CLOSE
    is_asked = is_refused or (_is_mean(step) and not event["replay"])
    if step.doubt or not sums or not is_asked or abs(given - sums) >= _CLOSE * sums:
        return None
    right = "; right if the loss is divided by their number" * (not _is_mean(step))
    return step.finding(
        rank,
        "expected the mean over ranks of the gradients, got their sum in the step, as all_reduce "
        "left it",
        likely="the sums are not divided by the number of ranks" + right,
    )


def _why_not(step: Step, replays: dict[int, Any]) -> str:
    """Return why a step cannot be judged, or ""."""
    if step.is_alone:
        return "each rank trains weights of its own, and nothing reduces their gradients"
    if step.doubt:
        return f"{step.doubt}; {NAME_REPLICAS}"
    reasons: dict[str, list[int]] = {}
    for rank, of in replays.items():
        if "reason" in of:
            reasons.setdefault(of["reason"], []).append(rank)
    said = [f"rank {', '.join(map(str, ranks))}: {reason}" for reason, ranks in reasons.items()]
    if said or len(replays) < len(step.events):
        return "; ".join(said) or "not all ranks took it"
    is_here = all(Path(of["path"]).is_file() for of in replays.values())
    return "" if is_here else "ranks on other nodes wrote to their own disks"


def _first_deviation(step: Step, replays: dict[int, Any]) -> Deviation | None:
    from spec_tests.watch import replayed  # torch is needed here alone

    batches = max(of["batches"] for of in replays.values())
    for group in step.run.groups or [list(replays)]:
        files = [Path(replays[rank]["path"]) for rank in group]
        coefficients = [_coefficient(step.events[rank]) for rank in group]
        for found in replayed.judge(files, batches, coefficients, _is_mean(step)):
            return replace(found, rank=group[found.rank])
    return None


def _are_reduced_in_the_step(step: Step, name: str) -> bool:
    """Return whether ranks step with gradients of their own and have the same weights after it."""
    grads, before, after = (
        [[*of.values()] for n, _, of in step.replicas(key) if n == name]
        for key in ("grads", "before", "after")
    )
    differ = any(of[0] != each for of in grads for each in of)
    return differ and bool(after) and all(of == of[:1] * len(of) for of in (*before, *after))


def _finding(step: Step, found: Deviation) -> Finding:
    others = f" ({found.others + 1} tensors)" if found.others else ""
    likely = "a loss that uses parameters directly, or gradients that are changed by hand after "
    likely += "the backward: then this is right"
    if found.is_sum:
        likely = "gradients were summed over the ranks and not divided; right if the loss was"
    return step.finding(
        found.rank,
        f"expected the mean over ranks of the step's own gradients, {found.words}{others}",
        found.name,
        likely="" if found.is_certain else likely,
        is_advice=not found.is_certain,
    )


def _is_mean(step: Step) -> bool:
    """Return whether each rank's loss is a mean over its own batch, as far as losses were seen."""
    for event in step.events.values():
        if any(loss["of"] == "mean()" for loss in event["losses"]):
            return False  # what it is a mean of may be divided already
        if abs(_weight(event) - 1) > _CLOSE:
            return False
    return True


def _weight(event: dict[str, Any]) -> float:
    """Return what the losses of a rank that were seen weigh together."""
    return float(sum(loss["weight"] or 0.0 for loss in event["losses"]) / event["scale"])


def _coefficient(event: dict[str, Any]) -> float:
    """Return what clipping and unscaling multiplied the gradients of a step by."""
    clip, scale = event["clip"], event["scale"]
    clipped = clip["clipped"] / clip["norm"] if clip and clip["norm"] else 1.0
    return float(clipped / scale)
