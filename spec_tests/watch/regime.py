"""What ranks are to each other, as far as an optimizer shows it: decided in one place.

A wrapper promises that its parameters are replicas: a deviation is a fault at once. Of "plain"
parameters, which no wrapper has, only a run shows what they are meant to be: a finding about them
is kept as it is, and weighed with what is known when somebody asks, at the latest at the end.
A norm says what it is about (`About`); `_RULES` says in which regimes that is a fault.
A command may start several trainings, one after the other: each is judged by what it showed itself.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from spec_tests.rig.outcomes import Strength
from spec_tests.watch.norm import ABOUT, NORMS, About, Finding

if TYPE_CHECKING:
    from spec_tests.watch.run import Run, Step

NAME_REPLICAS = "name the ranks that are replicas, as --replicas 0,1"
_FIRST = 3  # steps that show whether gradients are exchanged
_OF_WINDOWS = ("forwards", "reduced", "carried", "distinct", "rooted", "is_complete")
_FEW = 64  # elements that collectives may carry, such as a loss that is shown
_NOTHING = "nothing reduces their gradients, so that the ranks train alone"


class Regime(Enum):
    """What ranks are to each other, as far as the parameters of one optimizer show it."""

    WRAPPED = "DDP, FSDP or --replicas says that they are replicas"
    REPLICAS = "they begin equal, or their gradients are made equal, and nothing denies it"
    UNREDUCED = "they are meant to be replicas, and nothing makes them equal: a wrapper is missing"
    EARLY = "so far UNREDUCED, in a run that --steps ended: weights may be averaged later"
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
    About.AVERAGES: {
        Regime.PERIODIC: (_ADVICE, f"{_EXCHANGED}{{exchange}}"),
        Regime.ALONE: (_SILENT, ""),
        Regime.PARTS: (_ADVICE, _PARTS),
    },
    About.PEERS: {Regime.ALONE: (_SILENT, ""), Regime.PARTS: (_ADVICE, _PARTS)},
    About.COUNT: {Regime.ALONE: (_SILENT, ""), Regime.PARTS: (_ADVICE, _PARTS)},
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
        has_reduced: some parameters, of a wrapper as well, were given equal gradients.
        is_divided: a DistributedSampler divides one data set among ranks that exchange nothing.
        has_held: a step moved the weights and left them equal.
        doubt: why plain parameters may be no replicas, or "".
    """

    layout: str = ""
    unequal: set[str] = field(default_factory=set)
    is_quiet: bool = True
    is_reduced: bool = False
    has_reduced: bool = False
    is_divided: bool = False
    has_held: bool = False
    doubt: str = ""


@dataclass
class Regimes:
    """What a run has shown so far, and how findings weigh by it.

    Attributes:
        named: the ranks that the user says are replicas, in groups.
        is_cut: --steps has ended the run.
        doubts: what shows, in any training, that ranks may be no replicas; it stays.
        exchanges: parts of tensors are exchanged, as experts need it that were added to replicas.
    """

    named: list[list[int]] = field(default_factory=list)
    is_cut: bool = False
    doubts: dict[str, None] = field(default_factory=dict)
    exchanges: bool = False
    _seen: dict[Whose, Seen] = field(default_factory=dict)
    _exchanges: dict[tuple[int, str], str] = field(default_factory=dict)  # by training and layout
    _apart: dict[str, Step] = field(default_factory=dict)  # the last step that left weights apart
    _windows: dict[int, dict[str, Any]] = field(default_factory=dict)  # of ranks: the last ones

    def of(self, whose: Whose, kind: str) -> Regime:
        """Return the regime of an optimizer's parameters.

        Args:
            kind: "wrapped"; "added" to a model that was wrapped before; or "plain".
        """
        seen = self._seen.get(whose, Seen())
        exchange = self.exchange(whose)
        if kind == "wrapped" or (self.named and (seen.unequal or exchange)):
            return Regime.PERIODIC if exchange else Regime.WRAPPED
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
        if not seen.is_quiet or seen.has_held or seen.has_reduced:
            return Regime.REPLICAS
        is_early = self.is_cut and not (seen.unequal or self.named)
        return Regime.EARLY if is_early else Regime.UNREDUCED

    def doubt(self, whose: Whose) -> str:
        """Return why an optimizer's plain parameters may be no replicas, or ""."""
        own = self._seen.get(whose, Seen()).doubt
        return "" if self.named else own or next(iter(self.doubts), "")

    def exchange(self, whose: Whose) -> str:
        """Return when ranks exchanged weights that were apart, in words, or "".

        It is one of the same training; or of the same parameters, where a command starts again.
        """
        layout, known = self._seen.get(whose, Seen()).layout, self._exchanges.items()
        return next((step for of, step in known if of[0] == whose[0] or of[1] == layout), "")

    def begins_unequal(self, whose: Whose) -> bool:
        """Return whether plain parameters begin unequal: that is told once."""
        return bool(self._seen.get(whose, Seen()).unequal)

    def is_reduced(self, whose: Whose) -> bool:
        """Return whether plain parameters that begin unequal were given equal gradients."""
        return self._seen.get(whose, Seen()).is_reduced

    def are_apart(self, training: int) -> bool:
        """Return whether ranks go ways of their own for some steps, so that these may be uneven."""
        found = [whose for whose in self._seen if whose[0] == training]
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
        self._windows.clear()

    def end(self, run: Run) -> None:
        """Ranks that end may have averaged their weights after the last step."""
        for layout, last in self._apart.items():
            sizes = Counter(math.prod(last.entries[n]["shape"]) for n, *_ in last.unequal("after"))
            sent = [Counter(run.ranks[r].sizes(e["t"])) for r, e in last.events.items()]
            new = (run.ranks[r].by_wrappers > e["by_wrappers"] for r, e in last.events.items())
            is_sent = all(sizes <= of or of[sum(sizes.elements())] for of in sent)
            if sizes and is_sent and not any(new):  # by no wrapper of another model
                self._exchanges.setdefault((run.training, layout), "after the last step")

    def take(self, step: Step) -> None:
        """Take what a step shows, before it is judged."""
        seen = self._seen.setdefault(step.whose, Seen())
        for rank, event in step.events.items():  # of several optimizers, the first has the window
            if event["computed"] or event["forwards"] or rank not in self._windows:
                self._windows[rank] = {key: event[key] for key in _OF_WINDOWS}
                continue
            window = self._windows[rank]
            window |= {key: window[key] + event[key] for key in ("reduced", "carried")}
            window["is_complete"] &= event["is_complete"]
        found = {r: {**e, **self._windows.get(r, {})} for r, e in step.events.items()}
        step = replace(step, events=found)
        first = step.layout(min(step.events))
        seen.layout = repr([(entry["name"], entry["shape"]) for entry in first])
        events = step.events.values()
        if step.number == 1:
            unequal = step.unequal("before", every=True)
            seen.unequal = {name for name, kind, _ in unequal if kind == "plain"}
            seen.is_reduced = _are_reduced(step, seen.unequal)
        if step.number <= _FIRST:
            seen.is_quiet &= all(
                e["is_complete"] and 2 * e["carried"] < max(e["distinct"], 1) for e in events
            )
        if step.number == _FIRST and seen.is_quiet and seen.unequal:
            seen.is_divided = _divide_one_data_set(step)
        seen.doubt = seen.doubt or _doubt(step)
        is_equal = not any(step.unequal("after", every=True))
        seen.has_reduced |= _have_equal_gradients(step)
        seen.has_held |= is_equal and all(event["moved"] for event in events)
        # What is apart another optimizer may step next: one of the next round, an outer one.
        last = self._apart.get(seen.layout)
        if last is not None and last.optimizer == step.optimizer:
            del self._apart[seen.layout]
        where = step.whose[0], seen.layout
        if last is not None and not self.exchange(step.whose) and _are_exchanged(step, last):
            self._exchanges[where] = f"before step {step.number} at {step.place(min(step.events))}"
        # The optimizer itself made them equal, or all are NaN.
        is_averaged = last is not None and is_equal and any(step.unequal("before"))
        if is_averaged and not any(event["bad"]["grads"] for event in events):
            self._exchanges.setdefault(where, f"in step {step.number}")
        if any(step.unequal("after")):
            self._apart[seen.layout] = step


def _are_reduced(step: Step, names: set[str]) -> bool:
    """Return whether ranks reduce the gradients of some plain parameters: these are replicas."""
    if not any(event["reduced"] >= event["distinct"] > 0 for event in step.events.values()):
        return False
    grads = [{*values.values()} for name, _, values in step.replicas("grads") if name in names]
    return any(len(of) == 1 and None not in of for of in grads)


def _have_equal_gradients(step: Step) -> bool:
    """Return whether collectives may have made a gradient equal on all ranks; zeros say nothing."""
    most = max(event["reduced"] for event in step.events.values())
    sizes = {name: math.prod(entry["shape"]) for name, entry in step.entries.items()}
    grads = ((name, {*values.values()}) for name, _, values in step.replicas("grads"))
    return any(len(of) == 1 and all(of) and sizes[name] <= most for name, of in grads)


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
    talks = any(f["talks"] for event in step.events.values() for f in event["forwards"])
    return "the model communicates in its forward" * (talks and any(plain))


def _are_exchanged(step: Step, last: Step) -> bool:
    """Return whether ranks sent each other the weights that a step left apart, and changed them.

    All ranks change theirs, to those of no rank; or all have those of the one that alone had
    a gradient, or the sum (`dist.reduce`). A part that is exchanged is equal on all ranks then.
    """
    apart = {name: {*values.values()} for name, _, values in last.unequal("after")}
    sizes = {name: math.prod(entry["shape"]) for name, entry in step.entries.items()}
    since = {rank: event["t"] for rank, event in last.events.items()}
    sent = [
        step.run.ranks[rank].carried(since[rank], event["begun"], is_any=True)
        - (event["by_wrappers"] - last.events[rank]["by_wrappers"])
        for rank, event in step.events.items()
    ]
    off = {name for name, _, _ in step.unequal("before")}
    had = {name: sum(g is not None for g in of.values()) for name, _, of in last.replicas("grads")}
    is_rooted = all(event["rooted"] for event in last.events.values())
    if is_rooted or all(had[name] == 1 for name in apart):
        new = set() if off else {*apart}
    else:
        now = {name: {*of.values()} for name, _, of in step.replicas("before") if name in apart}
        new = {name for name in now if now[name].isdisjoint(apart[name])}
        new = new if new == apart.keys() else new - off
    return bool(new) and min(sent) >= sum(sizes[name] for name in new)
