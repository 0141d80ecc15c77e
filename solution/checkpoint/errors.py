"""A step of a save or a load, taken by all ranks or by none.

Disks fill up on one machine only. A rank that leaves alone lets the others wait for ever in the
next collective, so every step ends with all ranks telling each other how it went.
"""

from collections.abc import Callable
from typing import TypeVar, cast

from torch.distributed.checkpoint.api import CheckpointException

from solution import comm

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; raised on all ranks alike."""


def together(
    what: str, work: Callable[[], Result], group: comm.Group, *, by_first: bool = False
) -> Result:
    """Do `work` on every rank of `group`, or on the first one for all; return its result.

    Args:
        what: the step, for the message: "write its part of runs/step-00000010".
        by_first: only the first rank works, and every rank returns its result.

    Raises:
        CheckpointError: on all ranks, when it failed on one that works; says on which, and how.
    """
    result, cause = None, None
    if comm.rank(group) == 0 or not by_first:
        try:
            result = work()
        except (Exception, CheckpointException) as error:  # the library's is no Exception
            cause = error
    found = comm.gather_objects((result if by_first else None, _describe(cause)), group)
    errors = [text for _, text in found]
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
    if len(errors) > 1 and len(set(errors)) == 1:
        reasons = errors[0] and f"on all ranks: {errors[0]}"
    if reasons:
        who = "the first rank" if by_first else "every rank"
        raise CheckpointError(
            f"rank {comm.rank(group)}: expected {who} to {what}, got {reasons}"
        ) from cause
    return cast(Result, found[0][0] if by_first else result)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CheckpointException):
        causes = ((rank, failure[0]) for rank, failure in error.failures.items())
        return "; ".join(f"({rank}) {type(e).__name__}: {e}" for rank, e in causes)
    if error is None or isinstance(error, CheckpointError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
