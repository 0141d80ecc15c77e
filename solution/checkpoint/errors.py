"""A step of a save or a load, taken by all ranks or by none.

Disks fill up on one machine only. A rank that leaves alone lets the others wait for ever in the
next collective, so every step ends with all ranks telling each other how it went.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch.distributed.checkpoint.api import CheckpointException

from solution import comm

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; raised on all ranks alike."""


def together(what: str, work: Callable[[], Result], group: comm.Group) -> Result:
    """Do `work` on every rank of `group`; returns this rank's result.

    Args:
        what: the step, for the message: "write its part of runs/step-00000010".

    Raises:
        CheckpointError: on all ranks, when it failed on any; says on which, and how.
    """
    result, cause = _attempt(work)
    _raise_if_any(
        f"every rank to {what}", comm.gather_objects(_describe(cause), group), group, cause
    )
    return cast(Result, result)


def by_first(what: str, work: Callable[[], Result], group: comm.Group) -> Result:
    """Do `work` on the first rank of `group` for all; returns its result on every rank.

    Raises:
        CheckpointError: on all ranks, when it failed.
    """
    result, cause = _attempt(work) if comm.rank(group) == 0 else (None, None)
    found = comm.gather_objects((result, _describe(cause)), group)
    _raise_if_any(f"the first rank to {what}", [text for _, text in found], group, cause)
    return cast(Result, found[0][0])


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    try:
        return work(), None
    except (Exception, CheckpointException) as error:  # the library's is no Exception
        return None, error


def _raise_if_any(
    expected: str, errors: list[str], group: comm.Group, cause: BaseException | None
) -> None:
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
    if len(errors) > 1 and len(set(errors)) == 1:
        reasons = errors[0] and f"on all ranks: {errors[0]}"
    if reasons:
        raise CheckpointError(
            f"rank {comm.rank(group)}: expected {expected}, got {reasons}"
        ) from cause


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, CheckpointException):
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        return "; ".join(
            f"({rank}) {type(cause).__name__}: {cause}" for rank, cause in causes.items()
        )
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
