"""From findings to a verdict: one cause for each fault, its effects folded in, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_tests.rig.report.templates import of_texts
from spec_tests.rig.report.text import several
from spec_tests.watch.norm import NORMS, Finding, is_must

# Causes before effects: a finding follows from one of those named beside it that stands above it.
_FOLLOWS = {
    "watch.scaler.unscaled": (),
    "watch.numbers.finite": ("watch.scaler.unscaled",),
    "watch.samples.one-split": (),
    "watch.samples.workers-divide": (),
    "watch.batches.distinct": ("watch.samples.",),
    "watch.batches.not-repeated": ("watch.batches.distinct", "watch.samples."),
    "watch.samples.divided": ("watch.batches.distinct", "watch.samples.one-split"),
    "watch.samples.shuffled-anew": (),
    "watch.replicas.begin-equal": (),
    "watch.steps.same": ("watch.collectives.match",),
    "watch.collectives.match": ("watch.steps.same",),
    "watch.optimizer.holds-the-model": (),
    "watch.reduction.no-sync": (),
    "watch.reduction.once": ("watch.reduction.no-sync",),
    "watch.reduction.through-the-wrapper": ("watch.reduction.no-sync",),
    "watch.weights.current": (),
    "watch.parameters.stay-tied": (),
    "watch.optimizer.same-options": ("watch.steps.same",),
    "watch.optimizer.resumed": ("watch.optimizer.same-options",),
    "watch.clip.norm": ("watch.steps.same", "watch.replicas.begin-equal"),
    "watch.gradients.equal": (
        *("watch.replicas.begin-equal", "watch.steps.same", "watch.collectives.match"),
        *("watch.reduction.", "watch.weights.current"),
        *("watch.optimizer.same-options", "watch.clip.norm"),
    ),
    "watch.optimizer.moves": ("watch.optimizer.holds-the-model", "watch.scaler.unscaled"),
    "watch.optimizer.update": ("watch.optimizer.moves",),
    "watch.optimizer.precision": ("watch.optimizer.moves",),
    "watch.replay.gradients": (
        *("watch.replicas.begin-equal", "watch.steps.same", "watch.optimizer.holds-the-model"),
        *("watch.reduction.", "watch.weights.current", "watch.parameters.stay-tied"),
        *("watch.clip.norm", "watch.gradients.equal", "watch.optimizer.same-options"),
    ),
    "watch.replicas.equal": ("watch.",),
    "watch.replicas.unheld": ("watch.replicas.", "watch.gradients.equal", "watch.steps."),
    "watch.run.goes-on": ("watch.collectives.match", "watch.steps.same"),
    "watch.run.ends": ("watch.collectives.match", "watch.steps.same", "watch.run.goes-on"),
    "watch.steps.as-many": ("watch.steps.same", "watch.run.goes-on", "watch.run.ends"),
    "watch.reduction.saved": ("watch.reduction.",),
    "watch.reduction.mean": ("watch.reduction.once", "watch.loss.weights"),
    "watch.replicas.buffers": ("watch.batches.distinct", "watch.replicas.begin-equal"),
    "watch.dropout.differs": ("watch.batches.distinct",),
    "watch.samples.draws-differ": ("watch.batches.distinct", "watch.dropout.differs"),
    "watch.loss.weights": (),
    "watch.loss.token-counts": (),
    "watch.schedule.per-update": (),
}
ORDER = list(_FOLLOWS)
# What the other ranks of one that raised are seen to do; some seconds before, where it hung first.
_AT_THE_END = ("watch.collectives.match", "watch.run.goes-on", "watch.steps.as-many")
# NaN is unequal to itself, in bytes too, and whatever it is multiplied by.
_OF_NUMBERS = (
    *("watch.weights.current", "watch.gradients.equal", "watch.replicas.equal", "watch.clip.norm"),
    *("watch.optimizer.moves", "watch.optimizer.precision", "watch.replay.gradients"),
    "watch.optimizer.update",
    *("watch.replicas.buffers", "watch.loss.token-counts", "watch.loss.weights"),
)


@dataclass
class Cause:
    """A finding that nothing else explains, the norms that broke with it, and in how many steps."""

    finding: Finding
    effects: list[str]
    times: int = 1


@dataclass
class Verdict:
    """What the agent has to say at the end.

    Attributes:
        status: 0 nothing found; 1 a MUST does not hold; 2 nothing could be judged.
        unseen: what could not be checked, in words.
        replayed: which step was computed again, in words.
        compared: how the run differs from another one, in words.
        is_compared: whether all ranks took a step, so that these could be compared.
    """

    status: int
    causes: list[Cause]
    steps: int
    ranks: int
    unseen: list[str]
    replayed: str = ""
    compared: str = ""
    is_compared: bool = True


def causes_of(findings: Sequence[Finding]) -> list[Cause]:
    """Return causes, MUSTs first, each with the ids of the findings that follow from it.

    A norm that fails again in later steps is one finding, and counted.
    """
    first: dict[str, Finding] = {}
    times: dict[str, set[int]] = {}
    for finding in findings:
        kept = first.setdefault(finding.norm, finding)
        if kept.is_advice and not finding.is_advice:
            first[finding.norm] = finding
        times.setdefault(finding.norm, set()).add(finding.step)
    causes = {id: Cause(first[id], [], len(times[id])) for id in ORDER if id in first}
    explained = set()
    for id in causes:
        cause = next((other for other in causes if _explains(first[other], first[id])), None)
        if cause is not None:
            causes[cause].effects.append(id)
            explained.add(id)
    rest = [cause for id, cause in causes.items() if id not in explained]
    return sorted(rest, key=lambda c: (not c.finding.is_first, not is_must(c.finding)))


def _explains(cause: Finding, effect: Finding) -> bool:
    """Return whether an effect, found no earlier, follows from a cause that weighs as much."""
    if cause.is_first or effect.is_first:
        return not effect.is_first and effect.norm in _AT_THE_END and cause.at - 3 < effect.at
    if cause.norm == "watch.numbers.finite" and effect.norm in _OF_NUMBERS:
        return cause.step <= effect.step and (is_must(cause) or not is_must(effect))
    is_above = ORDER.index(cause.norm) < ORDER.index(effect.norm)
    is_early = not effect.step or cause.step <= effect.step
    weighs = is_must(cause) or not is_must(effect)
    return is_above and is_early and weighs and cause.norm.startswith(_FOLLOWS[effect.norm])


def render(verdict: Verdict) -> str:
    """Return the screen, at most 40 lines."""
    template = of_texts(Path(__file__).parent).get_template("screen.txt.jinja")
    words = {"headline": headline(verdict), "norms": NORMS, "is_must": is_must}
    return template.render(verdict=verdict, **words).removesuffix("\n")


def headline(verdict: Verdict) -> str:
    """Return what was found, in how much of a run, and how many findings are advice."""
    if not verdict.steps and verdict.status != 1:
        return "nothing was judged"
    musts = sum(is_must(cause.finding) for cause in verdict.causes)
    advice = len(verdict.causes) - musts
    # With status 1 it is advice under --strict, or another run that parts from this one.
    found = ("nothing wrong", "no MUST is broken")[verdict.status]
    found = found if verdict.is_compared else "no step was compared"
    found = several(musts, "cause") if musts else found
    seen = f"{several(verdict.steps, 'step')} of {several(verdict.ranks, 'rank')}"
    told = f"; {several(advice, 'finding')} {'is' if advice == 1 else 'are'} advice" * bool(advice)
    return f"{found} in {seen}{verdict.replayed}{told}"
