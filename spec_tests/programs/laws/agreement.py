"""Agreement: all ranks hold the same bits and issue the same collectives."""

from __future__ import annotations

from collections.abc import Sequence

from spec_tests.rig import judge
from spec_tests.rig.ranks.recorder import Event, Kind, Log


def same_bits(
    histories: Sequence[Sequence[judge.Tensors]], *, quantity: str, given: str = ""
) -> None:
    """After every step all ranks must hold equal bits.

    Args:
        histories: per rank, one mapping of name to tensor per step.
    """
    __tracebackhide__ = True
    for step, moment in enumerate(zip(*histories, strict=True), start=1):
        where = ", ".join(filter(None, [given, f"after step {step}"]))
        judge.same_on_all_ranks(moment, quantity=quantity, given=where)


def same_collectives(logs: Sequence[Log], *, given: str = "") -> None:
    """All ranks must issue the same sequence of (meaning, size, dtypes), but for letters."""
    __tracebackhide__ = True
    sequences = [[_shown(event) for event in log.collectives()] for log in logs]
    sequences = [[e for e in each if e[0] not in (Kind.SEND, Kind.RECEIVE)] for each in sequences]
    for rank, sequence in enumerate(sequences[1:], start=1):
        for number, (own, first) in enumerate(zip(sequence, sequences[0], strict=False), start=1):
            judge.holds(
                own == first,
                f"collective number {number}: rank {rank} issued {own[0]} of {own[1]} elements, "
                f"rank 0 {first[0]} of {first[1]}",
                likely="collectives are launched in the order in which gradients become ready on "
                "this rank; unrelated data is added up where the sizes happen to agree",
                given=given,
            )
        judge.holds(
            len(sequence) == len(sequences[0]),
            f"rank {rank} issued {len(sequence)} collectives, rank 0 {len(sequences[0])}",
            given=given,
        )


def _shown(event: Event) -> tuple[Kind | None, int, tuple[str, ...]]:
    """Return what ranks must agree on: of a gather to one rank that rank sees all parts."""
    at_root = event.label.endswith((".gather_", ".scatter_"))
    return event.kind, 0 if at_root else event.numel, event.dtypes
