"""Wrong worlds as a table: by which factor a share counts, with which weights a forward computes.

A gradient is a sum of shares, one for each backward of each rank since `zero_grad`. The right
world gives every share the factor one. A wrong reduction gives other factors, a wrong forward
computes with older weights: so a wrong world is an entry of `FAULTS`, and needs no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec_tests.rig.judge.oracle import Gradients


@dataclass(frozen=True)
class Share:
    """What one backward of one rank has added to the gradients.

    Attributes:
        rank: whose loss it was.
        micro: how many micro-batches came before it since the gradients were cleared.
        was_local: it was not reduced by its own backward, but by a later one.
        was_cleared: gradients were cleared since.
    """

    gradient: Gradients
    rank: int
    micro: int
    was_local: bool = False
    was_cleared: bool = False


@dataclass(frozen=True)
class Reader:
    """Who reads the gradients: a rank among so many, after so many micro-batches."""

    rank: int
    peers: tuple[int, ...]
    replica: tuple[int, ...]  # the ranks that share one copy of the weights with it
    micros: int

    @property
    def size(self) -> int:
        """Number of ranks whose mean is formed."""
        return len(self.peers)


Factor = Callable[[Share, Reader], float]


def _all(share: Share, reader: Reader) -> float:
    return float(not share.was_cleared)


def _of_live(factor: Factor) -> Factor:
    """Give shares that were cleared the factor zero."""
    return lambda share, reader: 0.0 if share.was_cleared else factor(share, reader)


@dataclass(frozen=True)
class Fault:
    """A wrong world.

    Attributes:
        means: what it usually comes from, for `likely:`.
        factor: the factor of a share, for a reader; right is one, and zero after `zero_grad`.
        is_stale: whether parameter number n, of the outermost unit or not, computes with its values
            of before the last update.
        updates: whether a step updates parameter number n.
        notices: whether parameter number n notices that it was frozen or thawed.
        takes_buffers: whether a training forward of replicas takes the first rank's buffers; right
            is where it is not local, which it is inside `no_sync`.
    """

    means: str
    factor: Factor = _all
    is_stale: Callable[[int, bool], bool] = lambda number, is_outermost: False
    updates: Callable[[int], bool] = lambda number: True
    notices: Callable[[int], bool] = lambda number: True
    takes_buffers: Callable[[bool], bool] = lambda is_local: not is_local


RIGHT = Fault("")
FAULTS: dict[str, Fault] = {
    "summed": Fault("summed over ranks and not averaged", _of_live(lambda s, r: r.size)),
    "local": Fault(
        "the rank's own gradient: it was never reduced",
        _of_live(lambda s, r: r.size * (s.rank == r.rank)),
    ),
    "divided-twice": Fault(
        "divided by the number of ranks twice", _of_live(lambda s, r: 1 / r.size)
    ),
    "divided-by-micro-batches": Fault(
        "divided by the number of micro-batches", _of_live(lambda s, r: 1 / max(1, r.micros))
    ),
    "last-alone": Fault(
        "the last micro-batch alone: earlier ones were lost",
        _of_live(lambda s, r: s.micro == r.micros - 1),
    ),
    "all-but-the-last": Fault(
        "the last micro-batch is missing", _of_live(lambda s, r: s.micro < r.micros - 1)
    ),
    "unreduced-lost": Fault(
        "micro-batches that waited for their reduction were lost",
        _of_live(lambda s, r: not s.was_local),
    ),
    "local-stays": Fault(
        "the last micro-batch was reduced, earlier ones stayed local",
        _of_live(lambda s, r: r.size * (s.rank == r.rank) if s.was_local else 1),
    ),
    "reduced-again": Fault(
        "earlier micro-batches were reduced again with the last one",
        _of_live(lambda s, r: 1 if s.micro == r.micros - 1 else r.size),
    ),
    "one-replica": Fault(
        "averaged over the ranks that share one copy of the weights, and not over the copies",
        _of_live(lambda s, r: r.size / len(r.replica) * (s.rank in r.replica)),
    ),
    "never-cleared": Fault(
        "what was cleared is still in it: a hidden accumulator", lambda s, r: 1.0
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
    "own-buffers": Fault(
        "computed with the rank's own buffers, not the first rank's",
        takes_buffers=lambda is_local: False,
    ),
    "buffers-in-no-sync": Fault(
        "the first rank's buffers were taken inside `no_sync` as well",
        takes_buffers=lambda is_local: True,
    ),
}
"""Every wrong world, by name."""
