"""Wrong worlds as a table: by which factor a share counts, with which weights a forward computes.

A gradient is a sum of shares, one for each backward of each rank since `zero_grad`. The right
world gives every share the factor one. A wrong reduction gives other factors, a wrong forward
computes with older weights: so a wrong world is an entry of `FAULTS`, and needs no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spec_tests.rig.judge.oracle import Named


@dataclass(frozen=True)
class Share:
    """What one backward of one rank has added to the gradients.

    Attributes:
        rank: whose loss it was.
        micro: how many micro-batches came before it since the gradients were cleared.
        was_local: it was not reduced by its own backward, but by a later one.
        was_cleared: gradients were cleared since.
    """

    gradient: Named
    rank: int
    micro: int
    was_local: bool = False
    was_cleared: bool = False


Factor = Callable[[Share, Any], float]
"""Of a share, for the `Alone` that reads the gradients."""


@dataclass(frozen=True)
class Fault:
    """A wrong world.

    Attributes:
        means: what it usually comes from, for `likely:`.
        factor: the factor of a share that counts, for a reader; right is one.
        clears: whether a share that was cleared counts no more.
        counts: number of the only use of a parameter in a forward that has a gradient; None, which
            is right, for every one.
        is_stale: whether parameter number n, of the outermost unit or not, computes with its values
            of before the last update.
        updates: whether a step updates parameter number n.
        notices: whether parameter number n notices that it was frozen or thawed.
        starts_from: the ranks whose initial weights are averaged; right is the first of the group.
        heeds_frozen: whether what was frozen before it was wrapped stays so.
        heeds_groups: whether a process group keeps to itself.
        heeds_no_sync: whether gradients wait inside `no_sync`.
        takes_buffers: whether a training forward of replicas takes the first rank's buffers; right
            is where it is not local, which it is inside `no_sync`.
    """

    means: str
    factor: Factor = lambda share, reader: 1.0
    clears: Callable[[Share], bool] = lambda share: True
    counts: int | None = None
    is_stale: Callable[[int, bool], bool] = lambda number, is_outermost: False
    updates: Callable[[int], bool] = lambda number: True
    notices: Callable[[int], bool] = lambda number: True
    starts_from: Callable[[Any], Sequence[int]] = lambda alone: alone.group[:1]
    heeds_frozen: bool = True
    heeds_groups: bool = True
    heeds_no_sync: bool = True
    takes_buffers: Callable[[bool], bool] = lambda is_local: not is_local


RIGHT = Fault("")
FAULTS: dict[str, Fault] = {
    "summed": Fault("summed over ranks and not averaged", lambda s, r: r.num_peers),
    "local": Fault(
        "the rank's own local gradient: it was never reduced",
        lambda s, r: r.num_peers * (s.rank == r.rank),
    ),
    "local-divided": Fault(
        "the rank's own local gradient, divided by the number of ranks: it was never reduced",
        lambda s, r: s.rank == r.rank,
    ),
    "divided-twice": Fault("divided by the number of ranks twice", lambda s, r: 1 / r.num_peers),
    "divided-by-world": Fault(
        "divided by the size of the world in place of the group",
        lambda s, r: len(r.group) / r.size,
    ),
    "over-world": Fault(
        "the mean over every rank of the world: the group was left aside",
        lambda s, r: len(r.group) / r.num_peers,
        heeds_groups=False,
    ),
    "mean-and-local": Fault(
        "the mean was added to the rank's own gradient, which it should replace",
        lambda s, r: 1 + r.num_peers * (s.rank == r.rank),
    ),
    "divided-by-micro-batches": Fault(
        "divided by the number of micro-batches", lambda s, r: 1 / max(1, r.micros)
    ),
    "last-alone": Fault(
        "the last micro-batch alone: the earlier ones were lost",
        lambda s, r: s.micro == r.micros - 1,
    ),
    "all-but-the-last": Fault(
        "the last micro-batch is missing", lambda s, r: s.micro < r.micros - 1
    ),
    "unreduced-lost": Fault(
        "micro-batches that waited for their reduction were lost",
        lambda s, r: not s.was_local,
    ),
    "local-stays": Fault(
        "the last micro-batch was reduced, the earlier ones stayed local",
        lambda s, r: r.num_peers * (s.rank == r.rank) if s.was_local else 1,
    ),
    "reduced-again": Fault(
        "earlier micro-batches were reduced again with the last one",
        lambda s, r: 1 if s.micro == r.micros - 1 else r.num_peers,
    ),
    "last-stays": Fault(
        "one was reduced, and one stayed local",
        lambda s, r: r.num_peers * (s.rank == r.rank) if 0 < s.micro == r.micros - 1 else 1,
    ),
    "last-divided-twice": Fault(
        "one micro-batch was divided by the number of ranks twice, the others once",
        lambda s, r: 1 / r.num_peers if 0 < s.micro == r.micros - 1 else 1,
    ),
    "reduced-in-no-sync": Fault(
        "no_sync is ignored, or read too late: the reduction was already armed in forward",
        heeds_no_sync=False,
    ),
    "own-start": Fault(
        "the rank kept its own weights: nothing was broadcast at construction",
        starts_from=lambda alone: (alone.rank,),
    ),
    "mean-start": Fault(
        "the ranks' weights were averaged, so the first rank's own were lost",
        starts_from=lambda alone: alone.group,
    ),
    "last-start": Fault(
        "the last rank's weights were taken", starts_from=lambda alone: alone.group[-1:]
    ),
    "start-of-another-group": Fault(
        "rank 0 of the world was taken, which is in another group",
        starts_from=lambda alone: (0,),
    ),
    "one-replica": Fault(
        "averaged over the ranks that share one copy of the weights, and not over the copies",
        lambda s, r: r.num_peers / len(r.replica) * (s.rank in r.replica),
    ),
    "never-cleared": Fault(
        "what was cleared is still in it: a hidden accumulator", clears=lambda share: False
    ),
    "unreduced-never-cleared": Fault(
        "what waited for its reduction when it was cleared is still in it: a hidden accumulator",
        clears=lambda share: not share.was_local,
    ),
    "first-use-alone": Fault(
        "of a weight that is tied, or of a layer that is called twice, the first use counts alone",
        counts=0,
    ),
    "last-use-alone": Fault(
        "of a weight that is tied, or of a layer that is called twice, the last use counts alone",
        counts=-1,
    ),
    "stale": Fault(
        "computed with the weights before the last update",
        is_stale=lambda number, is_outermost: True,
    ),
    "outermost-stale": Fault(
        "the outermost unit computed with its weights before the last update",
        is_stale=lambda number, is_outermost: is_outermost,
    ),
    "stale-in-part": Fault(
        "every second parameter has its value of before the last update",
        is_stale=lambda number, is_outermost: number % 2 == 1,
    ),
    "one-optimizer": Fault(
        "the step of one optimizer counts, and that of the other does not",
        updates=lambda number: number % 2 == 0,
    ),
    "not-thawed": Fault(
        "a parameter that was frozen or thawed goes on as before", notices=lambda number: False
    ),
    "frozen-trains": Fault(
        "frozen weights are trained, as Parameters made anew are", heeds_frozen=False
    ),
    "own-buffers": Fault(
        "the rank's own buffers: nothing is broadcast before a training forward",
        takes_buffers=lambda is_local: False,
    ),
    "buffers-in-no-sync": Fault(
        "the first rank's buffers were taken inside `no_sync` as well",
        takes_buffers=lambda is_local: True,
    ),
}
"""Every wrong world, by name."""
