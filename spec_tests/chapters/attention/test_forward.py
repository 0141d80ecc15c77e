"""The output and the log-sum-exp of each row, against the definition in float64.

A kernel that is wrong in one tile, one dtype or one sign of the scale still gives plausible
numbers, and a tolerance of 1e-2 on one shape accepts most of them. Here every value is held to its
own rounding (see `rules`), on data that moves the running maximum, and with scales and signs that
Gaussian inputs never bring.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.bodies import ATTENTION, call, observe
from spec_tests.chapters.attention.defined import (
    ALL,
    OUTPUT_AND_LSE,
    as_defined,
    fitting,
    is_tf32,
    require_causal,
    require_right,
)
from spec_tests.chapters.attention.problem import (
    AS_THE_EXERCISE,
    RAGGED,
    WHOLE_TILES,
    Problem,
    inputs,
    reference,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

MASKS = ("full", "causal")
IN_HALF = {
    "wide-logits": RAGGED.but(data="negative"),
    "full": RAGGED,
    "causal": RAGGED.but(causal=True),
}


@clause(
    "attention.forward.values",
    level="course",
    source="contract: values; CS336 assignment 2, FlashAttention-2 forward; Dao 2023, section 3.1",
)
def test_the_output_is_softmax_of_scaled_scores_times_values(world, subject):
    """The output MUST be softmax(q k^T scale) v, to float32 or TF32 rounding.

    The exercise's tests allow 1e-2, and TF32 is what `tl.dot` does on a GPU unless told otherwise.
    """
    as_defined(world, subject, AS_THE_EXERCISE, "O")


@clause(
    "attention.forward.float32-products",
    transports=("gloo", "sim"),
    source="contract: one-rounding; a kernel that casts to float16 before `tl.dot`",
)
def test_products_of_float32_keep_24_bits(world, subject):
    """Of float32 inputs O, L and the gradients MUST have float32's rounding, not float16's."""
    require_right(world, subject, AS_THE_EXERCISE)
    as_defined(world, subject, AS_THE_EXERCISE, *ALL, tf32=False)


@clause(
    "attention.forward.lse-values",
    level="course",
    source="contract: lse-values; "
    "CS336 assignment 2, equation 12: L is saved for the backward, one number per row",
)
def test_the_log_sum_exp_of_each_row_is_there(world, subject):
    """L MUST be the natural log-sum-exp of each row's scores, one number per query."""
    as_defined(world, subject, AS_THE_EXERCISE, "L")


@clause(
    "attention.forward.half-precision",
    source="contract: one-rounding; "
    "flash-attn tests: errors relative to a plain attempt; norms in place of maxima",
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", IN_HALF)
def test_half_precision_is_as_good_as_its_rounding(world, subject, dtype, case):
    """In float16 and bfloat16 the output MUST be within one rounding of the definition, in norm.

    And no further than 1.25 times a plain attempt in that dtype: the sums are float32. A result in
    another dtype than q's is none. Scores of a hundred show a rounding of theirs, those of one
    hide it beside the output's.
    """
    problem = fitting(world, subject, IN_HALF[case].but(dtype=dtype), is_about_dtype=True)
    as_defined(world, subject, problem, "O")


@clause(
    "attention.forward.lse",
    source="contract: lse-dtype, lse-values; PyTorch issue 181645, a base-2 logarithm",
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_log_sum_exp_is_natural_and_float32(world, subject, dtype, mask):
    """The log-sum-exp MUST be natural, float32, [batch, heads, seq_q], to 4e-6 in every dtype.

    Ring attention and split keys merge results by it. Statistics are float32 whatever the inputs
    are: a scale that is multiplied into K in its own dtype shows here, and nowhere else.
    """
    problem = fitting(world, subject, RAGGED.but(dtype=dtype, causal=mask == "causal"))
    as_defined(world, subject, problem, "L")


@clause(
    "attention.forward.large-logits",
    source="contract: one-rounding; flash-attn tests, overflow; softmax without a maximum",
)
@pytest.mark.parametrize("data", ["large", "negative", "outliers"])
@pytest.mark.parametrize("mask", MASKS)
def test_large_logits_of_either_sign_are_exact(world, subject, data, mask):
    """Logits of hundreds, of either sign, MUST give the definition's values.

    Logits that are all negative find a running maximum that begins at zero; channels thirty times
    the others move it late.
    """
    problem = fitting(world, subject, RAGGED.but(data=data, causal=mask == "causal"))
    as_defined(world, subject, problem, *OUTPUT_AND_LSE)


@clause(
    "attention.forward.scale",
    source="contract: scale; the Triton tutorial multiplies the maximum by it",
)
@pytest.mark.parametrize("scale", [0.0, 0.3, -0.3, 1.0])
def test_any_scale_is_honoured(world, subject, scale):
    """Any scale MUST be honoured: zero is the mean of v, and negative ones turn the order round."""
    as_defined(world, subject, fitting(world, subject, RAGGED.but(scale=scale)), *OUTPUT_AND_LSE)


@clause(
    "attention.forward.negative-scale-wide-logits",
    source="contract: scale; "
    "Triton tutorial: max(q k) * scale is the smallest score where the scale is negative",
)
def test_a_negative_scale_takes_the_maximum_of_the_scores(world, subject):
    """With a negative scale and logits hundreds apart the output MUST stay finite and right."""
    problem = fitting(world, subject, RAGGED.but(scale=-2.0, data="large"))
    as_defined(world, subject, problem, *OUTPUT_AND_LSE)


@clause(
    "attention.forward.equal-keys",
    source="contract: lse-values, values; Triton issue 6242, an oracle without arithmetic",
)
@pytest.mark.parametrize("data", ["ones", "equal-keys"])
@pytest.mark.parametrize("mask", MASKS)
def test_equal_keys_give_the_mean_of_the_values_seen(world, subject, data, mask):
    """Equal keys MUST give the mean of the values that a query sees, and L = score + ln(count).

    It counts keys: one tile too many, or padding that is not masked, shows in every row.
    """
    problem = fitting(world, subject, RAGGED.but(data=data, causal=mask == "causal"))
    as_defined(world, subject, problem, *OUTPUT_AND_LSE)


@clause(
    "attention.forward.scores-far-below-zero",
    level="production",
    source="contract: values; flashinfer pull request 4401: a running maximum that began at -5e4",
)
@pytest.mark.parametrize("mask", MASKS)
def test_scores_far_below_zero_are_scores(world, subject, mask):
    """Where all scores lie near -1e5 the output MUST still be the mean of the values seen.

    A running maximum that begins at a large negative number in place of minus infinity wins against
    such scores, and every weight is zero.
    """
    options = {"data": "ones", "scale": -16384.0, "causal": mask == "causal"}
    problem = fitting(world, subject, RAGGED.but(**options))
    seen = observe(world, subject, bodies.forward, problem)["O"]

    # All scores of a row are equal, and all values one: the bound of `rules`, which grows with the
    # scores, would allow anything.
    within = rounding(seen.dtype, terms=problem.num_keys)
    judge.tensors(
        [{"O": seen}],
        {"O": torch.ones_like(seen)},
        quantity="mean of the values seen",
        within=within,
        given=repr(problem),
    )


POISONED = 37
"""A row in the middle of a tile."""


def poisoned(ctx, subject, problem, part="q", row=POISONED):
    """O where one row of q, k or v is NaN."""
    x = inputs(problem).to(ctx.device)
    with torch.no_grad():
        getattr(x, part)[..., row, :] = torch.nan
        return {"O": call(ctx, subject, x.q, x.k, x.v, causal=problem.causal)}


@clause(
    "attention.forward.rows-are-apart",
    source="contract: rows-apart; "
    "rows rescaled by a product with a diagonal matrix, where 0 * NaN is NaN",
)
@pytest.mark.parametrize("mask", MASKS)
def test_a_row_of_nan_stays_in_its_row(world, subject, mask):
    """Where one row of q is NaN, the other rows of the output MUST have the definition's values."""
    problem = Problem(seq_q=WHOLE_TILES, heads=1, causal=mask == "causal")
    require_causal(world, subject, problem)
    require_right(world, subject, problem, is_differentiated=False)
    seen = observe(world, subject, poisoned, problem)

    seen["O"][..., POISONED, :] = reference(problem)["O"][..., POISONED, :]
    rules.close(seen, problem, names=("O",), tf32=is_tf32(world, subject))


@clause(
    "attention.forward.nan-comes-out",
    level="production",
    source="contract: nan-comes-out; an overflow is found by the NaN that it leaves in a loss",
)
@pytest.mark.parametrize("case", ["q", "k", "v", "q-of-four-keys"])
def test_nan_comes_out_as_nan(world, subject, case):
    """NaN in a query, key or value MUST be NaN in each row of the output that depends on it.

    Where a maximum or a test for rows that see nothing swallows it, training goes on with numbers.
    """
    part, _, is_short = case.partition("-")
    length, row = (4, 2) if is_short else (WHOLE_TILES, POISONED)
    problem = fitting(world, subject, Problem(seq_q=length, heads=1))
    require_right(world, subject, problem, is_differentiated=False)
    seen = observe(world, subject, poisoned, problem, part, row)

    rows = [row] if part == "q" else range(problem.seq_q)
    finite = [row for row in rows if not seen["O"][..., row, :].isnan().all()]
    judge.holds(
        not finite,
        f"expected NaN in {len(rows)} rows of O, got numbers in {len(finite)} of them, the first "
        f"of which is row {next(iter(finite), None)}",
        likely="NaN is taken for a masked score, or for a row that sees nothing",
        given=f"{problem!r}, row {row} of {part} is NaN",
    )


@clause("attention.forward.float64", source="contract: float64; gradcheck needs one")
@pytest.mark.parametrize("mask", MASKS)
def test_float64_is_float64_or_refused(world, subject, mask):
    """In float64 O, L and gradients MUST have its rounding, or be refused with an error."""
    problem = RAGGED.but(dtype="float64", causal=mask == "causal")
    problem = fitting(world, subject, problem, is_about_dtype=True)
    for is_differentiated in (False, True):  # a backward that refuses does not excuse a forward
        seen = observe(
            world, subject, bodies.or_refused, problem, is_differentiated=is_differentiated
        )
        if not isinstance(seen, str):
            rules.close(seen, problem, names=ALL if is_differentiated else OUTPUT_AND_LSE)
