"""What ranks are to each other, as far as an optimizer shows it: decided in one place.

A wrapper promises that its parameters are replicas: a deviation is a fault at once. Of "plain"
parameters, which no wrapper has, only a run shows what they are meant to be: a finding about them
is kept as it is, and weighed with what is known when somebody asks, at the latest at the end.
A norm says what it is about (`About`); `_RULES` says in which regimes that is a fault.
A command may start several trainings, one after the other: each is judged by what it showed itself.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from spec_tests.rig.outcomes import Strength
from spec_tests.watch.norm import ABOUT, NORMS, About, Finding

if TYPE_CHECKING:
    from spec_tests.watch.run import Collective, Run, Step

NAME_REPLICAS = "name the ranks that are replicas, as --replicas 0,1"
_FIRST = 3  # steps that show whether gradients are exchanged
_FEW = 64  # elements that collectives may carry, such as a loss that is shown
_NOTHING = "nothing reduces their gradients, so that the ranks train alone"


class Regime(Enum):
    """What ranks are to each other, as far as the parameters of one optimizer show it."""

    WRAPPED = "DDP, FSDP or --replicas says that they are replicas"
    REPLICAS = "they begin equal, or their gradients are made equal, and nothing denies it"
    UNREDUCED = "they are meant to be replicas, and nothing makes them equal: a wrapper is missing"
    EARLY = "so far UNREDUCED, or DDP is left, in a run that --steps ended: weights may be averaged"
    PERIODIC = "ranks have weights of their own after a step, and exchange these now and then"
    ALONE = "each begins with weights of its own, and no gradient is exchanged: an ensemble"
    UNKNOWN = "each begins with weights of its own, and something else is exchanged"
    PARTS = "they hold, or may hold, different parts of a model"


_PARTS = "none, if ranks hold different parts of the model, or average with some others alone: "
_PARTS += f"{{doubt}}; {NAME_REPLICAS}"
_LATER = f"{_NOTHING}: wrap the model in DDP; right if ranks average their weights later"
_EXCHANGED = "right if ranks are meant to exchange weights in place of gradients, as they did "
_DIVIDED = ", though a DistributedSampler divides one data set among them: wrap the model in DDP"
_SILENT, _ADVICE, _AS_IT_IS = range(3)
Whose = tuple[int, int]  # of the command's trainings the number, of its optimizers the number
# Where nothing is said here, a finding weighs what its norm does, and its likely cause is its own.
_RULES: dict[About, dict[Regime, tuple[int, str]]] = {
    About.EQUAL: {
        Regime.UNREDUCED: (_AS_IT_IS, _LATER),
        Regime.EARLY: (_ADVICE, f"{_LATER}: run it for more --steps, or without the option"),
        Regime.PERIODIC: (_ADVICE, f"{_EXCHANGED}{{exchange}}"),
        Regime.ALONE: (_SILENT, ""),
        Regime.PARTS: (_ADVICE, _PARTS),
    },
    About.PEERS: {Regime.ALONE: (_SILENT, ""), Regime.PARTS: (_ADVICE, _PARTS)},
    About.BEGIN: {
        Regime.UNREDUCED: (_AS_IT_IS, _NOTHING + _DIVIDED),
        Regime.ALONE: (
            _ADVICE,
            f"{_NOTHING}: wrap the model in DDP; right if each rank is to train a model of its own",
        ),
        Regime.UNKNOWN: (_ADVICE, "{likely}, and nothing gives them equal gradients"),
        Regime.PARTS: (_ADVICE, _PARTS),
    },
}


@dataclass
class Seen:
    """What was seen of one optimizer.

    Attributes:
        layout: names and shapes of the parameters, on the first rank.
        unequal: the plain parameters that begin unequal.
        is_quiet: in its first steps no collective carried half as much as its gradients.
        is_reduced: some of those that begin unequal were given equal gradients.
        is_divided: a DistributedSampler divides one data set among ranks that exchange nothing.
        held_at: the last step that made gradients, or weights that it moved, equal; 0 for none.
        left_at: the first step that is seen to make nothing equal; 0 for none.
        has_left: its parameters were trained through DDP, and go around it now.
        doubt: why plain parameters may be no replicas, or "".
        exchange: when ranks exchanged weights that were apart, in words, or "".
    """

    layout: tuple[Any, ...] = ()
    unequal: set[str] = field(default_factory=set)
    is_quiet: bool = True
    is_reduced: bool = False
    is_divided: bool = False
    held_at: int = 0
    left_at: int = 0
    has_left: bool = False
    doubt: str = ""
    exchange: str = ""


@dataclass
class Regimes:
    """What a run has shown so far, and how findings weigh by it.

    Attributes:
        named: the ranks that the user says are replicas, in groups.
        is_cut: --steps has ended the run.
        doubts: what shows, in any training, that ranks may be no replicas; it stays.
        exchanges: parts of tensors are exchanged, as experts need it that were added to replicas.
        seen: what was seen of each optimizer.
    """

    named: list[list[int]] = field(default_factory=list)
    is_cut: bool = False
    doubts: dict[str, None] = field(default_factory=dict)
    exchanges: bool = False
    seen: dict[Whose, Seen] = field(default_factory=lambda: defaultdict(Seen))
    # By the numbers of the parameters, the last step that left them apart.
    _apart: dict[tuple[int, ...], Step] = field(default_factory=dict)
    _through: set[int] = field(default_factory=set)  # numbers of what DDP has made equal

    def of(self, whose: Whose, kind: str) -> Regime:
        """Return the regime of an optimizer's parameters.

        Args:
            kind: "wrapped"; "added" to a model that was wrapped before; or "plain".
        """
        seen, exchange = self.seen[whose], self.exchange(whose)
        if kind == "wrapped" or (self.named and (seen.unequal or exchange)):
            is_early = self.is_cut and seen.has_left
            return Regime.PERIODIC if exchange else Regime.EARLY if is_early else Regime.WRAPPED
        if seen.is_reduced:
            return Regime.REPLICAS
        if self.doubt(whose):
            return Regime.PARTS
        if kind == "added" and not self.exchanges:
            return Regime.PERIODIC if exchange else Regime.WRAPPED
        if seen.unequal and not seen.is_divided:
            return Regime.ALONE if seen.is_quiet else Regime.UNKNOWN
        if exchange:
            return Regime.PERIODIC
        is_early = self.is_cut and not (seen.unequal or self.named)
        if is_early and seen.left_at > seen.held_at and (seen.is_quiet or seen.held_at):
            return Regime.EARLY
        return Regime.UNREDUCED if seen.is_quiet and not seen.held_at else Regime.REPLICAS

    def doubt(self, whose: Whose) -> str:
        """Return why an optimizer's plain parameters may be no replicas, or ""."""
        return "" if self.named else self.seen[whose].doubt or next(iter(self.doubts), "")

    def exchange(self, whose: Whose) -> str:
        """Return when weights that were apart were exchanged, in words, or "".

        In the same training; or those of the same layout, where a command starts again.
        """
        layout, known = self.seen[whose].layout, self.seen.items()
        own = (s.exchange for (n, _), s in known if n == whose[0] or s.layout == layout)
        return next(filter(None, own), "")

    def are_apart(self, training: int) -> bool:
        """Return whether ranks go ways of their own for some steps, so that these may be uneven."""
        found = [whose for whose in self.seen if whose[0] == training]
        return any(self.exchange(of) or self.of(of, "plain") is Regime.ALONE for of in found)

    def weigh(self, finding: Finding) -> Finding | None:
        """Return a finding as it weighs by what is known now; None where it is no fault."""
        about = ABOUT[finding.norm]
        if finding.optimizer is None:
            return finding
        regime = self.of(finding.optimizer, finding.kind)
        weight, likely = _RULES.get(about, {}).get(regime, (_AS_IT_IS, ""))
        is_should = NORMS[finding.norm].strength is not Strength.MUST
        if weight == _SILENT or (weight == _ADVICE and is_should):
            return None
        known = {"doubt": self.doubt(finding.optimizer)}
        known["exchange"] = self.exchange(finding.optimizer)
        words = likely.format(**known, likely=finding.likely) or finding.likely
        return replace(finding, likely=words, is_advice=finding.is_advice or weight == _ADVICE)

    # ------------------------------------------------------------------------------- what is seen

    def begin_anew(self) -> None:
        """The command starts ranks again: no exchange is between two trainings."""
        self._apart.clear()
        self._through.clear()

    def end(self, run: Run) -> None:
        """Take what became of weights after the last step, as a model shows when it goes."""
        for last in self._apart.values():
            events = {}
            for rank, event in last.events.items():
                own, layout = run.ranks[rank], last.layout(rank)
                pairs = zip(layout, event["after"], strict=True)
                gone = [own.gone.get(entry["number"], value) for entry, value in pairs]
                now = {"before": gone, "begun": math.inf, "by_wrappers": own.by_wrappers}
                events[rank] = {**event, **now, "is_complete": not own.missed}
            step, apart = replace(last, events=events), {name for name, *_ in last.unequal("after")}
            # The averages may be elsewhere, to be saved.
            if _are_exchanged(step, last) or _are_sent(step, last, apart, is_just=True):
                seen = self.seen[last.whose]
                seen.exchange = seen.exchange or "after the last step"

    def take(self, step: Step) -> None:
        """Take what a step shows, before it is judged."""
        seen = self.seen[step.whose]
        first, events = step.layout(min(step.events)), step.events.values()
        seen.layout = tuple((entry["name"], *entry["shape"]) for entry in first)
        grads = {name: {*values.values()} for name, _, values in step.replicas("grads")}
        # Gradients of zeros say nothing.
        equal = {name for name, of in grads.items() if len(of) == 1 and all(of)}
        is_complete = all(event["is_complete"] for event in events)
        if step.number == 1:
            unequal = step.unequal("before", every=True)
            seen.unequal = {name for name, kind, _ in unequal if kind == "plain"}
            is_reduced = any(event["reduced"] >= event["distinct"] > 0 for event in events)
            seen.is_reduced = is_reduced and not equal.isdisjoint(seen.unequal)
        if step.number <= _FIRST:
            is_quiet = all(2 * event["carried"] < max(event["distinct"], 1) for event in events)
            seen.is_quiet &= is_complete and is_quiet
        if step.number == _FIRST and seen.is_quiet and seen.unequal:
            seen.is_divided = _divide_one_data_set(step)
        seen.doubt = seen.doubt or _doubt(step)
        is_equal = not any(step.unequal("after", every=True))
        most = max(event["reduced"] for event in events)
        is_moved = is_equal and all(event["moved"] for event in events)
        if is_moved or any(step.sizes[name] <= most for name in equal):
            seen.held_at = step.number
        elif is_complete or all(len(of) > 1 for of in grads.values()):
            seen.left_at = seen.left_at or step.number
        through = [f["syncs"] is not None for event in events for f in event["forwards"]]
        if through:
            seen.has_left = not (any(through) or self._through.isdisjoint(step.numbers))
        self._through.update(step.numbers if any(through) and is_moved else ())
        is_bad = any(event["bad"]["grads"] for event in events)  # NaN is equal to NaN, in bytes
        self._take_exchange(step, is_by_optimizer=is_moved and not is_bad)

    def _take_exchange(self, step: Step, *, is_by_optimizer: bool) -> None:
        seen, last = self.seen[step.whose], self._apart.pop(step.numbers, None)
        last = last or self._continued(step)
        if last is None or self.exchange(step.whose):
            pass
        elif _are_exchanged(step, last):
            seen.exchange = f"before step {step.number} at {step.place(min(step.events))}"
        elif is_by_optimizer and any(step.unequal("before")):
            seen.exchange = f"in step {step.number}"
        if any(step.unequal("after")):
            self._apart[step.numbers] = step

    def _continued(self, step: Step) -> Step | None:
        """Return the step that left weights apart which a new model may go on with, if any."""
        layout, first = self.seen[step.whose].layout, min(step.events)
        for numbers, last in self._apart.items():
            is_new = min(step.numbers, default=0) >= last.events[first]["met"]
            if is_new and self.seen[last.whose].layout == layout:
                return self._apart.pop(numbers)
        return None


def _divide_one_data_set(step: Step) -> bool:
    """Return whether a DistributedSampler gives each rank its part, and nothing is exchanged."""
    events = step.events.values()
    splits = [split for e in events if e["feed"] and (split := e["feed"]["split"])]
    parts = {split["part"] for split in splits if split["parts"] == len(events)}
    is_silent = all(event["carried"] <= _FEW for event in events)
    return len(parts) == len(events) and is_silent


def _doubt(step: Step) -> str:
    layouts = map(step.layout, step.events)
    plain = [[(e["name"], e["shape"]) for e in of if e["kind"] == "plain"] for of in layouts]
    if any(of != plain[0] for of in plain):
        return "the ranks' optimizers hold different parameters"
    talks = any(event["talks"] for event in step.events.values())
    return "the model communicates in its forward" * (talks and any(plain))


def _are_exchanged(step: Step, last: Step) -> bool:
    """Return whether ranks sent each other the weights that a step left apart, and changed them.

    All ranks change theirs, to those of no rank; or all have those of the one that alone had
    a gradient, or the sum (`dist.reduce`). A part that is exchanged is equal on all ranks then, or
    just that part was sent.
    """
    apart = {name: {*values.values()} for name, _, values in last.unequal("after")}
    off = {name for name, _, _ in step.unequal("before")}
    had = {name: sum(g is not None for g in of.values()) for name, _, of in last.replicas("grads")}
    is_rooted = all(event["rooted"] for event in last.events.values())
    if is_rooted or all(had[name] == 1 for name in apart):
        new = set() if off else {*apart}
    else:
        now = {name: {*of.values()} for name, _, of in step.replicas("before") if name in apart}
        new = {name for name in now if now[name].isdisjoint(apart[name])}
    part = new if new == apart.keys() else new - off
    return _are_sent(step, last, new, is_just=True) or _are_sent(step, last, part)


def _are_sent(step: Step, last: Step, names: set[str], *, is_just: bool = False) -> bool:
    """Return whether each rank sent as many elements as some weights have between two steps.

    Args:
        is_just: it sent each by itself, or all in one tensor, beside which buffers may be.
    """
    sizes = Counter(map(step.sizes.__getitem__, names))
    total = sum(sizes.elements())
    for rank, event in step.events.items():
        sent, by_ddp = _between(step, last, rank)
        bare = [each for each in sent if "broadcast" not in each.name]
        # A state that is sent as an object has four bytes for an element.
        own = Counter(each.numel // (4 if "Byte" in each.dtypes else 1) for each in bare)
        if not event["is_complete"] and 2 * (own & sizes).total() > own.total():
            continue  # so many tensors that the recorder has lost some
        if is_just:
            is_one = any(0 <= size - total <= total / 4 for size in own)
            if not (is_one or sizes <= own):
                return False
            sent = bare
        elif step.numbers != last.numbers:  # not known to be the same weights: they came in objects
            sent = [each for each in sent if "Byte" in each.dtypes]
        if sum(each.numel for each in sent) < total + by_ddp:
            return False
    return bool(names)


def _between(step: Step, last: Step, rank: int) -> tuple[list[Collective], int]:
    """Return what a rank sent between two steps, and how many elements of it DDP reduced."""
    event, before = step.events[rank], last.events[rank]
    until, by_ddp = event["begun"], event["by_wrappers"] - before["by_wrappers"]
    begins = [f["t"] for f in event["forwards"] if f["first"] >= before["met"]]
    if begins and step.numbers != last.numbers:  # behind the first forward gradients are sent
        until, by_ddp = begins[0], by_ddp - event["by_ddp"]
    return step.run.ranks[rank].span(before["t"], until), by_ddp
