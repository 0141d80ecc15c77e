"""What can go wrong in a simulated world, each by its own name."""

from __future__ import annotations

from spec_tests.rig.ranks.errors import RankHung
from spec_tests.rig.ranks.not_here import NotHere


class Deadlock(RankHung, Exception):
    """No rank can go on. Proved, not timed out; cheap, so hypothesis may shrink it."""


class SimError(RuntimeError):
    """A rank did what no correct program does, or what cannot be simulated."""


class CollectiveMismatch(SimError):
    """Two ranks of a group met with different operations."""


class BufferInFlight(SimError):
    """A tensor was written to, or handed out again, between the launch and the wait."""


class UnwaitedWork(SimError):
    """The body has ended and nobody has waited for an operation that it launched."""


class NotSimulated(SimError, NotHere):
    """What was asked for exists on live ranks only: its clause is "not here", and not failed."""


class PeerGone(SimError):
    """Raised where a rank waits for one that has failed, or in a deadlock: never the cause."""
