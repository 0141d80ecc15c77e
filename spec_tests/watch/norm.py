"""What a check of a running script is: a norm with an id, and what it found.

    @norm("watch.replicas.equal", source="...")
    def replicas_equal(step):
        \"\"\"Replicated parameters MUST be equal on all ranks after an optimizer step.\"\"\"

The first line of the docstring is the norm, as a clause's is; MUST decides the exit status,
SHOULD advises. `python -m spec_tests ledger` lists the norms with the clauses. The faulty scripts
that each reports are in `tests/rig/watched/faults.toml`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spec_tests.rig.clause import Clause, _validate
from spec_tests.rig.outcomes import Strength

NORMS: dict[str, Clause] = {}
"""Every check of a running script, by id, in the order in which causes come before effects."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check saw.

    Attributes:
        norm: id of the norm that does not hold.
        text: what was expected and what came, with rank and tensor.
        step: of the optimizer, from 1; 0 before the first.
        rank: the rank that it is about; None for all.
        tensor: name of the first tensor, or "".
        place: the script's line, or "".
        likely: the likely cause, or "".
        is_advice: reported, and without weight for the exit status.
        is_first: an exception that no other rank caused: what came with it follows from it.
        at: when it was seen, in the agent's seconds.
    """

    norm: str
    text: str
    step: int = 0
    rank: int | None = None
    tensor: str = ""
    place: str = ""
    likely: str = ""
    is_advice: bool = False
    is_first: bool = False
    at: float = 0.0


def norm(id: str, *, source: str) -> Callable[[Callable[..., Iterator[Finding]]], Any]:
    """Register a check under the norm that its docstring begins with.

    Raises:
        ValueError: for a malformed id or sentence, as of a clause.
    """

    def register(check: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        sentence = (inspect.getdoc(check) or "").partition("\n")[0].strip()
        strength = _validate(id, "correct", (), sentence)
        worlds, everywhere = (1, 2, 3), ("gloo", "cuda")
        fields = (strength, "correct", (), (), source, "2026.1", worlds, everywhere, "", check)
        NORMS[id] = Clause(id, sentence, *fields)
        return check

    return register


def is_must(finding: Finding) -> bool:
    """Return whether a finding decides the exit status."""
    return not finding.is_advice and NORMS[finding.norm].strength is Strength.MUST
