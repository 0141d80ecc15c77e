"""Impostors: deliberate near-misses that the clauses must reject, and variants they must not.

A clause that nothing fails proves nothing. For every clause at least one impostor differs from
right code by a line or a method, is made of a bug that somebody really had, and must be rejected by
the clauses that its card names. Benign variants are right but unusual and must be accepted. Two
controls run each time: the null impostor (nothing is changed, nothing may be rejected) and the
forced failure (everything raises, everything must be rejected).

    python -m spec_tests --impl impostor:ddp.sum-for-mean
    python -m spec_tests impostors                  every impostor against the clauses it names
    python -m spec_tests impostors --accepted       benign variants, and a sample of other chapters
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from spec_tests.contract import FUNCTIONS
from spec_tests.museum import bugs, catalogue
from spec_tests.museum.card import Functions, Impostor
from spec_tests.museum.patching import forget, package_of, patched
from spec_tests.rig.target import Target, import_target


class _RaisesAlways:
    @classmethod
    def functions(cls) -> Functions:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("forced failure")

        return dict.fromkeys(FUNCTIONS, fail)


FORCED_FAILURE = Impostor(
    "control.forced-failure",
    "Every function raises.",
    "A control: machinery that rejects nothing would accept it.",
    "",
    ("ddp.gradients.mean",),
    code=_RaisesAlways,
)

REFERENCE = Impostor(
    "control.reference",
    "Nothing is changed.",
    "A control: the implementation below, as it is.",
    "",
    (),
)

CATALOGUE: dict[str, Impostor] = {**catalogue.load(), FORCED_FAILURE.id: FORCED_FAILURE}


def find(words: str) -> Impostor:
    """The impostor of that id.

    Raises:
        ValueError: naming those that are near.
    """
    if words == REFERENCE.id:
        return REFERENCE
    if words.startswith("mutant."):
        from spec_tests.museum import mutants

        return mutants.find(words)
    known = bugs.cards() if words.startswith(bugs.PREFIX) else CATALOGUE
    if words not in known:
        near = get_close_matches(words, known, n=3, cutoff=0.3)
        raise ValueError(f"no impostor {words!r}; close to it: {', '.join(near) or 'none'}")
    return known[words]


def near_misses() -> list[Impostor]:
    """Return all near-misses: neither benign variants nor the controls."""
    found = CATALOGUE.values()
    return [each for each in found if not each.is_benign and each is not FORCED_FAILURE]


def rejected_by() -> dict[str, Sequence[str]]:
    """Clause id to the ids of the impostors that name it."""
    table: dict[str, list[str]] = {}
    for impostor in near_misses():
        for clause in impostor.rejected_by:
            table.setdefault(clause, []).append(impostor.id)
    return {clause: tuple(ids) for clause, ids in table.items()}


def stories() -> dict[str, list[dict[str, str]]]:
    """Clause id to the cards of the impostors that it rejects, as a report tells them."""
    table: dict[str, list[dict[str, str]]] = {}
    for clause, ids in rejected_by().items():
        cards = (CATALOGUE[id] for id in ids)
        table[clause] = [
            {"impostor": c.id, "does": c.does, "seen": c.seen, "unseen": c.unseen} for c in cards
        ]
    return table


def counts() -> tuple[int, int]:
    """How many near-misses there are, and how many benign variants; controls are neither."""
    return len(near_misses()), sum(impostor.is_benign for impostor in CATALOGUE.values())


def build(words: str, target: Target) -> Any:
    """The implementation below with the impostor's functions or patches. Called in ranks only."""
    impostor = find(words)
    patches = impostor.patches if impostor.is_here and impostor.functions is None else ()
    for module, _, _ in patches:
        forget(package_of(module, target.module))
    with patched(patches):
        base = import_target(target)
        for module, _, _ in patches:
            importlib.import_module(module)  # some are imported on first use
    kept = {name: getattr(base, name) for name in dir(base) if not name.startswith("_")}
    own = impostor.functions() if impostor.functions else {}
    return SimpleNamespace(**{**kept, **own})
