"""Traffic: what is sent, counted by meaning and by size, as one rank sees it.

An implementation is free in how it reduces (an all-reduce, a reduce-scatter and a gather, many
small pieces) and when: a gather may be launched a phase ahead of its use, and a reduction a phase
after its gradient. So phases are counted together, see `together`. Where a clause of level
`correct` looks at traffic it asks whether anything is sent at all. Counts, sizes and order belong
to `production`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_tests.rig import judge
from spec_tests.rig.ranks.recorder import Event, Kind, Log

GATHERS = (Kind.GATHER, Kind.BROADCAST, Kind.RECEIVE)
"""A gather is one all-gather, or a broadcast or a point-to-point message from each rank."""

REDUCTIONS = (Kind.REDUCTION, Kind.EXCHANGE)
"""A reduce-scatter may be an all-to-all, of which each rank adds up what it receives."""


def together(*logs: Log) -> Log:
    """Return what several phases sent, in order, as the log of one phase."""
    events = tuple(event for log in logs for event in log.events)
    peak = max(log.peak_bytes for log in logs)
    return Log(events, peak, sum(log.issued for log in logs))


def volume(log: Log, *kinds: Kind) -> int:
    """Return the number of floating-point elements sent; other dtypes are bookkeeping.

    A message of weights as raw bytes counts as float32, which toys have; fewer bytes are flags.
    """
    return sum(_elements(event) for event in log.collectives(*kinds))


def _elements(event: Event) -> int:
    return _numel(event) if _is_raw(event) or "float" in event.dtypes[0] else 0


def _numel(event: Event) -> int:
    return event.bytes // 4 if _is_raw(event) else event.numel


def _is_raw(event: Event) -> bool:
    return event.dtypes == ("uint8",) and event.bytes >= 16


def without_gathers(log: Log) -> Log:
    """Return the log without messages that gather weights."""
    kinds = (*GATHERS, Kind.SEND)
    rest = tuple(e for e in log.events if e.kind not in kinds or not _elements(e))
    return log if len(rest) == len(log.events) else Log(rest, log.peak_bytes)


def reduced(log: Log) -> int:
    """Return the number of floating-point elements that were reduced."""
    return volume(log, *REDUCTIONS)


def in_bytes(log: Log, *kinds: Kind) -> int:
    """Return the bytes of what `volume` counts."""
    return sum(event.bytes for event in log.collectives(*kinds) if _elements(event))


def gathered(log: Log, num_ranks: int, of: Callable[..., int] = volume) -> int:
    """Return the number of floating-point elements that a rank gathered, with its own share.

    By point-to-point messages a rank receives all but its own share, which each other rank is sent.

    Args:
        of: `in_bytes` for their bytes.
    """
    return of(log, *GATHERS) + of(log, Kind.SEND) // max(1, num_ranks - 1)


def _reduced_pairwise(log: Log, num_ranks: int) -> tuple[int, int]:
    """Return the elements that point-to-point messages reduced, and how many they may pad.

    In a ring each rank receives every part but one twice: while it is added up, and in full.
    """
    received = [e for e in log.collectives(Kind.RECEIVE) if "float" in e.dtypes[0]]
    total = sum(e.numel for e in received) * num_ranks // (2 * (num_ranks - 1))
    return total, num_ranks * len(received)


def messages(log: Log, num_ranks: int, *kinds: Kind) -> float:
    """Return the number of collectives; of those with a root, one for each rank count as one."""
    rooted = (Kind.BROADCAST, Kind.RECEIVE)
    events = log.collectives(*kinds)
    own = sum(e.kind in rooted or e.label.strip("_").endswith(".reduce") for e in events)
    return len(events) - own + own / num_ranks


def silent(logs: Sequence[Log], *, when: str) -> None:
    """No rank may have sent anything."""
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        sent = log.collectives()
        judge.holds(
            not sent, f"rank {rank}: expected no collective {when}, got {len(sent)}: {_list(sent)}"
        )
        judge.holds(
            log.issued == 0,
            f"rank {rank}: expected nothing to be sent {when}, but its groups counted {log.issued} "
            "operations",
            likely="another thread sends: the reduction was only moved out of sight",
        )


def reduced_once(
    logs: Sequence[Log],
    *,
    numel: int,
    num_bytes: int | None = None,
    times: int = 1,
    bookkeeping: int = 0,
    by_hand: bool = False,
    likely: str = "",
    given: str = "",
) -> None:
    """Each rank's reductions add up to `times` copies of `numel` gradient elements.

    Args:
        num_bytes: bytes of those elements in their own dtypes; not looked at if left out.
        bookkeeping: further elements that may be sent: flags of unused parameters, token counts.
        by_hand: whether ranks may gather a copy of each rank's, to one or to all, and add up. What
            they gather is then judged in place of what they reduce, and not its dtypes.
    """
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        sent, padding = log.collectives(*REDUCTIONS), 0
        total = sum(event.numel for event in sent)
        by_gathers = 0 <= _gathered(logs, rank) - times * numel <= bookkeeping
        if by_hand and total <= bookkeeping and by_gathers:
            continue
        if total < times * numel and log.collectives(Kind.RECEIVE) and len(logs) > 1:
            sent = log.collectives(*REDUCTIONS, Kind.SEND, Kind.RECEIVE)
            pairwise, padding = _reduced_pairwise(log, len(logs))
            total += pairwise
        judge.holds(
            times * numel - padding <= total <= times * numel + bookkeeping + padding,
            f"rank {rank}: expected reductions of {times} x {numel} gradient elements (and at most "
            f"{bookkeeping} besides), got {total} elements, {total / numel:.2f} copies, in "
            f"{len(sent)} collectives: {_list(sent)}",
            likely=likely or _likely(total, numel * times),
            given=given,
        )
        size = sum(event.bytes for event in sent)
        judge.holds(
            padding > 0 or num_bytes is None or size <= times * num_bytes + 4 * bookkeeping,
            f"rank {rank}: expected {times} x {num_bytes} bytes (and at most {4 * bookkeeping} "
            f"besides), got {size}: {_list(sent)}",
            likely="gradients travel in a wider dtype than their own",
            given=given,
        )


def _gathered(logs: Sequence[Log], rank: int) -> float:
    """Return how many elements of its own a rank gathers: to all ranks, or each part to one."""
    parts = logs[rank].collectives(Kind.GATHER)
    if any(not event.label.endswith(".gather_") for event in parts):
        return sum(event.numel for event in parts) / len(logs)
    # One rank's event is of all parts, the others' of their own.
    of_all = sum(event.numel for log in logs for event in log.collectives(Kind.GATHER))
    return of_all / (2 * len(logs) - 1)


def sent_once(
    logs: Sequence[Log],
    *,
    numel: int,
    num_ranks: int = 0,
    padding: int = 0,
    likely: str = "",
    given: str = "",
) -> None:
    """What a rank receives adds up to one copy of `numel` elements, and nothing is reduced.

    Args:
        num_ranks: of the world, where `logs` are of some of its ranks.
        padding: further elements that may be sent, for alignment and equal lengths.
    """
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        sent = log.collectives()
        own = sum(map(_numel, log.collectives(Kind.SEND)))  # which each other rank receives
        total = sum(map(_numel, sent)) - own + own // max(1, (num_ranks or len(logs)) - 1)
        reduced = [event for event in sent if event.kind is Kind.REDUCTION]
        judge.holds(
            not reduced,
            f"rank {rank}: expected no reduction, got {len(reduced)}: {_list(reduced)}",
            likely="a reduction moves twice what a gather or broadcast of the values does",
            given=given,
        )
        judge.holds(
            numel <= total <= numel + padding,
            f"rank {rank}: expected one copy of {numel} elements (and at most {padding} besides), "
            f"got {total}, {total / numel:.2f} copies, in {len(sent)} collectives: {_list(sent)}",
            likely=likely
            or ("something is never sent" if total < numel else "something is sent twice"),
            given=given,
        )


def _likely(total: int, wanted: int) -> str:
    if total < wanted:
        return "something is never reduced: a parameter that is left out, a bucket not flushed"
    return "something is reduced twice, or on micro-batches that should be silent"


def _list(events: Sequence[Event]) -> str:
    shown = ", ".join(map(str, events[:8]))
    return shown + (f", and {len(events) - 8} more" if len(events) > 8 else "")
