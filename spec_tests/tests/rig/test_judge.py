"""Failure messages: what a wrong tensor looks like, in words; bounds, and values that decode.

Whole messages are kept in `goldens/messages.txt`; see `golden` for how to write them anew.
"""

import contextlib
import doctest
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from spec_tests.rig import judge
from spec_tests.rig.judge import tolerance
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import exact, rounding
from spec_tests.tests.rig import golden

SITUATION = judge.Situation(
    clause="ddp.gradients.mean",
    sentence="Every rank MUST hold the mean over ranks of the local gradients.",
    implementation="mine.py",
    case="ddp-w2-mlp",
    world_size=2,
    rerun="python -m spec_tests --impl mine.py --clause ddp.gradients.mean",
    source="Li et al. 2020, section 3.2.1",
    where="spec_tests/chapters/ddp/test_gradients.py:41",
)
MEAN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
LOCAL = MEAN + torch.eye(3, dtype=torch.float64)


ONE = torch.ones(1, dtype=torch.float64)
NEXT_TO_ONE = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
NEVER_REDUCED = Hint("the local gradient: never reduced", {"first.weight": LOCAL})
OF_EACH_RANK = Hint("its own", [{"first.weight": MEAN}, {"first.weight": LOCAL}])


def judged(*observed: torch.Tensor | None, expected: torch.Tensor = MEAN, **options) -> None:
    """Judge what each rank holds as the mean gradient of one parameter."""
    judge.tensors(
        [{"first.weight": seen} for seen in observed],
        {"first.weight": expected},
        **{"quantity": "mean gradient", **options},
    )


def message(judging: Callable[[], None]) -> str:
    """The text of the violation, in the situation above."""
    with judge.judging(SITUATION), pytest.raises(judge.Violation) as caught:
        judging()
    return str(caught.value)


def with_element(value: float) -> torch.Tensor:
    changed = MEAN.clone()
    changed[1, 2] = value
    return changed


ON_RANK_1 = {
    "sum for mean": 2 * MEAN,
    "divided twice": MEAN / 2,
    "reduced twice": 4 * MEAN,
    "sign": -MEAN,
    "odd factor": 3 * MEAN,
    "local": LOCAL,
    "zero": 0 * MEAN,
    "none": None,
    "not finite": with_element(float("nan")),
    "infinite": with_element(float("inf")),
    "transposed": MEAN.T,
    "prefix": torch.cat([MEAN.flatten()[:4], -torch.ones(5).double()]).view(3, 3),
    "one element": with_element(0.5),
    "dtype": MEAN.float(),
    "shape": MEAN.flatten(),
    "nothing known": MEAN.flip(0).square() + 1,
}
"""Symptom to what rank 1 holds in place of the mean; rank 0 is right."""
# Rows 1 and 2 of `SPARSE` are those of an embedding that no batch touches.
WANTED = torch.randn(6, 6, generator=torch.Generator().manual_seed(7))
SPARSE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
SPARSE[1:3] = 0
DENSE = SPARSE + torch.tensor([[0.0], [20.0], [30.0], [0.0]], dtype=torch.float64)
PARTS = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
ADDED_UP = PARTS.float().double().sum(dim=0)
BOTH = torch.arange(30.0, dtype=torch.float64) + 2.0**-20
STALE = torch.cat([7.5 * DENSE[3:].flip(1), DENSE[1:]])
FINE = DENSE + 2.0**-10 + 2.0**-30
ONE_TO_SIX = torch.arange(1.0, 7.0, dtype=torch.float64)
ON_ALL_RANKS = {
    "it went through bfloat16": (2, WANTED.bfloat16().float(), WANTED),
    "it went through bfloat16 or float16": (2, BOTH.bfloat16().double(), BOTH),
    "it went through float32": (2, FINE.float().double(), FINE),
    "added up in float32": (2, ADDED_UP, PARTS.sum(dim=0)),
    "one bit of float32": (2, WANTED * (1 + torch.finfo(torch.float32).eps), WANTED),
    "a twentieth of something else": (2, WANTED + 0.05 * WANTED.flip(0), WANTED),
    "rows changed places": (2, DENSE[[3, 1, 2, 0]], DENSE),
    "rows of zeros, which are everywhere": (
        *(2, torch.where(SPARSE == 0, 0, SPARSE.flip(1) ** 2), SPARSE),
    ),
    "a wrong row before right ones": (2, STALE, DENSE),
    "half of the rows": (2, WANTED[:3], WANTED),
    "the first part of five rows": (2, WANTED[:3], WANTED[:5]),
    "all rows but one": (2, WANTED[:4], WANTED[:5]),
    "below the smallest of bfloat16": (2, torch.zeros(4), torch.full((4,), 2.0**-140)),
    **{
        f"{factor:.3g} times on {ranks} ranks": (ranks, factor * ONE_TO_SIX, ONE_TO_SIX)
        for ranks, factor in (
            *((2, 2), (3, 2), (4, 2), (3, 3), (2, 4), (3, 9), (3, 3 / 2), (2, 2 / 3), (2, 1.7)),
            *((2, 1 / 2), (3, 1 / 3), (2, -1)),
        )
    },
    "integers beyond what float64 holds": (1, torch.tensor([2**53 + 1]), torch.tensor([2**53])),
    "the smallest integer": (1, torch.tensor([-(2**63)]), torch.tensor([0])),
}
"""Symptom to the number of ranks, what each of them holds, and the mean."""
TWO_NAMES = {"a": MEAN, "b": MEAN, "c": MEAN}
VIOLATIONS: dict[str, Callable[[], None]] = {
    **{name: partial(judged, MEAN, it, hints=[NEVER_REDUCED]) for name, it in ON_RANK_1.items()},
    **{
        name: partial(judged, *[seen] * ranks, expected=wanted)
        for name, (ranks, seen, wanted) in ON_ALL_RANKS.items()
    },
    "twice a weight, which is no mean": lambda: judged(2 * MEAN, 2 * MEAN, quantity="weight"),
    "what two known mistakes give": lambda: judged(
        LOCAL, hints=[Hint(f"{one}: it was lost", {"first.weight": LOCAL}) for one in ("a", "b")]
    ),
    "on all ranks, with a tolerance": lambda: judged(
        *(2 * MEAN, 2 * MEAN), within=rounding(torch.float64, terms=8), given="toy 'mlp', seed 7"
    ),
    "one number, twice": lambda: judged(ONE, 2 * ONE, expected=ONE),
    "one number, by no factor that means something": lambda: judged(ONE, 2.7 * ONE, expected=ONE),
    "no bit is forgiven": lambda: judged(
        NEXT_TO_ONE, expected=torch.tensor(1.0), quantity="x", within=exact()
    ),
    "a hint that differs by rank": lambda: judged(MEAN, LOCAL, hints=[OF_EACH_RANK]),
    "too small for float16": lambda: judged(0 * MEAN, expected=MEAN * 1e-9),
    "a tensor where none belongs": lambda: judge.tensors(
        [{"frozen.bias": MEAN}], {"frozen.bias": None}, quantity="gradient"
    ),
    "two of three names on two of three ranks": lambda: judge.tensors(
        [TWO_NAMES, *[{**TWO_NAMES, "b": 2 * MEAN, "c": 2 * MEAN}] * 2],
        TWO_NAMES,
        quantity="mean gradient",
    ),
    "other names than expected": lambda: judge.tensors(
        [{"module.a": MEAN}], {"a": MEAN}, quantity="gradient"
    ),
    "an expected value of its own for each rank": lambda: judge.tensors(
        [{"a": LOCAL}, {"a": LOCAL}], [{"a": MEAN}, {"a": LOCAL}], quantity="x"
    ),
    "ranks that differ": lambda: judge.same_on_all_ranks(
        [{"a": MEAN}, {"a": MEAN}, {"a": LOCAL}], quantity="weight", given="after step 3"
    ),
    "a name missing on a rank": lambda: judge.same_on_all_ranks([{"a": MEAN}, {}], quantity="x"),
    "a name only on one rank": lambda: judge.same_on_all_ranks(
        [{"a": MEAN}, {"a": MEAN, "b": MEAN}], quantity="x"
    ),
    "a plain value on one rank": lambda: judge.equal([3, 4], 3, quantity="steps"),
    "plain values on two ranks": lambda: judge.equal([4, 3, 5], 3, quantity="steps"),
    "a condition": lambda: judge.holds(
        False, "two is not three", likely="arithmetic", given="a test"
    ),
}


def test_every_message_is_as_it_was_kept():
    found = [f"---------- {name}\n{message(wrong)}\n" for name, wrong in VIOLATIONS.items()]
    golden.check("messages.txt", "\n".join(found))


def test_what_is_right_raises_nothing():
    judge.tensors([{"a": MEAN}, {"a": LOCAL}], [{"a": MEAN}, {"a": LOCAL}], quantity="x")
    judge.tensors([{"a": torch.tensor([-0.0])}], {"a": torch.tensor([0.0])}, quantity="x")
    judge.same_on_all_ranks([{"a": MEAN, "b": None}] * 3, quantity="weight")
    judge.same_on_all_ranks([{"a": MEAN}], quantity="weight")
    judge.equal([3, 3], 3, quantity="steps")
    judge.holds(True, "never shown")


def test_a_second_tensor_may_speak_against_a_diagnosis():
    rounded, names = WANTED.bfloat16().float() + 2e-4, {"first": WANTED, "second": WANTED}
    for second, is_said in ((WANTED, True), (2 - WANTED, False), (WANTED + 1e-5, False)):
        seen = [{"first": rounded, "second": second}]
        said = message(partial(judge.tensors, seen, names, quantity="mean gradient"))
        assert ("size of bfloat16's rounding" in said) == is_said, said


def test_a_hint_that_is_hardly_told_from_what_is_right_is_not_given():
    # A weight that decay brings back to where it was: it moved, by less than one can tell.
    wanted = torch.full((4,), -2.0, dtype=torch.float64)
    hint = Hint("the initial weight: nobody updated it", {"first.weight": wanted + 1e-9})
    for seen, is_given in ((wanted + 1.7e-9, False), (wanted + 1e-9, True)):
        said = message(partial(judged, seen, expected=wanted, hints=[hint]))
        assert ("nobody" in said) == is_given


# --------------------------------------------------------------------------- how far is too far


def test_a_difference_within_the_tolerance_passes_and_leaves_its_margin():
    within = rounding(torch.float64, terms=4)
    near = MEAN * (1 + 1e-16 * torch.arange(9).view(3, 3))
    with judge.judging(judge.Situation()) as here:
        judge.tensors([{"a": MEAN}, {"a": near}], {"a": MEAN}, quantity="x", within=within)
    assert here.margins[0]["error"] == 0.0
    assert all(margin["tolerance"] == within.bound(MEAN) for margin in here.margins)
    assert all(0 <= margin["ratio"] < 1 for margin in here.margins)
    assert len(here.margins) == 2


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("seen", "wanted", "is_right"),
    [
        *(([sign * INF, 1.0 + 1e-16], [sign * INF, 1.0], True) for sign in (1, -1)),
        *(([wrong, right], [INF, 1.0], False) for wrong, right in ((INF, 1.1), (0.0, 1.0))),
        *(([wrong, 1.0], [-INF, 1.0], False) for wrong in (INF, NAN, 0.0)),
        *(([wrong, 1.0], [NAN, 1.0], False) for wrong in (NAN, 1.0)),
    ],
)
def test_an_infinity_equals_itself_alone_and_a_nan_nothing(seen, wanted, is_right: bool):
    observed, expected = (torch.tensor(each, dtype=torch.float64) for each in (seen, wanted))
    within = rounding(torch.float64, terms=4)
    with contextlib.nullcontext() if is_right else pytest.raises(judge.Violation):
        judge.tensors([{"a": observed}], {"a": expected}, quantity="x", within=within)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0, 3), torch.tensor(True), torch.arange(3), torch.ones(2, dtype=torch.bfloat16)],
    ids=["empty", "bool", "integers", "bfloat16"],
)
def test_tensors_of_any_kind_are_judged(tensor: torch.Tensor):
    judge.tensors([{"a": tensor}], {"a": tensor.clone()}, quantity="x")
    if tensor.numel():
        changed = ~tensor if tensor.dtype == torch.bool else tensor + 1
        with pytest.raises(judge.Violation, match="rank 0, 'a'"):
            judge.tensors([{"a": changed}], {"a": tensor}, quantity="x")


# ---------------------------------------------------------------------------------------- bounds


def test_the_examples_in_the_docstrings_hold():
    found = doctest.testmod(tolerance)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_bound_grows_with_what_is_added_up_and_has_a_floor():
    ones = torch.ones(3)
    one = rounding(torch.float64, terms=8).bound(ones)
    assert one == 2 * 8 * torch.finfo(torch.float64).eps
    assert rounding(torch.float64, terms=8).bound(4 * ones) == 4 * one
    assert rounding(torch.float64, terms=16, depth=3).bound(ones) == 6 * one
    assert exact().bound(torch.tensor([1e300])) == 0.0, "however large the values"
    within = rounding(torch.float32, terms=1, floor=10.0)
    assert within.bound(torch.zeros(3)) == within.bound(torch.empty(0)) == within.relative * 10
    special = torch.tensor([INF, -INF, NAN, 20.0])
    assert within.bound(special) == within.relative * 20, "what is not finite does not widen it"


def test_every_order_of_summation_lies_within_the_bound():
    terms = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    # The magnitude of what is added up, not of what is left after cancellation.
    within = rounding(torch.float32, terms=6, floor=float(terms.abs().sum(dim=0).max()))
    reference = terms.double().sum(dim=0).float()
    for order in itertools.islice(itertools.permutations(terms), 0, 720, 60):
        assert float((sum(order) - reference).abs().max()) <= within.bound(reference)
