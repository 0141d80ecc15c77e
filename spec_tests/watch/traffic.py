"""The norms of a run: same collectives, no hang, a proper end, and gradients computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spec_tests.watch.norm import Finding, norm
from spec_tests.watch.run import Collective, Rank, Run

_C10D = "docs.pytorch.org/docs/stable/distributed.html"
_SLOW_SECONDS = 60.0  # for a collective that all ranks have begun
_EFFECTS = ("abort", "KeyboardInterrupt", "SignalException", "DistBackendError", "DistNetworkError")
_EFFECT_WORDS = ("gloo", "NCCL", "onnection", "Timed out", "timed out", "Broken pipe", "ollective")
_KEPT = 20_000  # collectives that not all ranks of their group have sent
# What is handed in to these may differ by rank.
_FREE = ("gather", "scatter", "alltoall", "all_to_all", "allgather")


class Traffic:
    """The collectives of each group by number, until all ranks that take part have sent theirs."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], dict[int, Collective]] = {}
        self._members: dict[str, set[int]] = {}
        self._wrong: set[str] = set()

    def take(self, rank: Rank, found: Sequence[Collective]) -> Iterator[Finding]:
        """Compare what a rank has sent with what others of its groups sent at the same place."""
        for each in found:
            group = each.group
            self._members.setdefault(group, set()).add(rank.rank)
            sent = self._open.setdefault((group, each.number), {})
            sent.setdefault(rank.rank, each)
            if len(self._open) > _KEPT:  # groups of one rank, ranks that are far ahead
                del self._open[next(iter(self._open))]
            if group not in self._wrong and len(sent) > 1:
                findings = [replace(f, place=rank.place) for f in collectives_match(sent)]
                self._wrong |= {group for _ in findings}
                yield from findings
            if len(sent) >= len(self._members[group]) > 1:
                del self._open[group, each.number]


@norm("watch.collectives.match", source=_C10D)
def collectives_match(sent: dict[int, Collective]) -> Iterator[Finding]:
    """The collectives of a group MUST be the same on all its ranks, in kind, size and order."""
    first = min(sent)
    for rank, ours in sorted(sent.items()):
        theirs = sent[first]
        alike = (ours.sizes, ours.dtypes) == (theirs.sizes, theirs.dtypes)
        if ours.name != theirs.name or not (alike or any(word in ours.name for word in _FREE)):
            yield Finding(
                "",
                f"rank {rank}: expected {theirs} of rank {first} as collective {ours.number} of "
                f"group {ours.group}, got {ours}",
                rank=rank,
                likely="a branch that only some ranks take, or a parameter that only some use",
            )


@norm("watch.run.goes-on", source=_C10D)
def goes_on(run: Run, now: float, patience: float) -> Iterator[Finding]:
    """Ranks MUST NOT wait for each other for ever."""
    alive = [r for _, r in sorted(run.ranks.items()) if r.is_alive]
    is_gone = len(alive) < len(run.ranks)
    pending = [r.pending for r in alive]
    if any(pending) and pending == pending[:1] * len(pending) and not is_gone:
        patience = max(_SLOW_SECONDS, patience)  # all of them are in it: it may be slow
    if not all_wait(alive, now, patience / 2 if is_gone else patience):
        return
    taken = run.steps_taken()
    likely = "a collective that not all ranks call"
    if len(set(taken.values())) > 1:
        counts = ", ".join(f"rank {rank} {steps}" for rank, steps in taken.items())
        likely = f"ranks took different numbers of steps ({counts})"
    yield Finding(
        "",
        f"expected the ranks to go on, got a hang: {waits(run)}",
        min(taken.values(), default=0),
        place=alive[0].place,
        likely="; ".join(filter(None, [likely, _lengths(run)])),
    )


def all_wait(alive: Sequence[Rank], now: float, seconds: float) -> bool:
    """Return whether all of some ranks have waited so long, in heartbeats too."""
    since = [r.still_since for r in alive if r.waits and r.still_since is not None]
    beats = min((r.still_beats for r in alive), default=0)  # a machine that is too busy beats late
    is_long = len(since) == len(alive) > 0 and now - max(since) >= seconds
    return is_long and beats >= 0.7 * seconds - 1


def waits(run: Run) -> str:
    """Return where each rank waits, in which of its collectives."""
    said = []
    for _, rank in sorted(run.ranks.items()):
        if not rank.is_alive:
            said.append(f"rank {rank.rank} has {'raised' if rank.raised else 'ended'}")
            continue
        own = rank.pending
        last = f", after {rank.window[-1]}" if rank.window else ""
        where = f" in {own}, its collective {own.number} of group {own.group}" if own else last
        error = f" while it handles {rank.handling['type']}" if rank.handling else ""
        said.append(f"rank {rank.rank} waits at {rank.at}{where}{error}")
    return "; ".join(said)


@norm("watch.run.ends", source=_C10D)
def ends(run: Run) -> Iterator[Finding]:
    """Every rank MUST end by itself and without an exception."""
    raised = [(r, r.raised) for r in run.ranks.values() if r.raised]
    ranks = run.ranks.values()
    held = [(r, r.handling) for r in ranks if r.handling and r.waits and not r.has_ended]
    for rank, error in sorted(raised, key=lambda pair: (is_effect(pair[1]), pair[1]["t"])) or held:
        if is_effect(error) and any(each.is_done for each in ranks):
            continue  # it waited for one that was ended, after --steps
        words = " ".join(error["text"].split())
        is_held = "" if rank.raised else f", which it handles at {rank.at}"
        yield Finding(
            "",
            f"rank {rank.rank}: expected it to end, got {error['type']}: "
            f"{words[:300]}{is_held}{_after(rank)}",
            max(rank.steps.values(), default=0),
            rank.rank,
            place=error["place"],
            likely=_left(run) if is_effect(error) else "",
            is_first=not is_effect(error),
        )
    for rank in ranks:
        if not rank.has_ended and not rank.is_open and not rank.raised:
            yield Finding(
                "",
                f"rank {rank.rank}: expected it to end, got the end of its process without a word "
                f"(killed, or out of memory) at {rank.at}{_after(rank)}",
                max(rank.steps.values(), default=0),
                rank.rank,
                place=rank.place,
                likely=_left(run),
            )


def is_effect(error: Mapping[str, Any]) -> bool:
    """Return whether an exception may come from another rank that ended, raised or hangs."""
    return error["type"] in _EFFECTS or any(each in error["text"] for each in _EFFECT_WORDS)


def _left(run: Run) -> str:
    """Return which ranks had ended by themselves, and so left the others alone."""
    ended = [r for r in run.ranks.values() if r.has_ended and r.raised is None]
    steps = run.steps_taken()
    said = [f"rank {r.rank} had ended by itself after {steps[r.rank]} steps" for r in ended]
    return ", ".join(said)


def _after(rank: Rank) -> str:
    last = ", ".join(map(str, list(rank.window)[-3:]))
    return f"; its last collectives: {last}" if last else ""


@norm("watch.steps.as-many", source=_C10D)
def as_many_steps(run: Run) -> Iterator[Finding]:
    """All ranks MUST have taken as many steps as the others when they end."""
    taken = run.steps_taken()
    if run.is_joined or run.regimes.are_apart(run.training):
        return  # uneven inputs are meant, or each rank has an epoch of its own between averages
    if all(r.has_ended for r in run.ranks.values()) and len(set(taken.values())) > 1:
        few = min(taken, key=lambda rank: taken[rank])
        many = max(taken, key=lambda rank: taken[rank])
        words = f"rank {few}: expected {taken[many]} steps as on rank {many}, got "
        words += str(taken[few] or "none, so that no step was compared")
        likely = _lengths(run)
        likely = likely or "the ranks' loaders have different lengths, or a rank skips updates"
        if not taken[few]:
            likely = "its loader is empty; right if another rank updates the weights for all"
        yield Finding("", words, taken[few], few, likely=likely, is_advice=not taken[few])


def _lengths(run: Run) -> str:
    """Return how many batches the ranks' loaders have, where they have different numbers."""
    found = {rank: r.batches for rank, r in sorted(run.ranks.items()) if r.batches is not None}
    if len(set(found.values())) < 2:
        return ""
    said = ", ".join(f"rank {rank} {count}" for rank, count in found.items())
    return f"the ranks' loaders have different numbers of batches ({said})"
