"""Diagnosis: which known fault explains what failed, by the signatures of the near-misses.

Failed clauses with their symptoms are compared with each near-miss's signature: what both show
speaks for it, the rarer the more; what it would show and what passed speaks against it. The best
one explains its share, and the rest is asked about again. A near-miss is named only where it fits
well (`MUCH` of its signature is there) and better than any other; everything else stays
unexplained, and nothing is forced.

What no known fault explains has a family still (`families.toml`): each clause and each symptom
speaks of the families that a reader found most likely from its sentence alone, and they vote, as do
the near-misses that fail the same clause in the same way.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from spec_tests.rig.outcomes import Outcome

PATH = Path(__file__).with_name("signatures.json")
FAMILIES = Path(__file__).parents[2] / "impostors" / "families.toml"
"""Near-misses by family."""

MUCH = 0.6
"""Share of a signature, by weight, that must be found before its near-miss is named."""

QUICK_SHARE, QUICK_S = 0.95, 3.0
"""Share of a chapter's near-misses that a quick run rejects, if it can in so many seconds."""

_VOTES = (1.0, 0.6, 0.4)
"""What a family's place among those that a clause speaks of counts."""

_OF_A_SYMPTOM, _OF_A_HANG = 0.6, 1.5
"""What the vote of a symptom, and that of a hang, counts beside the clause's."""

_OTHERWISE = 0.35
"""What a clause counts that fails as in the signature, with another symptom."""


Signature = dict[str, str]
"""Failed clause to symptom."""


@dataclass(frozen=True)
class Signatures:
    """What the file holds.

    Attributes:
        torch: the version with which they were taken.
        of: near-miss to its signature.
        does: near-miss to what it does wrong, so that nobody has to import the catalogue for it.
        seconds: clause to what its cases of the panel take on right code.
    """

    torch: str
    of: dict[str, Signature]
    does: dict[str, str]
    seconds: dict[str, float]


def load(path: Path = PATH) -> Signatures:
    """Return the signatures in the file; none without a file."""
    if not path.is_file():
        return Signatures("", {}, {}, {})
    kept = json.loads(path.read_text())
    clauses, symptoms = kept["clauses"], kept["symptoms"]
    found = {
        name: {clauses[clause]: symptoms[shown] for clause, shown in pairs}
        for name, (_, pairs) in kept["near_misses"].items()
    }
    does = {name: words for name, (words, _) in kept["near_misses"].items()}
    return Signatures(kept["torch"], found, does, kept["seconds"])


def save(signatures: Signatures, path: Path = PATH) -> None:
    """Write the file: a line for each list, one for each near-miss."""
    clauses = sorted({clause for found in signatures.of.values() for clause in found})
    symptoms = sorted({shown for found in signatures.of.values() for shown in found.values()})
    at_clause, at_symptom = ({word: i for i, word in enumerate(w)} for w in (clauses, symptoms))
    pairs = {
        name: [[at_clause[clause], at_symptom[shown]] for clause, shown in found.items()]
        for name, found in sorted(signatures.of.items())
    }
    lines = [
        f"{json.dumps(name)}: {json.dumps([signatures.does[name], own], separators=(',', ':'))}"
        for name, own in pairs.items()
    ]
    tables = {
        "torch": signatures.torch,
        "seconds": dict(sorted(signatures.seconds.items())),
        "clauses": clauses,
        "symptoms": symptoms,
    }
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in tables.items())
    near_misses = ",\n".join(lines)
    path.write_text(f'{{\n{head}"near_misses": {{\n{near_misses}\n}}\n}}\n')


@dataclass(frozen=True)
class Gain:
    """A clause in the order of what finds most.

    Attributes:
        seconds: what it and those before it take.
        share: of the chapter's near-misses, those that it or one before it rejects.
    """

    clause: str
    seconds: float
    share: float


def by_gain(kept: Signatures, chapter: str, among: Collection[str] | None = None) -> list[Gain]:
    """Order a chapter's clauses by what they find per second that those before them do not.

    Args:
        among: the clauses that may be asked; None for all.
    """
    own = {name: found for name, found in kept.of.items() if name.startswith(f"{chapter}.")}
    left, total_s = {*own}, 0.0
    clauses = sorted(
        {clause for found in own.values() for clause in found if among is None or clause in among}
    )
    ordered: list[Gain] = []
    while left and clauses:
        found = {clause: {name for name in left if clause in own[name]} for clause in clauses}
        best = max(clauses, key=lambda clause: len(found[clause]) / _seconds(kept, clause))
        if not found[best]:
            break
        total_s += _seconds(kept, best)
        left -= found[best]
        clauses.remove(best)
        ordered.append(Gain(best, total_s, 1 - len(left) / len(own)))
    return ordered


def _seconds(kept: Signatures, clause: str) -> float:
    """What a clause takes; one that was never timed is a slow one."""
    return max(kept.seconds.get(clause, 2.0), 0.01)


@dataclass(frozen=True)
class Diagnosis:
    """A known fault that explains some failed clauses.

    Attributes:
        near_miss: its id; "" where near-misses of several families fit as well.
        signature: the clauses that it fails.
        alike: those that fail with the very symptom of the signature, not explained before.
        left: how many failed clauses were not explained before.
    """

    near_miss: str
    signature: frozenset[str]
    alike: tuple[str, ...]
    left: int


class Dictionary:
    """Signatures, with the weight of each clause: the fewer near-misses fail it, the more it says.

    Args:
        signatures: near-miss to its signature, clause to symptom.
        family: near-miss to its family; one without is of its own.
    """

    def __init__(
        self,
        signatures: Mapping[str, Mapping[str, str]],
        family: Mapping[str, str] | None = None,
    ) -> None:
        self.signatures = {name: found for name, found in signatures.items() if found}
        self._family = family or {}
        failing = Counter(clause for found in signatures.values() for clause in found)
        self._weights = {clause: 1 / (1 + math.log(n)) for clause, n in failing.items()}

    def explain(
        self,
        failed: Mapping[str, str],
        passed: Collection[str],
        *,
        without: Collection[str] = (),
    ) -> list[Diagnosis]:
        """Return the known faults that explain `failed`, the one that explains most first.

        Args:
            failed: clause to symptom.
            passed: clauses that passed; others speak neither for nor against.
            without: near-misses that may not be named.
        """
        left, found = dict(failed), []
        while left:
            ranked = [
                (score, fit, name)
                for name, signature in self.signatures.items()
                if name not in without
                for score, fit in [self._fit(signature, left, failed, passed)]
                if fit >= MUCH
            ]
            if not ranked:
                break
            score, _, name = max(ranked)
            signature = self.signatures[name]
            alike = tuple(clause for clause in signature if left.get(clause) == signature[clause])
            tied = [each for other, _, each in ranked if math.isclose(score, other)]
            is_one_kind = len({self._family.get(each, each) for each in tied}) == 1
            named = name if is_one_kind else ""  # else who knows
            found.append(Diagnosis(named, frozenset(signature), alike, len(left)))
            for clause in alike:
                del left[clause]
        return found

    def _fit(
        self,
        signature: Mapping[str, str],
        left: Mapping[str, str],
        failed: Mapping[str, str],
        passed: Collection[str],
    ) -> tuple[float, float]:
        """Return how much it would explain of what is left, and how much of it is there."""
        gained = shown = judged = 0.0
        for clause, symptom in signature.items():
            weight = self._weights[clause]
            if clause in failed:
                likeness = 1.0 if failed[clause] == symptom else _OTHERWISE
                shown += weight * likeness
                judged += weight
                gained += weight * likeness * (clause in left)
            elif clause in passed:
                judged += weight
                gained -= weight
        same = any(left.get(clause) == symptom for clause, symptom in signature.items())
        return (gained, shown / judged) if same and gained > 0 else (0.0, 0.0)


FEW = 3
"""Failed clauses of which one that a near-miss fails alone may have its name."""


def is_telling(known: Diagnosis, failed: Mapping[str, str]) -> bool:
    """False for what any fault may show: one clause of many, or one whose symptom has no name."""
    if len(known.alike) > 1:
        return True
    return known.left <= FEW and not failed[known.alike[0]].startswith("other: ")


@dataclass(frozen=True)
class Families:
    """What kinds of faults there are, and what speaks of them.

    Attributes:
        says: family to what is wrong, in words.
        clauses: clause to the families of which its failure speaks, the most likely first.
        symptoms: symptom to such families; a symptom without a name speaks of none.
    """

    says: dict[str, str]
    clauses: dict[str, str]
    symptoms: dict[str, str]

    def of(self, failed: Mapping[str, str], *, without: Collection[str] = ()) -> list[str]:
        """Return the families of which a fault that fails these clauses may be, most likely first.

        A clause counts the more, the fewer near-misses fail it: what many fail says little.

        Args:
            failed: clause to symptom.
            without: near-misses that are not to be counted.
        """
        votes: defaultdict[str, float] = defaultdict(float)
        for clause, symptom in failed.items():
            failing = {name: shown for name, shown in _failing(clause) if name not in without}
            alike = [name for name, shown in failing.items() if shown == symptom]
            weight = 1 / max(1, len(failing)) ** 2
            for family, vote in zip(self.clauses.get(clause, "").split(), _VOTES, strict=False):
                votes[family] += weight * vote
            for name in alike:
                votes[family_of()[name]] += weight / len(alike)
            weight *= _OF_A_HANG if symptom == Outcome.HANG else _OF_A_SYMPTOM
            for family, vote in zip(self.symptoms.get(symptom, "").split(), _VOTES, strict=False):
                votes[family] += weight * vote
        return sorted(votes, key=lambda family: (-votes[family], family))


@functools.cache
def families() -> Families:
    """Return the families that come with the suite."""
    return Families(**tomllib.loads(PATH.with_name("families.toml").read_text()))


@functools.cache
def family_of() -> dict[str, str]:
    """Return the family of each near-miss."""
    kept = tomllib.loads(FAMILIES.read_text())
    return {name: family for family, own in kept.items() for name in own["near_misses"]}


@functools.cache
def _failing(clause: str) -> tuple[tuple[str, str], ...]:
    """The near-misses that fail a clause, each with the symptom."""
    return tuple((name, own[clause]) for name, own in _kept().of.items() if clause in own)


@functools.cache
def dictionary() -> Dictionary:
    """Return the signatures that come with the suite."""
    return Dictionary(_kept().of, family_of())


def does(near_miss: str) -> str:
    """Return what a near-miss does wrong, in a sentence."""
    return _kept().does.get(near_miss, "")


def of_another_torch(version: str) -> list[str]:
    """Return a line that says so if the signatures were taken with another torch than this."""
    minor, taken = (each.split(".")[:2] for each in (version, _kept().torch))
    if not version or minor == taken:
        return []
    return [
        f"(what follows `like` was learned with torch {_kept().torch}; this is torch {version})",
    ]


@functools.cache
def ranks(chapter: str) -> dict[str, int]:
    """Return the places of a chapter's clauses in the order of `by_gain`."""
    return {each.clause: place for place, each in enumerate(by_gain(_kept(), chapter))}


def quick(chapter: str, among: Collection[str]) -> list[Gain]:
    """Return the clauses with which to end where little time is, out of `among`: see `by_gain`."""
    found: list[Gain] = []
    for each in by_gain(_kept(), chapter, among):
        if found and (found[-1].share >= QUICK_SHARE or each.seconds > QUICK_S):
            break
        found.append(each)
    return found


@functools.cache
def _kept() -> Signatures:
    return load()
