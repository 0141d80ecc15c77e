"""Diagnosis: of which kind a fault is, by what near-misses fail; nothing where that is not certain.

All that one function of an implementation fails, with the symptoms, is held against the signatures
of the near-misses and against `families.toml`, in which each clause and each symptom speaks of the
families that a reader found most likely from its sentence alone. Four voices make odds (`VOICES`).
A family is named where it is nearly certain (`ONE`), two where one of both is (`TWO`), and none
elsewhere: a wrong word costs more than none. What an error says is never added to: see `causes`.

A near-miss is named only where the same clauses fail in nearly the same way, nearly all others
pass, and its family is the one that is named.

Voices and bounds were fitted to near-misses that were left out, and tried on chapters that were
left out. What they come to: `python -m spec_tests signatures --accuracy`.
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
from typing import Any

from spec_tests.rig.outcomes import Outcome

PATH = Path(__file__).with_name("signatures.json")
FAMILIES = Path(__file__).parents[2] / "museum" / "families.toml"
"""Near-misses by family."""

NEAR = 0.9
"""Share of what fails, and of a signature, that must agree before its near-miss is named."""

ONE, TWO = 0.9, 0.83
"""Odds from which one family is named, and from which two together are."""

VOICES = {"rare clauses": 5.0, "all clauses": 2.2, "symptoms": 2.6, "chapter": 4.2}
"""What each voice counts, see `Families.odds`."""

QUICK_SHARE, QUICK_S = 0.95, 3.0
"""Share of a chapter's near-misses that a quick run rejects, if it can in so many seconds."""

FEW_JUDGED = 8
"""Of a function of which fewer clauses were judged, no kind of fault is named."""

_VOTES = (1.0, 0.6, 0.4)
"""What a family's place among those that a clause speaks of counts."""

_OF_A_SYMPTOM, _OF_A_HANG = 0.6, 1.5
"""What the vote of a symptom, and that of a hang, counts beside the clause's."""

_Votes = defaultdict[str, float]
"""Family to what was voted for it."""

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
    near_misses = kept["near_misses"].items()
    found = {name: own["fails"] for name, own in near_misses}
    does = {name: own["does"] for name, own in near_misses}
    return Signatures(kept["torch"], found, does, kept["seconds"])


def save(signatures: Signatures, path: Path = PATH) -> None:
    """Write the file: a line for each clause and each near-miss, so that branches can be merged."""
    near_misses = {
        name: {"does": signatures.does[name], "fails": dict(sorted(found.items()))}
        for name, found in signatures.of.items()
    }
    tables: dict[str, Mapping[str, Any]] = {
        "seconds": signatures.seconds,
        "near_misses": near_misses,
    }
    parts = [f'"torch": {json.dumps(signatures.torch)}']
    for title, table in tables.items():
        lines = (f"{json.dumps(key)}: {json.dumps(own)}" for key, own in sorted(table.items()))
        parts.append(f'"{title}": {{\n' + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


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


class Dictionary:
    """Signatures, with the weight of each clause: the fewer near-misses fail it, the more it says.

    Args:
        signatures: near-miss to its signature, clause to symptom.
    """

    def __init__(self, signatures: Mapping[str, Mapping[str, str]]) -> None:
        self.signatures = signatures
        failing = Counter(clause for found in signatures.values() for clause in found)
        self._weights = {clause: 1 / (1 + math.log(n)) for clause, n in failing.items()}

    def like(
        self, failed: Mapping[str, str], passed: Collection[str], *, without: Collection[str] = ()
    ) -> str:
        """Return the one near-miss that fails the same in the same way, or "".

        Args:
            failed: clause to symptom; of one clause alone many faults would do.
            passed: clauses that passed; others speak neither for nor against.
            without: near-misses that may not be named.
        """
        known = {name: own for name, own in self.signatures.items() if name not in without}
        fits = {name: self._fit(own, failed, passed) for name, own in known.items()}
        best = max(fits, key=lambda name: fits[name], default="")
        is_near = len(failed) > 1 and bool(best) and fits[best] >= NEAR
        return best if is_near and list(fits.values()).count(fits[best]) == 1 else ""

    def _fit(
        self, own: Mapping[str, str], failed: Mapping[str, str], passed: Collection[str]
    ) -> float:
        """Return which share, by weight, of what either of both fails is alike."""
        judged = {*failed} | {clause for clause in own if clause in passed}
        alike = {clause for clause, shown in failed.items() if own.get(clause) == shown}
        of = sum(self._weights.get(clause, 1.0) for clause in judged)
        return sum(self._weights[clause] for clause in alike) / of if of else 0.0


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

    def is_spoken_of(self, family: str, failed: Mapping[str, str]) -> bool:
        """Return whether one of these failed clauses, or its symptom, speaks of a family."""
        of_clauses = [self.clauses.get(clause, "") for clause in failed]
        of_symptoms = [self.symptoms.get(symptom, "") for symptom in failed.values()]
        return family in " ".join(of_clauses + of_symptoms).split()

    def named(self, failed: Mapping[str, str], *, without: Collection[str] = ()) -> tuple[str, ...]:
        """Return the family of a fault that fails these clauses, or two, or none: see `ONE`."""
        odds = self.odds(failed, without=without)
        first, second, *_ = [*sorted(odds, key=lambda each: (-odds[each], each)), "", ""]
        if odds.get(first, 0.0) >= ONE:
            return (first,)
        both = odds.get(first, 0.0) + odds.get(second, 0.0)
        return (first, second) if second and both >= TWO else ()

    def odds(self, failed: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, float]:
        """Return families with how likely each is for a fault that fails these clauses.

        The voices: each clause, by the inverse square of how many near-misses fail it, for what
        many fail says little; all clauses alike; what near-misses of the chapter with this symptom
        are; and what its near-misses are at all.

        Args:
            failed: clause to symptom.
            without: near-misses that are not to be counted.
        """
        heard: dict[str, _Votes] = {voice: defaultdict(float) for voice in VOICES}
        each = 1 / max(1, len(failed))
        for clause, symptom in failed.items():
            chapter = clause.partition(".")[0]
            self._ask_rare(heard["rare clauses"], clause, symptom, without)
            _rank(heard["all clauses"], self.clauses.get(clause, ""), each)
            _share(heard["symptoms"], _of_chapter(chapter, symptom), each, without, silent=1)
            _share(heard["chapter"], _of_chapter(chapter), each, without, silent=5)
        total = sum(heard["rare clauses"].values()) or 1.0
        weights = {**VOICES, "rare clauses": VOICES["rare clauses"] / total}
        scores = {
            family: math.exp(sum(weights[voice] * said[family] for voice, said in heard.items()))
            for family in {*self.says}.union(*heard.values()) - _impossible(failed)
        }
        return {family: score / sum(scores.values()) for family, score in scores.items()}

    def _ask_rare(self, votes: _Votes, clause: str, symptom: str, without: Collection[str]) -> None:
        failing = {name: shown for name, shown in _failing(clause) if name not in without}
        weight = 1 / max(1, len(failing)) ** 2
        _rank(votes, self.clauses.get(clause, ""), weight)
        _share(votes, [name for name, shown in failing.items() if shown == symptom], weight)
        weight *= _OF_A_HANG if symptom == Outcome.HANG else _OF_A_SYMPTOM
        _rank(votes, self.symptoms.get(symptom, ""), weight)


def _impossible(failed: Mapping[str, str]) -> set[str]:
    """Return the families that the symptoms rule out: less than expected is not too much."""
    is_less = bool(failed) and all(symptom.startswith("less: ") for symptom in failed.values())
    return {"too-much-sent"} if is_less else set()


def _rank(votes: _Votes, line: str, weight: float) -> None:
    """Vote for the families of a line of the file, the more for the earlier ones."""
    for family, vote in zip(line.split(), _VOTES, strict=False):
        votes[family] += weight * vote


def _share(
    votes: _Votes,
    near_misses: Collection[str],
    weight: float,
    without: Collection[str] = (),
    silent: int = 0,
) -> None:
    """Share one vote among the families of near-misses; few say less beside some silent ones."""
    own = [family_of()[name] for name in near_misses if name not in without]
    for family in own:
        votes[family] += weight / (len(own) + silent)


@functools.cache
def _of_chapter(chapter: str, symptom: str = "") -> tuple[str, ...]:
    """The near-misses of a chapter; with a symptom those that fail any clause with it."""
    return tuple(
        name
        for name, own in _kept().of.items()
        if name.startswith(f"{chapter}.") and (not symptom or symptom in own.values())
    )


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
    return Dictionary(_kept().of)


def does(near_miss: str) -> str:
    """Return what a near-miss does wrong, in a sentence."""
    return _kept().does.get(near_miss, "")


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
