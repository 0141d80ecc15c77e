"""Declared deviations: what is refused when read, what they do to results, how they go stale."""

from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest

from spec_tests.rig.judge import expectations
from spec_tests.rig.judge.expectations import Deviation, expect, find, load, problems
from spec_tests.rig.outcomes import Event

CLAUSE = "ddp.gradients.mean"
FULL = f'[[deviation]]\nclause = "{CLAUSE}"\nreason = "known"\n'


class Applied(NamedTuple):
    results: list[Event]
    problems: list[str]


def result(outcome: str, case: str = "w2", *, clause: str = CLAUSE, message: str = "") -> Event:
    return {"clause": clause, "case": case, "outcome": outcome, "message": message}


def applied(
    deviations: list[Deviation],
    *results: Event,
    torch: str = "2.13.0+cpu",
    today: date = date(2026, 6, 1),
    is_full_run: bool = True,
) -> Applied:
    declared = [find(deviations, r["clause"], r["case"], torch_version=torch) for r in results]
    replaced = [expect(*each) for each in zip(results, declared, strict=True)]
    found = problems(deviations, results, torch_version=torch, today=today, is_full_run=is_full_run)
    return Applied(replaced, found)


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


# --------------------------------------------------------------------------------------- applying


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
    assert [one["outcome"] for one in done.results] == counts_as.split()
    assert done.problems == []
    if "raises" in entry and counts_as != "expected_failure":
        assert f"declared as {entry['raises']!r}" in done.results[0]["message"]
    else:
        assert applied(entries, *done.results) == done, "applying twice changes nothing more"


def test_an_entry_says_why_a_failure_is_expected_and_what_to_do_with_a_pass():
    entry = Deviation(CLAUSE, "known", link="7", where="mine.toml, entry 1")
    found = applied([entry], result("failed", message="2x"), result("passed", "w4"))
    assert found.results[0]["message"] == "expected: known 7\n2x"
    assert found.results[1]["message"].splitlines() == [
        f"[{CLAUSE}]  expected a failure (failed) in case 'w4', as mine.toml, entry 1 declares, "
        "got a pass",
        "declared: known",
        "do: delete the entry, or narrow its `case` to what still fails",
    ]


def test_ids_match_exactly_and_so_do_versions_of_torch():
    found = applied([Deviation("ddp.gradients", "known")], result("failed"))
    assert found.results[0]["outcome"] == "failed"
    assert "expected a result of clause 'ddp.gradients'" in found.problems[0]
    assert applied([Deviation(CLAUSE, "k", when=">=2.14.0.dev0")], torch="2.14.0.dev1").problems
    partial = applied([Deviation("ddp.gradients", "k")], result("failed"), is_full_run=False)
    assert partial.problems == [], "it may be of a clause that was not selected"


def test_an_entry_for_a_clause_above_the_level_is_not_judged():
    above, misspelt = (Deviation(f"ddp.gradient.{end}", "known") for end in ("above", "misspelt"))
    (problem,) = problems(
        [above, misspelt],
        [result("passed")],
        torch_version="2.13.0",
        today=date(2026, 6, 1),
        is_full_run=True,
        unselected={"ddp.gradient.above"},
    )
    assert "ddp.gradient.misspelt" in problem


@pytest.mark.parametrize(
    ("expires", "is_stale"),
    [(date(2026, 6, 1), True), (date(2026, 6, 2), False), ("2.13", True), ("2.14", False)],
    ids=str,
)
def test_an_expired_entry_is_a_problem(expires, is_stale):
    found = applied([Deviation(CLAUSE, "known", expires=expires)], result("failed"))
    assert bool(found.problems) is is_stale


# ------------------------------------------------------------------------------------ inheriting


def heir(tmp_path: Path, monkeypatch, own: str = "", base: str = FULL) -> list[Deviation]:
    """Entries of a file that inherits from PyTorch's, which has an entry of its own here."""
    (tmp_path / "torch.toml").write_text(base, encoding="utf-8")
    monkeypatch.setattr(expectations, "_TORCH", tmp_path / "torch.toml")
    return load(written(tmp_path, 'inherits = "torch"\n' + own))


def test_an_inherited_entry_is_never_stale(tmp_path: Path, monkeypatch):
    entries = heir(tmp_path, monkeypatch, base=FULL + 'expires = "2.0"\n')
    assert [entry.is_inherited for entry in entries] == [True]
    assert applied(entries).problems == []
    assert applied(entries, result("failed")).problems == []


def test_a_file_s_own_entry_goes_before_the_inherited_one(tmp_path: Path, monkeypatch):
    own, inherited = heir(tmp_path, monkeypatch, own=FULL + 'raises = "hang"\n')
    assert (own.is_inherited, inherited.is_inherited) == (False, True)
    done = applied([own, inherited], result("hang"), result("passed", "w4"))
    assert [one["outcome"] for one in done.results] == ["expected_failure", "unexpected_pass"]


def test_torch_s_own_deviations_are_inherited_by_name(tmp_path: Path):
    entries = load(written(tmp_path, 'inherits = "torch"\n'))
    assert "ddp.accumulation.backward-twice" in {entry.clause for entry in entries}
