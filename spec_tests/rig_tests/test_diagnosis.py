"""Symptoms, signatures, and which known fault is named for what failed."""

import json
import re
from collections import Counter

import pytest

from spec_tests import impostors, ledger
from spec_tests.impostors import signatures
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report import diagnosis
from spec_tests.rig.report.diagnosis import Dictionary, Gain, Signatures, by_gain
from spec_tests.rig.report.symptom import symptom

NEAR_MISSES = {
    card.id
    for card in impostors.CATALOGUE.values()
    if not card.is_benign and card.id[:8] != "control."
}


@pytest.mark.parametrize(
    ("headline", "words"),
    [
        ("rank 0 and 1 of 2 raised TypeError: f() takes 1 argument", "raised TypeError"),
        (
            "rank 1: expected live bytes of at most 96 (shards 64), got 248",
            "more: live bytes of at most",
        ),
        (
            "rank 0: expected collectives of a step [], got ['all_reduce']",
            "more: collectives of a step",
        ),
        ("rank 0: expected names afterwards ['a'], got []", "less: names afterwards"),
        ("rank 0, 'gain' (6,): expected the mean gradient, got None", "less: the mean gradient"),
        ("the file is torn at byte 17", "other: the file is torn at byte #"),
        ("rank 0 of 2 raised AssertionError at /here/mine.py:3", "raised AssertionError"),
        ("torn: /here/and/there/mine.py", "other: torn: mine.py"),
    ],
)
def test_a_symptom_has_no_number_and_no_name_of_one_run(headline: str, words: str):
    assert symptom(Outcome.FAILED, f"failed: [a.b.c]  A rank MUST.\n{headline}") == words


def test_a_diagnosis_and_a_hang_are_symptoms():
    message = "failed: [a.b.c]  X MUST.\nrank 0: expected a, got b\nlikely: off by the factor 2.5"
    assert symptom(Outcome.FAILED, message) == "likely: off by the factor #"
    assert symptom(Outcome.HANG, "anything") == "hang"


KNOWN = Dictionary(
    {
        "ddp.sums": {"mean": "twice", "training": "twice", "window": "other"},
        "ddp.crashes": {"frozen": "raised"},
        "ddp.drops-window": {"window": "lost"},
    }
)


def explained(failed: dict[str, str], passed: set[str], **options: object) -> list[tuple[str, ...]]:
    return [(d.near_miss, *d.alike) for d in KNOWN.explain(failed, passed, **options)]  # type: ignore[arg-type]


def test_the_fault_that_explains_most_comes_first_and_the_rest_is_asked_about_again():
    failed = {"mean": "twice", "training": "twice", "window": "other", "frozen": "raised"}
    assert explained(failed, set()) == [
        ("ddp.sums", "mean", "training", "window"),
        ("ddp.crashes", "frozen"),
    ]


def test_what_passed_speaks_against_a_fault():
    assert explained({"window": "other"}, {"mean", "training"}) == []
    assert explained({"mean": "twice", "training": "twice"}, {"window"}) != []


def test_nothing_is_forced_on_another_symptom():
    assert explained({"frozen": "hang"}, set()) == []
    assert explained({"unheard-of": "raised"}, set()) == []


def test_of_two_that_fit_alike_one_is_named_if_they_are_of_one_family():
    twins = {"ddp.one": {"a": "x", "b": "y"}, "ddp.other": {"a": "x", "c": "z"}}
    (known,) = Dictionary(twins).explain({"a": "x"}, set())
    assert (known.near_miss, known.alike) == ("", ("a",))
    (known,) = Dictionary(twins).explain({"a": "x", "c": "z"}, {"b"})
    assert known.near_miss == "ddp.other"
    (known,) = Dictionary(twins, dict.fromkeys(twins, "stale")).explain({"a": "x"}, set())
    assert known.near_miss == "ddp.other"


def test_a_near_miss_can_be_left_out():
    assert explained({"window": "lost"}, set(), without=["ddp.drops-window"]) == []


def test_one_clause_of_many_names_nobody_nor_does_a_symptom_without_a_name():
    many = {"frozen": "raised", "a": "x", "b": "x", "c": "x"}
    (known,) = KNOWN.explain(many, set())
    assert not diagnosis.is_telling(known, many)
    (known,) = KNOWN.explain({"frozen": "raised"}, set())
    assert diagnosis.is_telling(known, {"frozen": "raised"})
    _, second = KNOWN.explain({"mean": "twice", "training": "twice", **many}, set())
    assert (second.near_miss, second.left) == ("ddp.crashes", 4)
    bare = {"frozen": "other: error"}
    (known,) = Dictionary({"ddp.crashes": bare}).explain(bare, set())
    assert not diagnosis.is_telling(known, bare)


def test_what_no_known_fault_explains_has_the_family_of_which_its_clauses_speak():
    known = diagnosis.Families(
        {}, {"ddp.one": "stale memory", "ddp.two": "memory", "ddp.any": "mask"}, {"hang": "mask"}
    )
    assert known.of({"ddp.one": "raised", "ddp.two": "raised"}) == ["memory", "stale"]
    assert known.of({"ddp.one": "raised"}) == ["stale", "memory"]
    assert known.of({"ddp.one": "hang"}) == ["mask", "stale", "memory"]
    assert known.of({"ddp.unheard-of": "raised"}) == []


def test_a_clause_that_many_faults_fail_says_little():
    found = diagnosis.load().of
    (common, often), *_ = Counter(c for each in found.values() for c in each).most_common()
    (rare,) = next(each for each in found.values() if len(each) == 1 and common not in each)
    assert often > 20
    known = diagnosis.Families({}, {common: "mask", rare: "stale"}, {})
    assert known.of({common: "raised", rare: "raised"}) == ["stale", "mask"]


def test_near_misses_that_fail_a_clause_in_the_same_way_speak_of_their_family():
    (name, own), *_ = (each for each in diagnosis.load().of.items() if len(each[1]) == 1)
    ((clause, shown),) = own.items()
    nothing = diagnosis.Families({}, {}, {})
    assert diagnosis.family_of()[name] in nothing.of({clause: shown})
    assert nothing.of({clause: "another"}) == []
    spoken = diagnosis.Families({}, {clause: f"first {diagnosis.family_of()[name]}"}, {})
    assert spoken.of({clause: shown})[0] == diagnosis.family_of()[name]
    alike = [each for each, found in diagnosis.load().of.items() if found.get(clause) == shown]
    assert nothing.of({clause: shown}, without=alike) == []


def test_every_clause_speaks_of_families_that_exist():
    known = diagnosis.families()
    assert {*known.clauses} == {clause.id for clause in ledger.load_all()}
    spoken = [*known.clauses.values(), *known.symptoms.values()]
    assert {name for names in spoken for name in names.split()} == {*known.says}
    assert {*diagnosis.family_of().values()} <= {*known.says}
    assert "" not in spoken


def test_what_finds_most_in_a_second_comes_first():
    of = {
        "a.one": {"c": "x", "d": "x"},
        "a.two": {"c": "x"},
        "a.three": {"d": "x"},
        "b.one": {"e": "x"},
    }
    kept = Signatures("2.13.0", of, dict.fromkeys(of, ""), {"c": 0.5, "d": 2.0})
    assert by_gain(kept, "a") == [Gain("c", 0.5, 1 - 1 / 3), Gain("d", 2.5, 1.0)]
    assert [each.clause for each in by_gain(kept, "a", {"d"})] == ["d"]


def test_a_file_of_signatures_is_read_as_it_was_written(tmp_path):
    kept = Signatures(
        "2.13.0", {"a.one": {"c": "x"}, "a.two": {}}, {"a.one": "1", "a.two": "2"}, {"c": 0.5}
    )
    diagnosis.save(kept, tmp_path / "kept.json")
    assert diagnosis.load(tmp_path / "kept.json") == kept
    assert json.loads((tmp_path / "kept.json").read_text())["torch"] == "2.13.0"


def test_no_symptom_that_is_kept_names_a_folder_of_one_machine():
    shown = {each for found in diagnosis.load().of.values() for each in found.values()}
    assert [each for each in shown if re.search(r"(?:^|\s)/\w", each)] == []


def test_every_near_miss_has_a_signature_and_one_family():
    assert {*diagnosis.load().of} == NEAR_MISSES
    assert {*diagnosis.family_of()} == NEAR_MISSES
    text = diagnosis.FAMILIES.read_text()
    assert [name for name in NEAR_MISSES if text.count(f'"{name}"') != 1] == []


@pytest.mark.parametrize("name", ["clip.adds-norms", "data.strided"])
def test_a_signature_taken_again_is_the_one_in_the_file(name: str):
    found, seconds = signatures.take(impostors.find(name), Worlds())
    slow = {clause for clause, took in seconds.items() if took > signatures.SLOW_S}  # not asked
    kept = {c: shown for c, shown in diagnosis.load().of[name].items() if c not in slow}
    assert {*found.items()} >= {*kept.items()} - {*_unstable(kept)}


def _unstable(kept: dict[str, str]) -> list[tuple[str, str]]:
    """Of a hang and a crash it is chance which of them is seen."""
    return [(clause, shown) for clause, shown in kept.items() if shown in ("hang", "died")]
