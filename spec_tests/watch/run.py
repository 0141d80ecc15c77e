"""What the agent knows of a run: events of the ranks, put together step by step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spec_tests.watch.norm import Finding
from spec_tests.watch.regime import Regimes

Event = dict[str, Any]
REDUCTIONS = ("all_reduce", "allreduce", "reduce_scatter", "reduce")
_KEPT, _KEPT_STEPS = 50_000, 1_000  # of the timeline; steps that not all ranks have taken
_UNSEEN = (
    "a step without a training forward that was seen: batches, random states and losses were not "
    "checked (a model compiled in place, called through torch.func, in a closure or in another "
    "thread, or weights that no module has)"
)
_BUSY_SECONDS = 0.1  # of the processor, since a rank was last seen to go on
_EXCHANGES = ("all_to_all", "alltoall", "scatter")
_FLOATS = {"Float", "Double", "Half", "BFloat16"}


class Collective(NamedTuple):
    """One entry of a rank's flight recorder."""

    time: int
    group: str
    number: int
    name: str
    sizes: Sequence[Sequence[int]]
    dtypes: Sequence[str]

    @property
    def numel(self) -> int:
        """Elements that the rank handed in."""
        return sum(map(math.prod, self.sizes))

    @property
    def is_reduction(self) -> bool:
        """Whether it adds floating-point numbers up."""
        return self.name.lstrip("_").startswith(REDUCTIONS) and bool(_FLOATS & {*self.dtypes})

    def __str__(self) -> str:
        sizes = "+".join("x".join(map(str, size)) or "scalar" for size in self.sizes)
        return f"{self.name}({sizes})" if sizes else self.name


@dataclass
class Rank:
    """One rank: what it said so far."""

    rank: int
    world: int | None = None
    layouts: dict[int, list[Event]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    forwards: int = 0
    window: deque[Collective] = field(default_factory=lambda: deque(maxlen=4096))
    issued: int = 0
    missed: int = 0
    read_until: int = 0
    stepped_at: int = 0
    by_wrappers: int = 0  # elements that DDP was to reduce in all steps so far
    # After one backward, several optimizers share what was sent in these times, and seen.
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    shared: Event = field(default_factory=dict)
    gone: dict[int, Any] = field(default_factory=dict)  # weights as they were last, by number
    place: str = ""
    waits: bool = False
    cpu: float = 0.0
    still_since: float | None = None
    still_beats: int = 0
    pending: Collective | None = None  # the oldest that has not ended
    handling: Event | None = None  # an exception, inside of `except` or `finally`
    generations: dict[str, tuple[int, int]] = field(default_factory=dict)
    raised: Event | None = None
    batches: int | None = None  # of a pass over the loader that feeds it
    is_open: bool = True
    has_ended: bool = False
    is_done: bool = False  # it was ended, after --steps
    _state: tuple[Any, ...] = ()

    def beat(self, event: Event, now: float) -> None:
        """Take a heartbeat: a rank is still if it waits at one place and uses no processor."""
        self.place, self.waits = event["place"], event["waits"]
        self.pending = Collective(0, *event["pending"]) if event["pending"] else None
        if event["error"] is None or self.handling is None:
            self.handling = None if event["error"] is None else {**event["error"], "t": event["t"]}
        state = (self.place, self.waits, self.issued, sum(self.steps.values()))
        # On a machine that is too busy, a rank that imports or computes gets little at a time.
        busy = event["cpu"] - self.cpu > _BUSY_SECONDS
        self.still_beats += 1
        if state != self._state or busy:
            self._state, self.still_since, self.cpu = state, None, event["cpu"]
        elif self.still_since is None:
            self.still_since, self.still_beats = now, 0

    @property
    def is_alive(self) -> bool:
        """Whether it may still take part in a collective."""
        return self.is_open and not self.has_ended and self.raised is None

    @property
    def at(self) -> str:
        """The line where it was last seen."""
        return self.place or "an unknown line"

    @property
    def progress(self) -> tuple[int, ...]:
        """How far it has come."""
        has_ended = self.has_ended and self.raised is None
        return (self.issued, sum(self.steps.values()), has_ended)

    def span(self, since: int, until: float) -> list[Collective]:
        """Return the collectives of a span of time."""
        return [each for each in self.window if since <= each.time < until]


@dataclass(frozen=True)
class Step:
    """One step of one optimizer, as all ranks took it."""

    run: Run
    optimizer: int
    number: int
    events: dict[int, Event]

    def layout(self, rank: int) -> list[Event]:
        """Return the descriptions of the optimizer's parameters on a rank."""
        return self.events[rank]["layout"]

    def place(self, rank: int) -> str:
        """Return the script's line that took the step."""
        return str(self.events[rank]["place"])

    def finding(
        self,
        rank: int | None,
        text: str,
        tensor: str = "",
        *,
        place: str | None = None,
        likely: str = "",
        is_advice: bool = False,
        is_certain: bool = False,
    ) -> Finding:
        """Return what a check saw in this step: of one rank, or with None of all.

        Args:
            text: what was expected and what came; the rank and the tensor are put before it.
            place: the script's line; that which took the step, where it is left out.
            is_certain: a fault whatever ranks are to each other.
        """
        if rank is not None:
            text = f"rank {rank}{f', {tensor!r}' if tensor else ''}: {text}"
            place = self.place(rank) if place is None else place
        found = Finding("", text, self.number, rank, tensor, place or "", likely, is_advice)
        whose = None if is_certain else self.whose
        return replace(found, optimizer=whose, kind=self.kind(tensor))

    @property
    def whose(self) -> tuple[int, int]:
        """The numbers of the training and of the optimizer: its regime is kept by these."""
        return self.run.training, self.optimizer

    @property
    def entries(self) -> dict[str, Event]:
        """The description of each parameter, by the first rank whose optimizer holds it."""
        return {e["name"]: e for rank in reversed(self.events) for e in self.layout(rank)}

    @property
    def sizes(self) -> dict[str, int]:
        """The elements of each parameter."""
        return {name: math.prod(entry["shape"]) for name, entry in self.entries.items()}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The parameters of the optimizer, as the first rank numbers all that it has."""
        return tuple(entry["number"] for entry in self.layout(min(self.events)))

    def kind(self, tensor: str = "") -> str:
        """Return the kind of a tensor, or of all, as `Regimes.of` takes it."""
        every = self.entries
        names = {tensor} if tensor in every else {*every}
        if any(every[name]["kind"] != "plain" for name in names):
            return "wrapped"
        trained = {
            entry["name"]
            for rank, event in self.events.items()
            for entry, grad in zip(self.layout(rank), event["grads"], strict=True)
            if entry["is_added"] and grad is not None
        }
        return "plain" if names.isdisjoint(trained) else "added"

    def unwrapped(self, name: str) -> str:
        """Return in words that others of an optimizer's parameters have a wrapper; or ""."""
        every = self.entries
        others = sum(entry["kind"] == "ddp" for entry in every.values())
        is_plain = name in every and every[name]["kind"] == "plain"
        if name in every and every[name]["is_added"]:
            words = "the parameter was added after the model was wrapped, whose wrapper neither "
            return words + "broadcasts nor reduces it"
        words = f"its model is not wrapped, while that of {others} other parameters of the "
        return (words + "optimizer is") * (is_plain and others > 0)

    def replicas(self, key: str) -> Iterator[tuple[str, str, dict[int, Any]]]:
        """Yield name, kind and rank to value of each tensor that several ranks hold alike.

        Args:
            key: "grads", "before" or "after".
        """
        found: dict[tuple[Any, ...], dict[int, Any]] = {}
        for rank, event in self.events.items():
            for entry, value in zip(self.layout(rank), event[key], strict=True):
                is_plain = entry["kind"] == "plain"
                group = self.run.group_of(rank) if is_plain else 0
                if entry["kind"] not in ("flat", "local", "tensor") and group is not None:
                    same = (
                        entry["name"],
                        entry["kind"],
                        group,
                        *map(tuple, (entry["shape"], entry["ranks"], entry["shard"])),
                    )
                    found.setdefault(same, {})[rank] = value
        for (name, kind, *_), values in found.items():
            if len(values) > 1:
                yield name, kind, values

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each rank that has data of its own, beside the first rank of its peers."""
        for first, *others in self.peers():
            yield from ((first, rank) for rank in others)

    def unequal(self, key: str, *, every: bool = False) -> Iterator[tuple[str, str, Any]]:
        """Yield name, kind, and all values by rank of replicated tensors that differ.

        Args:
            every: also plain ones of an optimizer whose plain ones begin unequal: told once.
        """
        told = set() if every else self.run.regimes.seen[self.whose].unequal
        for name, kind, values in self.replicas(key):
            if len({*values.values()}) > 1 and not (told and kind == "plain"):
                yield name, kind, values

    def peers(self) -> list[list[int]]:
        """Return the ranks that train on different data, in groups; [] where that is unknown."""
        named = self.run.regimes.named
        if named:
            found = ([r for r in group if r in self.events] for group in named)
            return [group for group in found if group]
        groups: dict[tuple[int, ...], set[int]] = {}
        for rank in self.events:
            entries = self.layout(rank)
            if any(len(e["shard"]) > 1 or e["kind"] == "tensor" for e in entries):
                return []  # tensor parallelism, perhaps beside others
            ranks = next((tuple(e["ranks"]) for e in entries if e["ranks"]), tuple(self.events))
            groups.setdefault(ranks, set()).add(rank)
        return [sorted(members) for members in groups.values()]


@dataclass
class Run:
    """All ranks, and the steps that all of them have taken.

    Attributes:
        training: which one of the command it is: one ends when ranks are started again.
    """

    training: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what could not be seen
    replayed: str = ""
    is_joined: bool = False  # a script used `Join`: uneven inputs are meant
    regimes: Regimes = field(default_factory=Regimes)
    seen: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)
    looped: bool = False
    usual: dict[int, set[int]] = field(default_factory=dict)  # forwards of a step, by optimizer
    repeated: dict[tuple[int, int], set[Any]] = field(default_factory=dict)  # by rank and epoch
    unheld: dict[tuple[int, str], bool] = field(default_factory=dict)  # whether equal at first
    passes: dict[int, dict[int, Any]] = field(default_factory=dict)  # of a rank: their samples
    weights: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # of first losses
    records: list[Event] = field(default_factory=list)  # what a later run is compared with
    timeline: deque[list[float]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _waiting: dict[tuple[int, int], dict[int, Event]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks, as they said it or as many as there are."""
        return max((r.world or 0 for r in self.ranks.values()), default=0) or len(self.ranks)

    def group_of(self, rank: int) -> int | None:
        """Return which group of replicas a rank is in; None if groups are named and it in none."""
        named = self.regimes.named
        found = [index for index, group in enumerate(named) if rank in group]
        return found[0] if found else None if named else 0

    def take_step(self, rank: Rank, event: Event) -> Step | None:
        """Take one rank's step; returns the step once all ranks have taken it."""
        optimizer, number = event["optimizer"], event["step"]
        rank.steps[optimizer] = number
        is_unseen = not event["forwards"] and not event["joined"]
        if is_unseen and not optimizer and _UNSEEN not in self.notes:
            self.notes.append(_UNSEEN)
        rank.forwards += len(event["forwards"])
        event["seen"] = rank.forwards
        event["loss"] = None if event["loss"] is None else event["loss"] / event["scale"]
        if event["messages"]:
            self.regimes.doubts["the ranks send each other point-to-point messages"] = None
        event["talks"] = any(forward["talks"] for forward in event["forwards"])
        if event["computed"] or event["forwards"] or optimizer in rank.spans or not rank.spans:
            rank.spans, rank.shared = {}, {key: event[key] for key in ("talks", "distinct")}
        event |= rank.shared
        rank.spans[optimizer] = rank.stepped_at, event["begun"]
        sent = [each for of in rank.spans.values() for each in rank.span(*of)]
        found = [each for each in sent if each.is_reduction]
        names, reduced = {each.name for each in found}, [each.numel for each in found]
        event["reduced"] = sum(reduced) - sum(event["others"])
        event["largest"] = max(reduced, default=0)
        event["carried"] = sum(each.numel for each in sent if _FLOATS & {*each.dtypes})
        rank.by_wrappers += event["by_ddp"]
        event["by_wrappers"] = rank.by_wrappers
        event["rooted"] = names == {"reduce"} and event["reduced"] >= event["distinct"]
        event["is_complete"] = rank.read_until >= event["begun"] and not rank.missed
        event["layout"] = rank.layouts[optimizer]
        rank.batches = (event["feed"] or {}).get("batches")
        rank.place = event["place"]  # newer than that of the last heartbeat
        rank.stepped_at, rank.missed, rank.still_since = event["t"], 0, None
        self.timeline.append([rank.rank, number, event["begun"] / 1e9, event["t"] / 1e9])
        events = self._waiting.setdefault((optimizer, number), {})
        if len(self._waiting) > _KEPT_STEPS:  # a rank that never steps, as in a pipeline
            del self._waiting[next(iter(self._waiting))]
        events[rank.rank] = event
        if len(events) < self.world:
            return None
        del self._waiting[optimizer, number]
        return Step(self, optimizer, number, dict(sorted(events.items())))

    def take_collectives(self, rank: Rank, event: Event) -> list[Collective]:
        """Take what a rank's flight recorder held; returns it."""
        found = []
        for when, group, number, name, sizes, dtypes in event["items"]:
            # A group of the same name that was made again begins to count anew.
            generation, last = rank.generations.get(group, (0, 0))
            generation += number < last or number == last == 1
            rank.generations[group] = (generation, number)
            label = f"{group}'{generation}" if generation else group
            found.append(Collective(when, label, number, name, sizes, dtypes))
        rank.window += found
        rank.issued += len(found)
        if event["small"]:
            self.regimes.doubts["the script uses process groups smaller than the world"] = None
        if any(each.name.startswith(_EXCHANGES) for each in found):
            self.regimes.exchanges = True
        rank.read_until = event["t"]
        rank.still_since = None if found else rank.still_since
        rank.missed += event["missed"]
        return found

    def take_news(self, rank: Rank, kind: str, event: Event) -> None:
        """Take an event that shows nothing by itself."""
        if kind == "layout":
            rank.layouts[event["optimizer"]] = event["entries"]
        elif kind == "beat":
            rank.beat(event, time.monotonic())
        elif kind == "raised":
            rank.raised = event
        elif kind == "join":
            self.is_joined = True
        elif kind == "gone":
            rank.gone |= dict(zip(event["numbers"], event["weights"], strict=True))
        elif kind == "note":
            self.notes.append(f"rank {rank.rank}: {event['text']}")

    def steps_taken(self) -> dict[int, int]:
        """Return rank to the steps of the optimizer that took most."""
        return {n: max(r.steps.values(), default=0) for n, r in sorted(self.ranks.items())}
