"""Declared deviations of an implementation, in one TOML file beside it, that go stale loudly.

`mine.toml` beside `mine.py` (`spec_tests/impls/torch.toml` for PyTorch's own) holds entries like

    [[deviation]]
    clause = "ddp.no-sync.nests"   # the exact id
    case = "*-w4-*"                # optional: glob over the case; without it every case is meant
    reason = "forward decides whether the next backward communicates"
    link = "https://github.com/pytorch/pytorch/issues/..."      # optional
    raises = "hang"                # optional: failed, hang, died, or text that the message contains
    when = ">=2.11,<2.14"          # optional: versions of torch that deviate
    expires = 2027-01-01           # optional: a date, or a version of torch ("2.14")

An entry says of *each* case that it matches: this fails. So a case that fails as declared becomes
an expected failure, and a case that passes becomes an unexpected pass, which decides like a
failure: narrow `case`, or delete the entry. Without `raises` an ordinary failure is meant; hangs
and deaths must be declared by their word. What fails in another way than declared stays failed.

An entry that matches no result of a full run, or that has expired, is a problem of the run. An
entry whose `when` excludes the installed torch is asleep: it neither excuses nor goes stale.

An implementation that is built on PyTorch's own wrappers has their deviations, too. At the head

    inherits = "torch"

adds PyTorch's entries after the file's own. An inherited entry excuses a case that fails as
declared and nothing else: a case that passes stays passed, and the entry is never stale.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from spec_tests.rig.outcomes import Event, Outcome

_REQUIRED = ("clause", "reason")
_IDENTITY = ("clause", "case", "when")
_OPTIONAL = ("case", "link", "raises", "when", "expires")
_TORCH = Path(__file__).resolve().parents[2] / "impls" / "torch.toml"
_FAILURES = (Outcome.FAILED, Outcome.HANG, Outcome.DIED)


@dataclass(frozen=True)
class Deviation:
    """One entry: which cases fail, why, and until when."""

    clause: str
    reason: str
    case: str = "*"
    link: str = ""
    raises: str = Outcome.FAILED
    when: str = ""
    expires: date | str = ""
    where: str = ""
    """File and number of the entry, for messages."""
    is_inherited: bool = False
    """Whether the entry was declared for the implementation that this one is built on."""

    def is_active(self, torch_version: str) -> bool:
        """Whether the installed torch is one that deviates."""
        return SpecifierSet(self.when).contains(torch_version, prereleases=True)

    def has_expired(self, torch_version: str, today: date) -> bool:
        """Whether the date has come, or the version of torch."""
        if isinstance(self.expires, date):
            return today >= self.expires
        return bool(self.expires) and Version(torch_version) >= Version(self.expires)

    def matches(self, clause: str, case: str) -> bool:
        """Whether the entry speaks of this case."""
        return clause == self.clause and fnmatchcase(case, self.case)

    def foresees(self, outcome: Outcome, message: str, transport: str = "") -> bool:
        """Whether a case that failed did so in the declared way.

        What ends or blocks live ranks is in a simulated world a mismatch or a deadlock.
        """
        if transport == "sim" and self.raises in (Outcome.DIED, Outcome.HANG):
            return True
        if self.raises in _FAILURES:
            return outcome == self.raises
        return outcome is Outcome.FAILED and self.raises in message


def load(path: str | Path) -> list[Deviation]:
    """Read and check an expectations file.

    Returns:
        The file's own entries, then those that it inherits.

    Raises:
        ValueError: The file is no TOML, or an entry has an unknown key, lacks a required one,
            repeats another, or holds a value of a wrong form, or `inherits` names another file
            than PyTorch's. The message names file and entry.
        OSError: The file cannot be read.
    """
    path = Path(path)
    return [
        replace(entry, is_inherited=file != path)
        for file, document in documents(path)
        for entry in _entries(document, file)
    ]


def documents(file: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a file and what is in it, then the file that it inherits; raise as `load` does."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected TOML, got {error}; correct the file") from error
    base = document.pop("inherits", None)
    if base not in (None, "torch"):
        raise ValueError(f'{file}: expected `inherits` to be "torch", got {base!r}; correct it')
    yield file, document
    if base is not None:
        yield from documents(_TORCH)


def _entries(document: dict[str, Any], file: Path) -> list[Deviation]:
    document.pop("situation", None)  # of drawn programs, see spec_tests/programs/declared.py
    entries = document.pop("deviation", [])
    if document or not isinstance(entries, list):
        raise ValueError(
            f"{file}: expected [[deviation]] entries, at the head `inherits`, and nothing else, "
            f"got {', '.join(document) or 'a single [deviation]'}; remove or rename it"
        )
    deviations: list[Deviation] = []
    for number, entry in enumerate(entries, start=1):
        deviation = _parse(entry, f"{file}, entry {number}")
        for other in deviations:
            if all(getattr(other, key) == getattr(deviation, key) for key in _IDENTITY):
                raise ValueError(
                    f"{deviation.where}: expected one entry per clause, case and `when`, got "
                    f"{deviation.clause!r} again ({other.where}); merge the two"
                )
        deviations.append(deviation)
    return deviations


def find(
    deviations: Iterable[Deviation], clause: str, case: str, *, torch_version: str
) -> Deviation | None:
    """The deviation that speaks of a case under this torch: the first in the file, or None."""
    for deviation in deviations:
        if deviation.matches(clause, case) and deviation.is_active(torch_version):
            return deviation
    return None


def expect(result: Event, deviation: Deviation | None) -> Event:
    """The result as it counts once the deviation is known; the argument is not changed."""
    if deviation is None:
        return result
    outcome = Outcome(result["outcome"])
    if outcome is Outcome.PASSED and deviation.is_inherited:
        return result
    if outcome is Outcome.PASSED:
        message = (
            f"[{result['clause']}]  expected a failure ({deviation.raises}) in case "
            f"{result['case']!r}, as {deviation.where} declares, got a pass\n"
            f"declared: {deviation.reason}\n"
            "do: delete the entry, or narrow its `case` to what still fails"
        )
        return {**result, "outcome": str(Outcome.UNEXPECTED_PASS), "message": message}
    if outcome not in _FAILURES:
        return result
    if deviation.foresees(outcome, result["message"], result.get("transport", "")):
        reason = " ".join(filter(None, [deviation.reason, deviation.link]))
        message = f"expected: {reason}\n{result['message']}"
        return {**result, "outcome": str(Outcome.EXPECTED_FAILURE), "message": message}
    message = f"{result['message']}\n(declared as {deviation.raises!r} at {deviation.where})"
    return {**result, "message": message}


def problems(
    deviations: Sequence[Deviation],
    results: Iterable[Event],
    *,
    torch_version: str,
    today: date,
    is_full_run: bool,
    unselected: Collection[str] = (),
) -> list[str]:
    """One line for each entry of an implementation that has expired or matches no result.

    Args:
        deviations: As `load` gives them.
        results: Result events of that implementation alone.
        torch_version: The installed torch, for `when` and `expires`.
        today: For `expires`.
        is_full_run: Whether nothing was deselected by hand. Only then can it be said that an entry
            matches nothing; a run of one chapter would find the entries of all others stale.
        unselected: Ids of clauses that even a full run leaves out (those above the level): their
            entries are not judged. An id that no clause bears is not among them, and is found.
    """
    cases = [(result["clause"], result["case"]) for result in results]
    matched = {find(deviations, *case, torch_version=torch_version) for case in cases}
    said = []
    for entry in deviations:
        # A partial run judges the entries that it met; a full run judges them all.
        is_missed = entry not in matched
        if is_missed and (not is_full_run or entry.clause in unselected):
            continue
        if entry.is_inherited or not entry.is_active(torch_version):
            continue
        if entry.has_expired(torch_version, today):
            said.append(
                f"{entry.where}: {entry.clause} expired ({entry.expires}; today {today}, torch "
                f"{torch_version}): look whether it still holds, then delete it or move the date"
            )
        if is_missed:
            said.append(
                f"{entry.where}: expected a result of clause {entry.clause!r}, case "
                f"{entry.case!r}, got none in a full run, or an earlier entry speaks of them all; "
                "correct the id or the glob, or delete the entry"
            )
    return said


def _parse(entry: Any, where: str) -> Deviation:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a table, got {entry!r}; write [[deviation]]")
    unknown = [key for key in entry if key not in (*_REQUIRED, *_OPTIONAL)]
    if unknown:
        raise ValueError(
            f"{where}: expected keys of {', '.join((*_REQUIRED, *_OPTIONAL))}; "
            f"got {', '.join(unknown)}; remove or rename"
        )
    for key in _REQUIRED:
        if key not in entry:
            raise ValueError(f"{where}: expected {key!r}, got none; every deviation must say it")
    for key, value in entry.items():
        is_date = key == "expires" and type(value) is date
        if not is_date and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{where}: expected {key!r} to be a text, got {value!r}; put one")
    deviation = Deviation(**{**entry, "where": where, "expires": _expiry(entry, where)})
    try:
        deviation.is_active("2.11")
    except InvalidSpecifier as error:
        raise ValueError(
            f'{where}: expected `when` as versions of torch like ">=2.11,<2.14", '
            f"got {deviation.when!r}; correct it"
        ) from error
    return deviation


def _expiry(entry: dict[str, Any], where: str) -> date | str:
    """A date (TOML's own or as text), or a version of torch as text; checked here, once."""
    value: date | str = entry.get("expires", "")
    if isinstance(value, date) or not value:
        return value
    try:
        return date.fromisoformat(value)
    except ValueError:
        pass  # no date: then a version
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(
            f"{where}: expected `expires` as a date (2027-01-01) or a version of torch "
            f'("2.14"), got {value!r}; correct it'
        ) from error
    return value
