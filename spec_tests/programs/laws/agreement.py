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
    """All ranks must issue the same sequence of (meaning, size, dtypes).

    Point-to-point messages are left out: sender and receiver differ by design. The root of a gather
    or of a scatter sees the parts of all ranks.
    """
    __tracebackhide__ = True
    sequences = [
        [event for event in log.collectives() if event.kind not in (Kind.SEND, Kind.RECEIVE)]
        for log in logs
    ]
    for rank, sequence in enumerate(sequences[1:], start=1):
        for number, (own, first) in enumerate(zip(sequence, sequences[0], strict=False), start=1):
            judge.holds(
                (own.kind == first.kind or own.label == first.label)  # an all-to-all is any kind
                and own.dtypes == first.dtypes
                and _are_alike(own, first, len(logs)),
                f"collective number {number}: rank {rank} issued {own.kind} of {own.numel} "
                f"elements, rank 0 {first.kind} of {first.numel}",
                likely="collectives are launched in the order in which gradients become ready on "
                "this rank; unrelated data is added up where the sizes happen to agree",
                given=given,
            )
        judge.holds(
            len(sequence) == len(sequences[0]),
            f"rank {rank} issued {len(sequence)} collectives, rank 0 {len(sequences[0])}",
            given=given,
        )


def _are_alike(own: Event, first: Event, num_ranks: int) -> bool:
    """Whether two ranks' sizes of a collective are equal, or those of a root and of another."""
    if own.label == first.label and own.label.endswith((".gather_", ".scatter_")):
        return {own.numel, first.numel} <= {n := min(own.numel, first.numel), n * num_ranks}
    return own.numel == first.numel
