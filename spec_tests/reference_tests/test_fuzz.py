"""`python -m spec_tests fuzz`: a part of its files, and that it knows what is wrong."""

from __future__ import annotations

import random

import pytest

from spec_tests.reference_tests import fuzz
from spec_tests.reference_tests.training import shard

TOKENS = 9
WINDOWS = [([0, 0, 0, 0], [0, 0, 0, 0])] * 2


def test_two_hundred_files_are_read_as_they_are_or_refused_in_words():
    counts, wrong = fuzz.run(200, seed=1, impl="solution")

    assert wrong == []
    assert {kind for kind, _ in counts} == set(fuzz.KINDS)
    assert counts["flipped", "read"] > 0, "a bit in a token is another token, not damage"


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_only_flips_can_leave_a_shard(tmp_path, kind):
    for number in range(20):
        path = tmp_path / f"{kind}{number}"
        fuzz.write(kind, path, random.Random(number))
        assert kind == "flipped" or fuzz.tokens_of(path) is None


@pytest.mark.parametrize(
    ("is_right", "found", "said"),
    [
        (True, fuzz.Reading(WINDOWS, "", False), None),
        (True, fuzz.Reading(WINDOWS[:1], "", False), "expected [("),
        (True, fuzz.Reading(None, "ValueError: no", True), "expected [("),
        (False, fuzz.Reading(WINDOWS, "", False), "expected a refusal"),
        (False, fuzz.Reading(None, "IndexError: 0", False), "expected a ValueError"),
        (False, fuzz.Reading(None, "ValueError: bad", True), "expected the message"),
        (False, fuzz.Reading(None, "x: expected 1 at offset 0", True), "expected the message"),
        (False, fuzz.Reading(None, "x: expected 1 at offset 0, got 2", True), None),
    ],
)
def test_what_is_wrong_is_told(tmp_path, is_right, found, said):
    path = tmp_path / "x"
    data = shard(TOKENS, seed=0, vocabulary=1)
    path.write_bytes(data if is_right else data[:-1])

    problem = fuzz.complaint(path, found)

    assert (problem or "").startswith(said or "")
    assert (problem is None) == (said is None)
