"""What a check of a running script is: a norm with an id, and what it found.

    @rank_norm("watch.scaler.unscaled", source="...")
    def scaler_unscaled(step, rank, event):
        \"\"\"Gradients of a loss that a GradScaler scaled MUST be unscaled before the step.\"\"\"
        return step.finding(rank, "expected ..., got ...") if event["scaled"] else None

The first line of the docstring is the norm, as a clause's is; MUST decides the exit status,
SHOULD advises. `python -m spec_tests ledger` lists the norms with the clauses. The faulty scripts
that each reports are in `tests/rig/watched/faults.toml`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from spec_tests.rig.clause import Clause, _validate
from spec_tests.rig.outcomes import Strength


class About(Enum):
    """What a norm says something about: `regime` has when a deviation is a fault."""

    ITSELF = "a rank by itself, a wrapper, or what all ranks must do"
    EQUAL = "weights that ranks hold alike at each step, or averages of them"
    BEGIN = "weights that ranks begin with alike"
    PEERS = "ranks that train on different data, and do the same with it"


NORMS: dict[str, Clause] = {}
"""Every check of a running script, by id."""
ABOUT: dict[str, About] = {}


@dataclass(frozen=True)
class Finding:
    """One thing that a check saw.

    Attributes:
        norm: id of the norm that does not hold; "" until the check's own is put there.
        text: what was expected and what came, with rank and tensor.
        step: of the optimizer, from 1; 0 before the first.
        rank: the rank that it is about; None for all.
        tensor: name of the first tensor, or "".
        place: the script's line, or "".
        likely: the likely cause, or "".
        is_advice: reported, and without weight for the exit status.
        optimizer: whose regime weighs it, as `Step.whose`; None for what no regime changes.
        kind: of the parameters that it is about, as `Regimes.of` takes it; of no use without
            an optimizer.
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
    optimizer: tuple[int, int] | None = None
    kind: str = "wrapped"


Check = Callable[..., Iterator[Finding]]
RankCheck = Callable[[Any, int, dict[str, Any]], Finding | None]
STEP_CHECKS: dict[str, Check] = {}
"""The checks of a step, by the id of their norm."""


def norm(id: str, *, source: str, about: About = About.ITSELF) -> Callable[[Check], Check]:
    """Register a check under the norm that its docstring begins with, and name it in findings.

    Of several findings of one norm, the first is reported.

    Raises:
        ValueError: for a malformed id or sentence, as of a clause.
    """

    def register(check: Check) -> Check:
        sentence = (inspect.getdoc(check) or "").partition("\n")[0].strip()
        strength = _validate(id, "correct", (), sentence)

        @functools.wraps(check)
        def named(*arguments: Any) -> Iterator[Finding]:
            found = [*check(*arguments)]  # all: a check keeps what it has seen behind its findings
            yield from (replace(finding, norm=id) for finding in found[:1])

        worlds, everywhere = (1, 2, 3), ("gloo", "cuda")
        fields = (strength, "correct", (), (), source, worlds, everywhere, "", named)
        NORMS[id], ABOUT[id] = Clause(id, sentence, *fields), about
        return named

    return register


def step_norm(id: str, *, source: str, about: About = About.ITSELF) -> Callable[[Check], Check]:
    """Register a check `(step) -> findings` that is asked of each step."""

    def register(check: Check) -> Check:
        STEP_CHECKS[id] = norm(id, source=source, about=about)(check)
        return STEP_CHECKS[id]

    return register


def rank_norm(id: str, *, source: str, about: About = About.ITSELF) -> Callable[[RankCheck], Check]:
    """Register a check `(step, rank, event) -> finding` that is asked of each rank of a step."""

    def register(check: RankCheck) -> Check:
        @functools.wraps(check)
        def of_ranks(step: Any) -> Iterator[Finding]:
            found = (check(step, rank, event) for rank, event in step.events.items())
            return filter(None, found)

        return step_norm(id, source=source, about=about)(of_ranks)

    return register


def is_must(finding: Finding) -> bool:
    """Return whether a finding decides the exit status."""
    return not finding.is_advice and NORMS[finding.norm].strength is Strength.MUST
