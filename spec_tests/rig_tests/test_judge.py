"""Failure messages: what a wrong tensor looks like, in words, and what stands around the words."""

import pytest
import torch

from spec_tests.rig import judge
from spec_tests.rig.symptoms import Hint
from spec_tests.rig.tolerance import exact, rounding

SITUATION = judge.Situation(
    clause="ddp.gradients.mean",
    sentence="Every rank MUST hold the mean over ranks of the local gradients.",
    implementation="mine.py",
    case="ddp-w2-mlp",
    world_size=2,
    rerun="python -m spec_tests --impl mine.py --clause ddp.gradients.mean",
    source="Li et al. 2020, section 3.2.1",
    where="spec_tests/ddp/test_gradients.py:41",
)
MEAN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
LOCAL = MEAN + torch.eye(3, dtype=torch.float64)


def message(observed, expected=None, **options) -> str:
    """The text of the violation, in the situation above."""
    with judge.judging(SITUATION), pytest.raises(judge.Violation) as caught:
        judge.tensors(
            [{"first.weight": seen} for seen in observed],
            {"first.weight": MEAN if expected is None else expected},
            **{"quantity": "mean gradient", **options},
        )
    return str(caught.value)


def with_element(value: float) -> torch.Tensor:
    changed = MEAN.clone()
    changed[1, 2] = value
    return changed


SYMPTOMS = {
    "sum for mean": ([MEAN, 2 * MEAN], "summed and not divided by the world size", "got 2.000 x"),
    "divided twice": ([MEAN, MEAN / 2], "divided by the world size twice", "got 0.500 x"),
    "reduced twice": ([MEAN, 4 * MEAN], "reduced twice", "got 4.000 x it in every element"),
    "sign": ([MEAN, -MEAN], "the sign is wrong", "got -1.000 x"),
    "odd factor": ([MEAN, 3 * MEAN], "a constant factor", "got 3.000 x"),
    "local": ([MEAN, LOCAL], "the local gradient: never reduced", "what one known mistake gives"),
    "zero": ([MEAN, 0 * MEAN], "it was cleared, or never filled in", "zero in every element"),
    "none": ([MEAN, None], "nothing ever arrived there", "got None"),
    "not finite": ([MEAN, with_element(float("nan"))], "poison", "1 values that are not finite"),
    "infinite": ([MEAN, with_element(float("inf"))], "poison", "1 values that are not finite"),
    "transposed": ([MEAN, MEAN.T], "the layout of the gradient", "got its transpose"),
    "prefix": (
        [MEAN, torch.cat([MEAN.flatten()[:4], -torch.ones(5).double()]).view(3, 3)],
        "an offset or a length of the flat buffer",
        "got it in the first 4 elements only",
    ),
    "one element": ([MEAN, with_element(0.5)], "some positions are mixed up", "8 of 9 elements"),
    "dtype": ([MEAN, MEAN.float()], "cast, and not brought back", "dtype torch.float32 in place"),
    "shape": ([MEAN, MEAN.flatten()], "flattened, padded", "shape (9,) in place of (3, 3)"),
    "nothing known": ([MEAN, MEAN.flip(0).square() + 1], "", "got something else"),
}


def test_a_single_number_is_called_a_multiple_only_by_a_factor_that_means_something():
    one = torch.ones(1, dtype=torch.float64)
    assert "got 2.000 x it" in message([one, 2 * one], one)
    assert "got something else" in message([one, 2.7 * one], one)


NARROWER = {
    "float32": torch.float64,
    "float16": torch.float32,
    "bfloat16": torch.float32,
}
"""The dtype that a value went through, to the one that it should have had."""


@pytest.mark.parametrize("name", NARROWER)
@pytest.mark.parametrize("how", ["rounded", "added up"])
def test_a_value_that_went_through_fewer_bits_is_told_by_its_error(name: str, how: str):
    own, narrow = NARROWER[name], getattr(torch, name)
    parts = torch.randn(3, 6, 5, dtype=own, generator=torch.Generator().manual_seed(7))
    wanted = parts.sum(dim=0)
    seen = wanted if how == "rounded" else parts
    seen = seen.to(narrow).to(own)
    if how == "added up":
        seen = seen.sum(dim=0)
    text = message([seen], wanted, within=rounding(own, terms=3))
    assert f"it went through {name} on the way" in text or (
        how == "added up" and f"likely: it may have been sent, added up or kept in {name}" in text
    )


def test_an_error_of_the_dtypes_own_rounding_or_of_no_rounding_is_not_told_so():
    wanted = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
    for seen in (wanted * (1 + torch.finfo(torch.float32).eps), wanted + 0.05 * wanted.flip(0)):
        assert "float" not in message([seen], wanted).partition("likely")[2].partition("allowed")[0]
    assert "summed and not divided" in message([2 * wanted, 2 * wanted], wanted)


def test_a_hint_that_is_hardly_told_from_what_is_right_is_not_given():
    # A weight that decay brings back to where it was: it moved, by less than one can tell.
    wanted = torch.full((4,), -2.0, dtype=torch.float64)
    initial = Hint("the initial weight: nobody updated it", {"first.weight": wanted})
    assert "nobody" not in message([wanted + 1.7e-9], wanted, hints=[initial])
    near = Hint("the initial weight: nobody updated it", {"first.weight": wanted + 1e-9})
    assert "nobody" not in message([wanted + 1.7e-9], wanted, hints=[near])
    assert "nobody" in message([wanted + 1e-9], wanted, hints=[near])


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_is_named_with_its_likely_cause(symptom: str):
    observed, likely, got = SYMPTOMS[symptom]
    text = message(
        observed, hints=[Hint("the local gradient: never reduced", {"first.weight": LOCAL})]
    )
    lines = text.splitlines()
    assert lines[0] == f"[{SITUATION.clause}]  {SITUATION.sentence}"
    assert lines[1].startswith("rank 1, 'first.weight' (3, 3): expected the mean gradient, ")
    assert got in lines[1]
    found = next((line for line in lines if line.startswith("likely: ")), "")
    assert likely in found
    assert bool(likely) == bool(found)
    assert f"again: {SITUATION.rerun}" in lines
    assert "1 of 1 names wrong on rank 1 of 2" in lines
    assert lines[-1] == "why: Li et al. 2020, section 3.2.1 · spec_tests/ddp/test_gradients.py:41"


def test_a_tensor_where_none_belongs_is_named():
    with judge.judging(SITUATION), pytest.raises(judge.Violation) as caught:
        judge.tensors([{"frozen.bias": MEAN}], {"frozen.bias": None}, quantity="gradient")
    assert "rank 0, 'frozen.bias' (3, 3): expected the gradient, which is None, got" in str(
        caught.value
    )
    assert "likely: a gradient appeared where none belongs" in str(caught.value)


def test_the_whole_message_of_a_sum_for_a_mean():
    text = message(
        [MEAN * 2, MEAN * 2], within=rounding(torch.float64, terms=8), given="toy 'mlp', seed 7"
    )
    assert text == (
        "[ddp.gradients.mean]  Every rank MUST hold the mean over ranks of the local gradients.\n"
        "rank 0, 'first.weight' (3, 3): expected the mean gradient, got 2.000 x it in every "
        "element\n"
        "likely: summed and not divided by the world size\n"
        "largest error 9 at (2, 2): expected 9, got 18; 9 of 9 elements wrong; allowed 3.2e-14 "
        "(float64, sums of 8 terms, 1 deep)\n"
        "1 of 1 names wrong on ranks 0, 1 of 2; the ranks agree with each other\n"
        "given: toy 'mlp', seed 7, ddp-w2-mlp, mine.py\n"
        "again: python -m spec_tests --impl mine.py --clause ddp.gradients.mean\n"
        "why: Li et al. 2020, section 3.2.1 · spec_tests/ddp/test_gradients.py:41"
    )


def test_the_first_culprit_is_described_and_the_others_are_counted():
    wrong = {"a": MEAN, "b": MEAN * 2, "c": MEAN * 2}
    right = {"a": MEAN, "b": MEAN, "c": MEAN}
    with pytest.raises(judge.Violation) as caught:
        judge.tensors([right, wrong, wrong], right, quantity="mean gradient")
    assert "rank 1, 'b'" in str(caught.value)
    assert "2 of 3 names wrong on ranks 1, 2 of 3" in str(caught.value)
    assert "agree" not in str(caught.value)


def test_other_names_than_expected_are_listed():
    with pytest.raises(judge.Violation, match=r"missing \['a'\], unexpected \['module.a'\]"):
        judge.tensors([{"module.a": MEAN}], {"a": MEAN}, quantity="gradient")


def test_each_rank_may_have_an_expected_value_of_its_own():
    judge.tensors([{"a": MEAN}, {"a": LOCAL}], [{"a": MEAN}, {"a": LOCAL}], quantity="x")
    with pytest.raises(judge.Violation, match="rank 0, 'a'"):
        judge.tensors([{"a": LOCAL}, {"a": LOCAL}], [{"a": MEAN}, {"a": LOCAL}], quantity="x")


def test_hints_may_differ_by_rank():
    hint = Hint("its own", [{"first.weight": MEAN}, {"first.weight": LOCAL}])
    assert "likely: its own" in message([MEAN, LOCAL], hints=[hint])


def test_a_hint_may_be_computed_only_where_something_is_wrong():
    def not_yet() -> list[dict[str, torch.Tensor | None]]:
        asked.append(1)
        return [{"first.weight": MEAN}, {"first.weight": LOCAL}]

    asked: list[int] = []
    hint = Hint("its own", not_yet)
    judge.tensors([{"first.weight": MEAN}], {"first.weight": MEAN}, quantity="x", hints=[hint])
    assert not asked
    assert "likely: its own" in message([MEAN, LOCAL], hints=[hint])
    assert asked


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


def test_exact_comparison_forgives_nothing_but_the_sign_of_zero():
    judge.tensors([{"a": torch.tensor([-0.0])}], {"a": torch.tensor([0.0])}, quantity="x")
    tiny = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(judge.Violation, match=r"allowed 0\.0e"):
        judge.tensors([{"a": tiny}], {"a": torch.tensor(1.0)}, quantity="x", within=exact())


@pytest.mark.parametrize("special", [float("inf"), float("-inf")])
def test_an_infinity_equals_itself_and_allows_nothing_else(special: float):
    within = rounding(torch.float64, terms=4)
    wanted = torch.tensor([special, 1.0], dtype=torch.float64)
    near = torch.tensor([special, 1.0 + 1e-16], dtype=torch.float64)
    judge.tensors([{"a": near}], {"a": wanted}, quantity="x", within=within)
    for wrong in ([special, 1.1], [-special, 1.0], [0.0, 1.0], [float("nan"), 1.0]):
        seen = {"a": torch.tensor(wrong, dtype=torch.float64)}
        with pytest.raises(judge.Violation):
            judge.tensors([seen], {"a": wanted}, quantity="x", within=within)


def test_an_expected_nan_accepts_nothing():
    wanted = torch.tensor([float("nan"), 1.0])
    within = rounding(torch.float32, terms=4)
    for seen in (wanted, torch.ones(2)):
        with pytest.raises(judge.Violation):
            judge.tensors([{"a": seen}], {"a": wanted}, quantity="x", within=within)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(True),
        torch.arange(3),
        torch.ones(2, dtype=torch.bfloat16),
    ],
    ids=["empty", "bool", "integers", "bfloat16"],
)
def test_tensors_of_any_kind_are_judged(tensor: torch.Tensor):
    judge.tensors([{"a": tensor}], {"a": tensor.clone()}, quantity="x")
    if tensor.numel():
        changed = ~tensor if tensor.dtype == torch.bool else tensor + 1
        with pytest.raises(judge.Violation, match="rank 0, 'a'"):
            judge.tensors([{"a": changed}], {"a": tensor}, quantity="x")


# --------------------------------------------------------------------------------- other judges


def test_ranks_that_differ_are_told_from_rank_0():
    with judge.judging(SITUATION), pytest.raises(judge.Violation) as caught:
        judge.same_on_all_ranks(
            [{"a": MEAN}, {"a": MEAN}, {"a": LOCAL}], quantity="weight", given="after step 3"
        )
    assert "rank 2, 'a': its weight differs from rank 0's (largest error 1 at (0, 0)" in str(
        caught.value
    )
    assert "likely: the ranks did not do the same thing" in str(caught.value)
    assert "given: after step 3, ddp-w2-mlp, mine.py" in str(caught.value)


def test_ranks_that_agree_and_ranks_alone_pass():
    judge.same_on_all_ranks([{"a": MEAN, "b": None}] * 3, quantity="weight")
    judge.same_on_all_ranks([{"a": MEAN}], quantity="weight")


@pytest.mark.parametrize("other", [{}, {"a": MEAN, "b": MEAN}], ids=["missing", "unexpected"])
def test_ranks_with_other_names_differ(other):
    with pytest.raises(judge.Violation, match="for other names than expected"):
        judge.same_on_all_ranks([{"a": MEAN}, other], quantity="weight")


def test_plain_values_are_compared_rank_by_rank():
    judge.equal([3, 3], 3, quantity="steps")
    with pytest.raises(judge.Violation, match=r"rank 1: expected steps 3, got 4$"):
        judge.equal([3, 4], 3, quantity="steps")
    with pytest.raises(judge.Violation, match=r"rank 0: .* got 4   \(ranks \[0, 2\] are wrong\)"):
        judge.equal([4, 3, 5], 3, quantity="steps")


def test_a_condition_is_a_judge_too():
    judge.holds(True, "never shown")
    with pytest.raises(judge.Violation) as caught:
        judge.holds(False, "two is not three", likely="arithmetic", given="a test")
    assert "two is not three\nlikely: arithmetic\ngiven: a test" in str(caught.value)


def test_situations_nest_and_end():
    inner = judge.Situation(clause="data.order.inner")
    with judge.judging(SITUATION):
        with judge.judging(inner), pytest.raises(judge.Violation, match=r"^\[data\.order\.inner\]"):
            judge.holds(False, "x")
        with pytest.raises(judge.Violation, match=r"^\[ddp\.gradients\.mean\]"):
            judge.holds(False, "x")
    with pytest.raises(judge.Violation, match=r"^\[\(no clause\)\]"):
        judge.holds(False, "x")
