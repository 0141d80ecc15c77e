"""The ways in which a call on live ranks can go wrong, each with its own outcome.

    RankRaised   a rank raised; the others were released     ordinary Exception, may be shrunk
    NotOffered   the implementation lacks the function       a SkipTest, reported as such
    Blocked      it has one that cannot be called            ordinary Exception
    RankHung     ranks are blocked and nothing moves         BaseException
    RankDied     a rank exited or was killed                 BaseException
    RigError     the rig or the call itself is at fault      ordinary Exception

Hangs and deaths are no ordinary exceptions, so that hypothesis does not shrink them: shrinking a
hang took 41 executions and 23 seconds, reporting it at once takes one.
"""

from __future__ import annotations

import re
import unittest
from dataclasses import dataclass, field

from spec_tests.rig.ranks.wire import RemoteError

NOT_HERE = "not here: "
"""How the reason of a skip begins when this machine lacks something."""

DIFFERS = "differs from run to run: read or written before it was waited for"
"""The finding where the same ranks give other wrong values when a case is run once more."""

OUTSIDE = (
    "likely: native code read or wrote memory that is not its own, now or earlier, as a kernel "
    "without a boundary check does"
)
_DAMAGED = re.compile(
    r"^(free|realloc|malloc|munmap_chunk|malloc_consolidate)\(\): |^double free or corruption"
    r"|^corrupted (size|double)|malloc: \*\*\*",
    re.MULTILINE,
)
"""What malloc and free say before they abort a process whose heap is damaged."""


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank when a call fails."""

    rank: int
    state: str  # "returned", "raised", "in the body", "exited with 3", "killed by SIGKILL"
    error: RemoteError | None = None
    stack: str = ""
    collectives: tuple[str, ...] = ()
    output: str = ""

    def render(self, *, with_traceback: bool = True) -> str:
        """Several lines: state, last collectives, stack or traceback, tail of the output."""
        lines = [f"rank {self.rank}: {self.state}"]
        if self.collectives:
            lines.append("  last collectives: " + " | ".join(self.collectives))
        if self.error is not None and with_traceback:
            lines += ["  " + line for line in self.error.text.rstrip().splitlines()]
        if self.stack:
            lines += ["  " + line for line in self.stack.rstrip().splitlines()]
        if self.output.strip():
            lines.append("  output (tail):")
            lines += ["    " + line for line in self.output.rstrip().splitlines()[-15:]]
        return "\n".join(lines)


class RigError(Exception):
    """The rig, or the way it was called, is at fault; never the implementation."""


class NotOffered(unittest.SkipTest):
    """The implementation leaves out a function that the clause needs.

    A SkipTest, because pytest and hypothesis both let that one through untouched.
    """


class Absent(NotOffered):
    """A function or method is not there at all: no refusal of one case."""


class Blocked(Exception):
    """A function does not fit the contract, so no clause about it was tried."""


@dataclass(eq=False)  # exceptions must stay hashable
class _Failure:
    headline: str
    primary: int
    ranks: list[RankReport] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(report.render() for report in self.ranks)])


class RankRaised(_Failure, Exception):
    """A rank raised. `error` is the earliest exception that is not an echo of another's failure."""

    @property
    def error(self) -> RemoteError:
        """The exception as the culprit raised it."""
        found = self.ranks[self.primary].error
        assert found is not None
        return found

    def __str__(self) -> str:
        # The native traceback is attached to the exception: here the headline and the others.
        others = [report.render() for report in self.ranks if report.rank != self.primary]
        own = self.ranks[self.primary].render(with_traceback=False)
        return "\n".join([self.headline, own, *others])


@dataclass(eq=False)
class RankHung(_Failure, BaseException):
    """Ranks are blocked without progress, or a body outlived its time limit.

    `was_computing`: a rank was at work until the end, and used up the patience with such.
    """

    was_computing: bool = False


class RankDied(_Failure, BaseException):
    """A rank's process ended during a call."""

    @property
    def is_memory_fault(self) -> bool:
        """True if native code read or wrote where it must not, perhaps in an earlier call."""
        dead = self.ranks[self.primary]
        is_found = dead.state == "killed by SIGABRT" and _DAMAGED.search(dead.output)
        return bool(is_found) or dead.state in ("killed by SIGSEGV", "killed by SIGBUS")

    def __str__(self) -> str:
        headline, *lines = super().__str__().split("\n")
        return "\n".join([headline, *[OUTSIDE] * self.is_memory_fault, *lines])
