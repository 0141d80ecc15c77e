"""The symptom of a finding: what its message says, without the numbers and names of one run.

Two findings of the same fault say it of other tensors, with other values. A symptom is what they
have in common, as words that a program can compare:

    hang                                   and died: how the call ended
    raised TypeError                       in the code that is judged
    likely: summed and not divided by ...  the diagnosis of a wrong value
    more: live bytes after the forward     more than expected, "less" or "other" of what
"""

from __future__ import annotations

import re

from spec_tests.rig.outcomes import Outcome

RAISED = re.compile(r"rank .*? raised ((?:\w+)(?:: .*)?)$")
_KIND = re.compile(r"rank .*? raised (\w+)(?:: .*| at .*)?$")  # one without words has a place
_FOLDERS = re.compile(r"(?<!\S)/\S*/")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_EXPECTED = re.compile(r"expected (.*?)(?:, got |, which is |$)(.*)")


def symptom(outcome: str, message: str) -> str:
    """Return the symptom of one case: a message and what the case came to."""
    if outcome in (Outcome.HANG, Outcome.DIED):
        return outcome
    headline = headline_of(message)
    if raised := _KIND.match(headline):
        return f"raised {raised[1]}"
    if diagnosis := likely(message):
        return f"likely: {_NUMBER.sub('#', diagnosis)}"
    found = _EXPECTED.search(headline)
    if found is None:
        # Where a file lies is one machine's matter.
        return f"other: {_NUMBER.sub('#', _FOLDERS.sub('', headline))[:60]}"
    what = re.split(r"[\d\[{'(]|None|True|False", found[1], maxsplit=1)[0].strip(" ,:")
    return f"{_direction(found[1], found[2])}: {what[:60]}"


def headline_of(message: str) -> str:
    """Return the line of a message that says what was found; the one before is the clause's."""
    lines = message.splitlines()
    return lines[1] if len(lines) > 1 else message


def likely(message: str) -> str:
    """Return the diagnosis in a message: what stands after `likely:`, or nothing."""
    lines = (line for line in message.splitlines() if line.startswith("likely: "))
    return next(lines, "").removeprefix("likely: ").strip()


def _direction(expected: str, got: str) -> str:
    """Whether there was more or less than expected, of what is counted or listed."""
    if "[]" in expected and "[" in got:
        return "more"
    if got.startswith(("[]", "None", "nothing")):
        return "less"
    numbers = _NUMBER.search(expected), _NUMBER.match(got)
    if not all(numbers):
        return "other"
    wanted, seen = (float(number[0]) for number in numbers if number)
    return "more" if seen > wanted else "less" if seen < wanted else "other"
