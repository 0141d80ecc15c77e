"""Declared deviations: what is refused when read, what they do to results, how they go stale."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from spec_tests.programs import declared
from spec_tests.rig.judge import expectations
from spec_tests.rig.judge.expectations import Deviation, expect, find, load, problems
from spec_tests.rig.outcomes import Event

CLAUSE = "ddp.gradients.mean"
FULL = f'[[deviation]]\nclause = "{CLAUSE}"\nreason = "known"\n'


RUN: dict[str, Any] = {
    "torch_version": "2.13.0+cpu",
    "today": date(2026, 6, 1),
    "is_full_run": True,
}


def result(outcome: str, case: str = "w2", *, clause: str = CLAUSE, message: str = "") -> Event:
    return {"clause": clause, "case": case, "outcome": outcome, "message": message}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------- reading


def test_every_key_is_read(tmp_path: Path):
    more = 'case = "*-w4-*"\nlink = "https://example.org"\nraises = "hang"\nwhen = ">=2.11,<2.14"\n'
    path = written(tmp_path, FULL + more + "expires = 2027-01-01\n")
    assert load(path) == [
        Deviation(
            *(CLAUSE, "known", "*-w4-*", "https://example.org", "hang", ">=2.11,<2.14"),
            expires=date(2027, 1, 1),
            where=f"{path}, entry 1",
        )
    ]


REFUSED = {
    "deviation = [": "expected TOML, got",
    "[deviation]\n": r"expected \[\[deviation\]\] entries, at the head `inherits`, and nothing",
    "[[deviations]]\n": "nothing else, got deviations; remove or rename",
    '[[deviation]]\nclause = "a.b"\n': "entry 1: expected 'reason', got none",
    FULL + "resaon = 'x'\n": "expected keys of clause, reason, .*; got resaon",
    '[[deviation]]\nclause = "a.b"\nreason = " "\n': "expected 'reason' to be a text",
    FULL + "case = 4\n": "expected 'case' to be a text, got 4",
    FULL + "when = '2.x'\n": "expected `when` as versions of torch",
    FULL + "expires = 'soon'\n": "expected `expires` as a date",
    FULL + FULL: "entry 2: expected one entry per clause, case and `when`, got .* again",
    "deviation = [3]\n": "entry 1: expected a table, got 3",
    "inherits = 'solution'\n": "expected `inherits` to be \"torch\", got 'solution'",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items())
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text, said):
    with pytest.raises(ValueError, match=said) as caught:
        load(written(tmp_path, text + "\n"))
    assert str(caught.value).startswith(str(tmp_path / "mine.toml"))
    if "inherits" in text:  # its situations are read by another one
        with pytest.raises(ValueError, match=said):
            declared.load(tmp_path / "mine.toml")


def test_a_file_s_own_entries_come_before_those_that_it_inherits(tmp_path: Path, monkeypatch):
    torchs = load(written(tmp_path, 'inherits = "torch"\n'))
    assert "ddp.accumulation.backward-twice" in {entry.clause for entry in torchs}
    (tmp_path / "torch.toml").write_text(FULL, encoding="utf-8")
    monkeypatch.setattr(expectations, "_TORCH", tmp_path / "torch.toml")
    found = load(written(tmp_path, 'inherits = "torch"\n' + FULL + 'raises = "hang"\n'))
    assert [(one.raises, one.is_inherited) for one in found] == [("hang", False), ("failed", True)]
    done = applied(found, result("hang"), result("passed", "w4"))
    assert [one["outcome"] for one in done] == ["expected_failure", "unexpected_pass"]


# --------------------------------------------------------------------------------------- applying


def applied(deviations: list[Deviation], *results: Event) -> list[Event]:
    """The results as they count, each by the first entry that speaks of it."""
    version = RUN["torch_version"]
    declared = [find(deviations, r["clause"], r["case"], torch_version=version) for r in results]
    return [expect(*each) for each in zip(results, declared, strict=True)]


BOTH = result("failed"), result("passed", "w4")
FOURTH, SECOND = "a-w4-b", "a-w2-b"
RAISES = [
    ("failed", result("failed"), "expected_failure"),
    ("failed", result("hang"), "hang"),
    ("hang", result("hang"), "expected_failure"),
    ("hang", result("died"), "died"),
    ("hang", result("failed"), "failed"),
    ("RuntimeError", result("failed", message="rank 1: RuntimeError: no"), "expected_failure"),
    ("RuntimeError", result("failed", message="rank 1: TypeError: no"), "failed"),
    ("RuntimeError", result("died", message="RuntimeError"), "died"),
]
"""Declared way of failing, what was found, and what that counts as."""


@pytest.mark.parametrize(
    ("entry", "found", "counts_as"),
    [
        ({}, BOTH, "expected_failure unexpected_pass"),
        ({"is_inherited": True}, BOTH, "expected_failure passed"),
        (
            {"case": "*-w4-*"},
            (result("failed", FOURTH), result("passed", SECOND), result("failed", SECOND)),
            "expected_failure passed failed",
        ),
        ({"when": "<2.13", "expires": date(2020, 1, 1)}, BOTH, "failed passed"),
        *(({}, (result(word),), word) for word in ("error", "blocked", "not_offered")),
        *(({"raises": raises}, (found,), counts_as) for raises, found, counts_as in RAISES),
    ],
)
def test_what_an_entry_makes_of_the_cases_of_its_clause(entry, found, counts_as: str):
    entries = [Deviation(CLAUSE, "known", **entry)]
    done = applied(entries, *found)
    assert [one["outcome"] for one in done] == counts_as.split()
    assert problems(entries, found, **RUN) == []
    if "raises" in entry and counts_as != "expected_failure":
        assert f"declared as {entry['raises']!r}" in done[0]["message"]
    else:
        assert applied(entries, *done) == done, "applying twice changes nothing more"


def test_an_entry_says_why_a_failure_is_expected_and_what_to_do_with_a_pass():
    entry = Deviation(CLAUSE, "known", link="7", where="mine.toml, entry 1")
    failed, passed = applied([entry], result("failed", message="2x"), result("passed", "w4"))
    assert failed["message"] == "expected: known 7\n2x"
    assert passed["message"] == (
        f"[{CLAUSE}]  expected a failure (failed) in case 'w4', as mine.toml, entry 1 declares, "
        "got a pass\ndeclared: known\n"
        "do: delete the entry, or narrow its `case` to what still fails"
    )


UNMATCHED = "expected a result of clause "


@pytest.mark.parametrize(
    ("entry", "run", "said"),
    [
        ({"expires": date(2026, 6, 1)}, {}, "expired"),
        ({"expires": date(2026, 6, 2)}, {}, ""),
        ({"expires": "2.13"}, {}, "expired"),
        ({"expires": "2.14"}, {}, ""),
        ({"clause": "ddp.gradients"}, {}, UNMATCHED),  # ids match exactly
        ({"clause": "ddp.gradients"}, {"is_full_run": False}, ""),  # it may not have been selected
        ({"clause": "ddp.above"}, {"unselected": {"ddp.above"}}, ""),
        ({"clause": "ddp.misspelt"}, {"unselected": {"ddp.above"}}, UNMATCHED),
        ({"case": "w8", "when": ">=2.14.0.dev0"}, {"torch_version": "2.14.0.dev1"}, UNMATCHED),
        ({"expires": "2.0", "is_inherited": True}, {}, ""),
        ({"case": "w8", "is_inherited": True}, {}, ""),
    ],
)
def test_an_entry_that_has_expired_or_matches_no_result_is_a_problem(entry, run, said: str):
    stale = Deviation(**{"clause": CLAUSE, "reason": "known", **entry})
    found = problems([stale], [result("failed")], **{**RUN, **run})
    assert [said in problem for problem in found] == [True] * bool(said)
