"""Stream: which tokens each rank receives, batch by batch, against the one global order.

Expected values come from an oracle of a few lines of plain Python over numbered shards (see
`rig.shards`); a difference is reported by shard and token, with what the wrong batch looks like.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_tests.rig import judge, shards

Rows = list[list[int]]
Batch = tuple[Rows, Rows]  # inputs, targets
Stream = list[Batch]  # of one rank, one pass


def sequences(lengths: Sequence[int], sequence_length: int) -> list[int]:
    """First token of every sequence of numbered shards, in the global order."""
    return [
        shards.STRIDE * index + number * sequence_length
        for index, length in enumerate(lengths)
        for number in range((length - 1) // sequence_length)
    ]


def expected(
    lengths: Sequence[int], *, sequence_length: int, batch_size: int, world_size: int
) -> list[Stream]:
    """Per rank, what one pass yields: batch i of rank r is sequences [iWB + rB, iWB + rB + B)."""
    order = sequences(lengths, sequence_length)
    window = batch_size * world_size
    return [
        [
            batch_of(order[first + rank * batch_size :][:batch_size], sequence_length)
            for first in range(0, len(order) - window + 1, window)
        ]
        for rank in range(world_size)
    ]


def batch_of(firsts: Sequence[int], sequence_length: int) -> Batch:
    """The batch of the sequences that begin with these tokens."""
    inputs = [list(range(first, first + sequence_length)) for first in firsts]
    return inputs, [[token + 1 for token in row] for row in inputs]


def same(
    observed: Sequence[Stream], wanted: Sequence[Stream], *, given: str = "", likely: str = ""
) -> None:
    """Every rank must receive what is expected of it, no batch more and none less."""
    __tracebackhide__ = True
    agree(observed, wanted, given=given, likely=likely)
    for rank, (seen, right) in enumerate(zip(observed, wanted, strict=True)):
        judge.holds(
            len(seen) == len(right),
            f"rank {rank}: expected {len(right)} batches, got {len(seen)}",
            likely=likely or _count_cause(len(seen), len(right)),
            given=given,
        )


def goes_on(
    observed: Sequence[Stream],
    wholes: Sequence[Stream],
    taken: int = 0,
    *,
    limit: int,
    given: str = "",
) -> None:
    """Every rank must receive what the loader's own uninterrupted pass holds after `taken` batches.

    Whether that pass is the right one is for other clauses to say.

    Args:
        limit: how many batches were read at most; a pass as long as that may go on, and what the
            other lacks at its end is not looked at.
    """
    __tracebackhide__ = True
    rest = [whole[taken:] for whole in wholes]
    seen = [
        got[: len(right)] if len(whole) >= limit else got
        for got, right, whole in zip(observed, rest, wholes, strict=True)
    ]
    judge.holds(all(wholes), "expected batches in an uninterrupted pass, got none", given=given)
    same(seen, rest, given=given, likely=_goes_on_elsewhere(observed, wholes, taken))


def _goes_on_elsewhere(observed: Sequence[Stream], wholes: Sequence[Stream], taken: int) -> str:
    """Return in words with which other batch of the pass a rank goes on, if it does."""
    for got, whole in zip(observed, wholes, strict=True):
        at = whole.index(got[0]) if got and got[0] in whole else taken
        if at == 0 < taken <= len(whole) and got[:2] == whole[:2]:
            at_end = ", or that of the end counts as none" if taken == len(whole) else ""
            return f"the pass begins anew: the state is not restored{at_end}"
        if 0 < at < taken and got[:2] == whole[at : at + 2]:
            again = f"batch {at} is read again: the state counts {taken - at} batches too few"
            return f"it goes on with batch {at} of the pass in place of {taken}; {again}"
        if at > taken:
            lost = f"what lies between is left out: the state counts {at - taken} too many"
            return f"it goes on with batch {at} of the pass in place of {taken}; {lost}"
    return ""


def agree(
    observed: Sequence[Stream], wanted: Sequence[Stream], *, given: str = "", likely: str = ""
) -> None:
    """Batches that are both received and expected must be equal."""
    __tracebackhide__ = True
    judge.holds(
        len(observed) == len(wanted),
        f"expected the streams of {len(wanted)} ranks, got {len(observed)}",
    )
    for rank, (seen, right) in enumerate(zip(observed, wanted, strict=True)):
        for index, (got, want) in enumerate(zip(seen, right, strict=False)):
            if got != want:
                cause = likely or _cause(rank, index, observed, wanted)
                raise judge.violated(
                    f"rank {rank}, batch {index}: {_difference(got, want)}",
                    likely=cause,
                    given=given,
                )


def _difference(got: Batch, want: Batch) -> str:
    for which, own, right in zip(("inputs", "targets"), got, want, strict=True):
        if [len(row) for row in own] != [len(row) for row in right]:
            return f"expected {which} of {len(right)} rows of {len(right[0])} tokens, got {own}"
        for row, (mine, theirs) in enumerate(zip(own, right, strict=True)):
            for column, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if a != b:
                    return (
                        f"expected {which}[{row}, {column}] to be {shards.place(b)}, got "
                        f"{shards.place(a)}   (the row is {mine})"
                    )
    return "equal"


def _cause(rank: int, index: int, observed: Sequence[Stream], wanted: Sequence[Stream]) -> str:
    got = observed[rank][index]
    for other, stream in enumerate(wanted):
        for number, batch in enumerate(stream):
            if batch == got:
                return f"it is batch {number} of rank {other}"
    inputs, targets = got
    if not all(inputs):
        return ""  # a row without tokens: read beyond the end of a file
    if inputs == targets:
        return "the targets are the inputs, not shifted"
    if [row[0] for row in inputs] == [row[0] for row in wanted[rank][index][0]]:
        return "the sequences begin where they should, what follows is off"
    if any(len({token // shards.STRIDE for token in row}) > 1 for row in inputs):
        return "a sequence runs from the end of one shard into the next"
    shared = _sharing(rank, index, observed)
    if shared and not _sharing(rank, index, wanted):
        return "ranks {} and {} read the same tokens".format(*sorted((rank, shared[0])))
    firsts, length = [row[0] for row in inputs], len(inputs[0])
    if got == batch_of(firsts, length) and not any(at % shards.STRIDE % length for at in firsts):
        return "sequences of the data, but others: left out or repeated before, or in another order"
    return "no batch of any rank: offsets or lengths are off"


def _sharing(rank: int, index: int, streams: Sequence[Stream]) -> list[int]:
    """Return the other ranks that have read a token of this batch as an input by this step."""
    own = {token for row in streams[rank][index][0] for token in row}
    return [
        other
        for other, stream in enumerate(streams)
        if other != rank
        and any(not own.isdisjoint(row) for inputs, _ in stream[: index + 1] for row in inputs)
    ]


def _count_cause(seen: int, right: int) -> str:
    if seen < right:
        return "data that would fill a batch on every rank was dropped, or the pass ended early"
    return "what does not fill a batch on every rank was not dropped, or the pass does not end"
