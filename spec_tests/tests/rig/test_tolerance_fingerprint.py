"""Bounds that are derived and values that decode: small pure modules, with their own examples."""

import doctest
import itertools

import pytest
import torch

from spec_tests.rig.judge import fingerprint, tolerance
from spec_tests.rig.judge.tolerance import exact, rounding


@pytest.mark.parametrize("module", [fingerprint, tolerance])
def test_the_examples_in_the_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_bound_grows_with_magnitude_terms_and_depth():
    one = rounding(torch.float64, terms=8).bound(torch.ones(3))
    assert one == 2 * 8 * torch.finfo(torch.float64).eps
    assert rounding(torch.float64, terms=8).bound(4 * torch.ones(3)) == 4 * one
    assert rounding(torch.float64, terms=16).bound(torch.ones(3)) == 2 * one
    assert rounding(torch.float64, terms=8, depth=3).bound(torch.ones(3)) == 3 * one
    wide = rounding(torch.bfloat16, terms=12, depth=2)
    assert wide.bound(torch.ones(3)) > 1e10 * one
    assert wide.reason == "bfloat16, sums of 12 terms, 2 deep"
    assert exact().bound(torch.tensor([1e300])) == 0.0, "however large the values"


def test_the_bound_has_a_floor_and_knows_empty_tensors():
    within = rounding(torch.float32, terms=1, floor=10.0)
    assert within.bound(torch.zeros(3)) == within.bound(torch.empty(0)) == within.relative * 10
    assert within.bound(torch.tensor([-20.0])) == within.relative * 20


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_does_not_widen_the_bound(special: float):
    within = rounding(torch.float32, terms=1)
    assert within.bound(torch.tensor([special, 2.0])) == within.relative * 2
    assert within.bound(torch.tensor([special])) == within.relative


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_order_of_summation_lies_within_the_bound(dtype: torch.dtype):
    torch.manual_seed(0)
    terms = torch.randn(6, 500, dtype=dtype)
    # The magnitude of what is added up, not of what is left after cancellation.
    within = rounding(dtype, terms=6, floor=float(terms.abs().sum(dim=0).max()))
    reference = terms.double().sum(dim=0).to(dtype)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 60):
        total = torch.zeros(500, dtype=dtype)
        for number in order:
            total = total + terms[number]
        assert float((total - reference).abs().max()) <= within.bound(reference)


# ---------------------------------------------------------------------------------- fingerprints


def test_sums_decode_exactly_up_to_the_last_contributor():
    counts = tuple(i % 4 for i in range(fingerprint.MAX_CONTRIBUTORS))
    total = torch.zeros(())
    for contributor, count in reversed(list(enumerate(counts))):
        total += count * fingerprint.contribution(contributor)
    assert fingerprint.digits(total.item(), contributors=len(counts)) == counts
    assert fingerprint.digits(0.0, contributors=3) == (0, 0, 0)


@pytest.mark.parametrize("contributor", [-1, fingerprint.MAX_CONTRIBUTORS])
def test_a_contributor_beyond_exactness_is_refused(contributor: int):
    with pytest.raises(ValueError, match=f"contributor {contributor}: expected 0 to 11"):
        fingerprint.contribution(contributor)


@pytest.mark.parametrize("total", [0.5, -1.0, 4.0**3, float("nan"), float("inf"), float("-inf")])
def test_what_is_no_sum_of_contributions_does_not_decode(total: float):
    assert fingerprint.digits(total, contributors=3) is None


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 1), "every contribution arrived once"),
        ((1, 0), "never arrived: rank 1"),
        ((2, 1), "more than once: rank 0 (2 times)"),
        ((0, 3), "never arrived: rank 0; more than once: rank 1 (3 times)"),
        (None, "no whole number of contributions arrived: something was scaled"),
    ],
    ids=["once", "lost", "doubled", "both", "scaled"],
)
def test_digits_are_told_in_words(counts, said: str):
    assert fingerprint.story(counts, ("rank 0", "rank 1")) == said
