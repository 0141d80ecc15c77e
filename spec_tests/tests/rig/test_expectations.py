"""Declared deviations: what is refused when read, what they do to results, how they go stale."""

from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest

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
            clause=CLAUSE,
            reason="known",
            case="*-w4-*",
            link="https://example.org",
            raises="hang",
            when=">=2.11,<2.14",
            expires=date(2027, 1, 1),
            where=f"{path}, entry 1",
        )
    ]
    assert load(written(tmp_path, FULL + 'expires = "2027-01-01"\n'))[0].expires == date(2027, 1, 1)
    assert load(written(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deviation = [", "expected TOML, got"),
        (
            "[deviation]\n",
            r"expected \[\[deviation\]\] entries, at the head `inherits`, and nothing",
        ),
        ("[[deviations]]\n", "nothing else, got deviations; remove or rename"),
        ('[[deviation]]\nclause = "a.b"\n', "entry 1: expected 'reason', got none"),
        ('[[deviation]]\nreason = "x"\n', "entry 1: expected 'clause', got none"),
        (FULL + "resaon = 'x'\n", "expected keys of clause, reason, .*; got resaon"),
        ('[[deviation]]\nclause = "a.b"\nreason = " "\n', "expected 'reason' to be a text"),
        (FULL + "case = 4\n", "expected 'case' to be a text, got 4"),
        (FULL + "when = '2.x'\n", "expected `when` as versions of torch"),
        (FULL + "expires = 'soon'\n", "expected `expires` as a date"),
        (FULL + "expires = 2027-01-01T00:00:00\n", "expected 'expires' to be a text"),
        (FULL + FULL, "entry 2: expected one entry per clause, case and `when`, got .* again"),
        ("deviation = [3]\n", "entry 1: expected a table, got 3"),
    ],
    ids=[
        *("no toml", "single table", "misnamed", "no reason", "no clause", "unknown key"),
        *("empty reason", "case no text", "when", "expires", "expires with time"),
        *("duplicate", "no table"),
    ],
)
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
        ({"is_inherited": True, "raises": "hang"}, BOTH[:1], "failed"),
        (
            {"case": "*-w4-*"},
            (result("failed", FOURTH), result("passed", SECOND), result("failed", SECOND)),
            "expected_failure passed failed",
        ),
        ({"when": "<2.13", "expires": date(2020, 1, 1)}, BOTH, "failed passed"),
        *(
            ({}, (result(word),), word)
            for word in ("error", "blocked", "not_offered", "skipped", "not_here")
        ),
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


def test_an_entry_says_why_a_failure_is_expected_and_what_to_do_with_a_pass(tmp_path: Path):
    file = written(tmp_path, f"[[deviation]]\nclause = '{CLAUSE}'\nreason = 'known'\nlink = '7'\n")
    failed, passed = applied(
        load(file), result("failed", message="2x"), result("passed", "w4")
    ).results
    assert failed["message"] == "expected: known 7\n2x"
    assert passed["message"].splitlines() == [
        f"[{CLAUSE}]  expected a failure (failed) in case 'w4', as {file}, entry 1 declares, "
        "got a pass",
        "declared: known",
        "do: delete the entry, or narrow its `case` to what still fails",
    ]


def test_ids_match_exactly_and_so_do_versions_of_torch():
    found = applied([Deviation("ddp.gradients", "known")], result("failed"))
    assert found.results[0]["outcome"] == "failed"
    assert "expected a result of clause 'ddp.gradients'" in found.problems[0]
    assert applied([Deviation(CLAUSE, "k", when=">=2.14.0.dev0")], torch="2.14.0.dev1").problems


def test_an_entry_that_matches_nothing_is_a_problem_of_a_full_run_only():
    entry = Deviation(CLAUSE, "known", case="w8", where="mine.toml, entry 1")
    assert applied([entry], result("passed"), is_full_run=False).problems == []
    (problem,) = applied([entry], result("passed")).problems
    assert problem.startswith("mine.toml, entry 1: expected a result of clause")


def test_an_entry_for_a_clause_above_the_level_is_not_judged():
    above = Deviation("ddp.overlap.launched-early", "known", expires=date(2020, 1, 1))
    misspelt = Deviation("ddp.gradient.mean", "known")
    (problem,) = problems(
        [above, misspelt],
        [result("passed")],
        torch_version="2.13.0",
        today=date(2026, 6, 1),
        is_full_run=True,
        unselected={"ddp.overlap.launched-early"},
    )
    assert "ddp.gradient.mean" in problem


@pytest.mark.parametrize(
    ("expires", "is_stale"),
    [
        (date(2026, 6, 1), True),
        (date(2026, 6, 2), False),
        ("2.13", True),
        ("2.14", False),
    ],
    ids=str,
)
def test_an_expired_entry_is_a_problem(expires, is_stale):
    entry = Deviation(CLAUSE, "known", expires=expires)
    found = applied([entry], result("failed"), is_full_run=False)
    assert bool(found.problems) is is_stale
    # Entries that a partial run did not meet are not its business.
    assert applied([entry], is_full_run=False).problems == []


# ------------------------------------------------------------------------------------ inheriting


def heir(tmp_path: Path, own: str = "", base: str = FULL) -> list[Deviation]:
    """Entries of a file that inherits from another one beside it."""
    (tmp_path / "base.toml").write_text(base, encoding="utf-8")
    return load(written(tmp_path, 'inherits = "base.toml"\n' + own))


@pytest.mark.parametrize("more", ["", 'expires = "2.0"\n', 'case = "w8"\n'])
def test_an_inherited_entry_is_never_stale(tmp_path: Path, more: str):
    entries = heir(tmp_path, base=FULL + more)
    assert [entry.is_inherited for entry in entries] == [True]
    assert applied(entries).problems == []
    assert applied(entries, result("failed")).problems == []


def test_a_file_s_own_entry_goes_before_the_inherited_one(tmp_path: Path):
    own, inherited = heir(tmp_path, own=FULL + 'raises = "hang"\n')
    assert (own.is_inherited, inherited.is_inherited) == (False, True)
    done = applied([own, inherited], result("hang"), result("passed", "w4"))
    assert [one["outcome"] for one in done.results] == ["expected_failure", "unexpected_pass"]


def test_torch_s_own_deviations_are_inherited_by_name(tmp_path: Path):
    entries = load(written(tmp_path, 'inherits = "torch"\n'))
    assert "ddp.accumulation.backward-twice" in {entry.clause for entry in entries}
    assert all(entry.is_inherited for entry in entries)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("3", r"expected `inherits` to be \"torch\" or the name of a .toml file beside it, got 3"),
        ("'solution'", "the name of a .toml file beside it, got 'solution'"),
        ("'none.toml'", "expected `inherits` to name a file, found none at .*none.toml"),
        ("'mine.toml'", "expected a file that inherits nothing itself, got .*mine.toml"),
    ],
)
def test_what_cannot_be_inherited_is_refused(tmp_path: Path, base: str, said: str):
    with pytest.raises(ValueError, match=said):
        load(written(tmp_path, f"inherits = {base}\n"))
