"""Observations that a clause cannot read: a finding about the implementation, no error of the rig.

What a body returns holds what the implementation returned. A clause reads it as the contract
describes it: so many batches, these names, a tensor. Where the implementation returned None or
another type, the clause's own code raises a TypeError or the like. That is the implementation's
fault, as long as the ranks have answered and the rig itself did not raise.
"""

from __future__ import annotations

import contextlib
import reprlib
import traceback
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis.errors import HypothesisException

from spec_tests.rig import judge
from spec_tests.rig.errors import Blocked, RankRaised, RigError

_SUITE = Path(__file__).parents[1]
_WORLD = str(Path(__file__).with_name("world.py"))
# Findings and outcomes of their own, and what the machine or the run itself is at fault for.
_OTHERS = (
    *(AssertionError, RankRaised, RigError, Blocked, unittest.SkipTest, HypothesisException),
    *(OSError, MemoryError, ImportError),
)


@contextlib.contextmanager
def is_a_finding() -> Iterator[None]:
    """Run a clause's test in the block: raise a Violation where it cannot read what ranks returned.

    Raises:
        Violation: in place of an unexpected exception after the ranks have answered.
    """
    __tracebackhide__ = True
    try:
        yield
    except _OTHERS:
        raise
    except Exception as error:
        observed = judge.SITUATION.get().observed
        frames = traceback.extract_tb(error.__traceback__)
        if observed is None or any(frame.filename == _WORLD for frame in frames):
            raise
        found = _violation(error, frames, observed)
        for note in getattr(error, "__notes__", ()):  # the values that hypothesis drew
            found.add_note(note)
        raise found from error


def _violation(
    error: Exception, frames: traceback.StackSummary, observed: Sequence[Any]
) -> judge.Violation:
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_SUITE)]
    where = own[-1] if own else frames[-1]
    lines = [f"rank {rank} returned {_brief(value)}" for rank, value in enumerate(observed)]
    alike = len({line.partition("returned")[2] for line in lines}) == 1 < len(lines)
    return judge.violated(
        "expected observations as the contract describes them, got some that this clause cannot "
        f"read: {type(error).__name__}: {error}",
        likely="a function returned None, another type, or fewer values or other names than the "
        "contract says",
        detail="\n".join(
            [
                *([f"every rank returned {_brief(observed[0])}"] if alike else lines),
                f"read in {Path(where.filename).name}:{where.lineno}: {where.line}",
            ]
        ),
    )


class _Brief(reprlib.Repr):
    """A line per observation: of a tensor its shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 6, 4, 4
        self.maxstring = self.maxother = 120

    def repr_Tensor(self, tensor: torch.Tensor, level: int) -> str:
        return f"<tensor {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}>"


def _brief(value: object) -> str:
    return _Brief().repr(value)
