"""Which near-misses stay: those that prove something that no other one proves.

    python -m spec_tests.museum.rule        those that fall, and why

A near-miss falls if another one fails the same clauses or fewer of them: whatever clauses reject
the other one reject it as well, as far as signatures tell: they lack slow clauses, those of other
chapters, and those of simulated ranks or a GPU that no card names. It stays nevertheless

- if it is the only one that names one of its clauses,
- if it names a clause that runs seeds (`*.programs.*`): one such clause stands for many situations,
  and two near-misses that fail it may fail in different ones,
- if it comes from a public issue or pull request, unless another such one fails the same clauses,
- if it shows a listed bug (`bugs`), or if `STAYS` says why.

What a near-miss fails is its signature (`signatures`), and the clauses that it names. Of two that
fail the same, the one with a public source stays, or else the one with fewer lines. What stays is
the minimal set of Ammann, Delamaro and Offutt 2014, Establishing Theoretical Minimal Sets of
Mutants, and the exceptions.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Collection

from spec_tests.museum import bugs, near_misses, page
from spec_tests.museum.card import Impostor
from spec_tests.museum.matrix import by_id
from spec_tests.rig.report.diagnosis import load

_NAMES_KINDS = "without it reports name fewer kinds of faults, see `signatures --accuracy`"
STAYS = {
    "attention.equal-lengths-only": "tests/rig/test_attention.py",
    "attention.whole-tiles-only": "tests/rig/test_attention.py",
    "checkpoint.no-buffers": _NAMES_KINDS,
    "clip.adds-norms": "tests/rig/test_diagnosis.py",
    "data.same-on-all-ranks": _NAMES_KINDS,
    "ddp.drops-last-bucket": _NAMES_KINDS,
    "ddp.gathers-by-completion": "tests/rig/test_sim.py",
    "ddp.no-broadcast": _NAMES_KINDS,
    "ddp.sum-for-mean": "the example of README.md",
    "zero1.drops-empty-groups": _NAMES_KINDS,
}
"""Near-misses that would fall, and what needs them."""


def falling(exceptions: Collection[str] = STAYS) -> dict[str, str]:
    """Return the near-misses that fall, each with the one that makes it redundant."""
    cards = near_misses()
    signatures, clauses = load().of, by_id().keys()
    fails = {c.id: clauses & signatures.get(c.id, {}) | {*c.rejected_by} for c in cards}
    names = {c.id: {*c.rejected_by} for c in cards}
    public = {c.id for c in cards if page.is_reported(c)}
    stays = {*exceptions, *(bug.card for bug in bugs.bugs().values())}
    stays |= {name for name, own in names.items() if any(".programs." in c for c in own)}
    cards.sort(key=lambda c: (c.id in public, -len(fails[c.id]), -_lines(c), c.id))
    left, found = [card.id for card in cards], []
    for name in [*left]:
        others, own = [other for other in left if other != name], fails[name]
        is_inside = any(fails[other] <= own for other in others)
        is_source = name in public and not any(fails[o] == own for o in others if o in public)
        named = {clause for other in others for clause in names[other]}
        if is_inside and not is_source and name not in stays and names[name] <= named:
            found.append(name)
            left.remove(name)
    # What made one of them redundant may have fallen itself, for one that stays.
    return {name: next(other for other in left if fails[other] <= fails[name]) for name in found}


def _lines(card: Impostor) -> int:
    """Return how many lines of code a near-miss takes."""
    if card.patches:
        return sum(f"{before}{after}".count("\n") for _, before, after in card.patches)
    return len(inspect.getsource(card.code).splitlines()) if card.code else 0


def main() -> int:
    """Print the near-misses that fall; 1 if there are any."""
    argparse.ArgumentParser(
        prog="python -m spec_tests.museum.rule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    found = falling()
    for name, other in found.items():
        print(f"{name} falls: {other} fails the same clauses, or fewer of them")
    print(f"{len(found)} near-misses fall")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
