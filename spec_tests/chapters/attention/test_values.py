"""Output, log-sum-exp and gradients, against the definition in float64.

A kernel that is wrong in one tile, one dtype or one sign of the scale still gives plausible
numbers, and a tolerance of 1e-2 on one shape accepts most of them. Here every value is held to its
own rounding (see `rules`), on data that moves the running maximum, and with scales and signs that
Gaussian inputs never bring.

Gradients are those for a random gradient of the output. For `out.sum()` dO is one everywhere, delta
is the sum of O, and a wrong scale or a missing delta can cancel. The backward recomputes
probabilities from the log-sum-exp, so what it does with that number (its own gradient, its base,
its infinities) is judged here too.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spec_tests.chapters.attention import bodies, law, rules
from spec_tests.chapters.attention.bodies import ATTENTION, TILED, observe
from spec_tests.chapters.attention.problem import (
    ALL,
    AS_THE_EXERCISE,
    GRADIENTS,
    OUTPUT_AND_GRADIENTS,
    RAGGED,
    WHOLE_TILES,
    Problem,
    inputs,
    reference,
    same,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))
defined, fitted = rows(clause, law.as_defined), rows(clause, law.as_fitted)
outputs = rows(clause, partial(law.as_fitted, names=("O", "L")))
gradients = rows(clause, partial(law.as_fitted, names=GRADIENTS))

FULL_AND_CAUSAL = law.varied(RAGGED, causal=law.BOTH)
LOGITS = law.varied(RAGGED, causal=law.BOTH, data=("large", "negative", "outliers"))
HALF = ("float16", "bfloat16")

test_forward_values = defined(
    "attention.forward.values",
    "The output MUST be softmax(q k^T scale) v, to float32 or TF32 rounding.",
    # The exercise's tests allow 1e-2, and TF32 is what `tl.dot` does on a GPU unless told
    # otherwise.
    AS_THE_EXERCISE,
    names=("O",),
    level="course",
    source="contract: values; CS336 assignment 2, FlashAttention-2 forward; Dao 2023, section 3.1",
)


@clause(
    "attention.forward.float32-products",
    transports=("gloo", "sim"),
    source="contract: one-rounding; a kernel that casts to float16 before `tl.dot`",
)
def test_products_of_float32_keep_24_bits(world, subject):
    """Of float32 inputs O, L and the gradients MUST have float32's rounding, not float16's."""
    law.require_right(world, subject, AS_THE_EXERCISE)
    law.as_defined(world, subject, AS_THE_EXERCISE, tf32=False)


test_lse_values = defined(
    "attention.forward.lse-values",
    "L MUST be the natural log-sum-exp of each row's scores, one number per query.",
    AS_THE_EXERCISE,
    names=("L",),
    level="course",
    source="contract: lse-values; "
    "CS336 assignment 2, equation 12: L is saved for the backward, one number per row",
)

test_forward_half_precision = fitted(
    "attention.forward.half-precision",
    "In float16 and bfloat16 the output MUST be within one rounding of the definition, in norm.",
    # And no further than 1.25 times a plain attempt in that dtype: the sums are float32. A result
    # in another dtype than q's is none. Scores of a hundred show a rounding of theirs, those of one
    # hide it beside the output's.
    {
        f"{case}-{dtype}": problem.but(dtype=dtype)
        for case, problem in {"wide-logits": RAGGED.but(data="negative"), **FULL_AND_CAUSAL}.items()
        for dtype in HALF
    },
    names=("O",),
    is_about_dtype=True,
    source="contract: one-rounding; "
    "flash-attn tests: errors relative to a plain attempt; norms in place of maxima",
)

test_lse = fitted(
    "attention.forward.lse",
    "The log-sum-exp MUST be natural, float32, [batch, heads, seq_q], to 4e-6 in every dtype.",
    # Ring attention and split keys merge results by it. Statistics are float32 whatever the inputs
    # are: a scale that is multiplied into K in its own dtype shows here, and nowhere else.
    law.varied(RAGGED, causal=law.BOTH, dtype=("float32", *HALF)),
    names=("L",),
    source="contract: lse-dtype, lse-values; PyTorch issue 181645, a base-2 logarithm",
)

test_forward_large_logits = outputs(
    "attention.forward.large-logits",
    "Logits of hundreds, of either sign, MUST give the definition's values.",
    # Logits that are all negative find a running maximum that begins at zero; channels thirty times
    # the others move it late.
    LOGITS,
    source="contract: one-rounding; flash-attn tests, overflow; softmax without a maximum",
)

test_forward_scale = outputs(
    "attention.forward.scale",
    "Any scale MUST be honoured: zero is the mean of v, and negative ones turn the order round.",
    law.varied(RAGGED, scale=(0.0, 0.3, -0.3, 1.0, 2))
    | law.varied(RAGGED.but(causal=True), scale={"causal-zero": 0.0, "causal-negative": -0.3}),
    source="contract: scale; the Triton tutorial multiplies the maximum by it",
)

test_negative_scale_wide_logits = outputs(
    "attention.forward.negative-scale-wide-logits",
    "With a negative scale and logits hundreds apart the output MUST stay finite and right.",
    RAGGED.but(scale=-2.0, data="large"),
    source="contract: scale; "
    "Triton tutorial: max(q k) * scale is the smallest score where the scale is negative",
)

test_equal_keys = outputs(
    "attention.forward.equal-keys",
    "Equal keys MUST give the mean of the values that a query sees, and L = score + ln(count).",
    # It counts keys: one tile too many, or padding that is not masked, shows in every row.
    law.varied(RAGGED, causal=law.BOTH, data=("ones", "equal-keys")),
    source="contract: lse-values, values; Triton issue 6242, an oracle without arithmetic",
)


@clause(
    "attention.forward.scores-far-below-zero",
    level="production",
    source="contract: values; flashinfer pull request 4401: a running maximum that began at -5e4",
)
@law.problems(law.varied(RAGGED.but(data="ones", scale=-16384.0), causal=law.BOTH))
def test_scores_far_below_zero_are_scores(world, subject, problem):
    """Where all scores lie near -1e5 the output MUST still be the mean of the values seen.

    A running maximum that begins at a large negative number in place of minus infinity wins against
    such scores, and every weight is zero.
    """
    problem = law.fitting(world, subject, problem)
    [seen] = law.asked(world, subject, problem, ("O",), same)

    # All scores of a row are equal, and all values one: the bound of `rules`, which grows with the
    # scores, would allow anything.
    within = rounding(seen["O"].dtype, terms=problem.num_keys)
    ones = {"O": torch.ones_like(seen["O"])}
    judge.tensors([seen], ones, quantity="mean of the values seen", within=within)


POISONED = 37
"""A row in the middle of a tile."""


def poisoned(x, part="q", row=POISONED):
    """One row of q, k or v is NaN."""
    getattr(x, part)[..., row, :] = torch.nan
    return x


@clause(
    "attention.forward.rows-are-apart",
    source="contract: rows-apart; "
    "rows rescaled by a product with a diagonal matrix, where 0 * NaN is NaN",
)
@law.problems(law.varied(Problem(seq_q=WHOLE_TILES, heads=1), causal=law.BOTH))
def test_a_row_of_nan_stays_in_its_row(world, subject, problem):
    """Where one row of q is NaN, the other rows of the output MUST have the definition's values."""
    law.require_causal(world, subject, problem)
    law.require_right(world, subject, problem, is_differentiated=False)
    [seen] = law.asked(world, subject, problem, ("O",), poisoned)

    seen["O"][..., POISONED, :] = reference(problem)["O"][..., POISONED, :]
    law.close(world, subject, seen, problem, "O")


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
    problem = law.fitting(world, subject, Problem(seq_q=length, heads=1))
    law.require_right(world, subject, problem, is_differentiated=False)
    [seen] = law.asked(world, subject, problem, ("O",), partial(poisoned, part=part, row=row))

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
@law.problems(law.varied(RAGGED.but(dtype="float64"), causal=law.BOTH))
def test_float64_is_float64_or_refused(world, subject, problem):
    """In float64 O, L and gradients MUST have its rounding, or be refused with an error."""
    problem = law.fitting(world, subject, problem, is_about_dtype=True)
    for names in (("O", "L"), ALL):  # a backward that refuses does not excuse a forward
        asked = law.offered(world, subject, names)
        seen = observe(world, subject, bodies.or_refused, problem, asked)
        if not isinstance(seen, str):
            rules.close(seen, problem, names=asked)


test_gradients_values = defined(
    "attention.gradients.values",
    "dQ, dK and dV MUST be those of softmax(q k^T scale) v, to float32 or TF32 rounding.",
    # O and L are what the backward begins with: where they are wrong, the message says so first.
    AS_THE_EXERCISE,
    level="course",
    source="contract: values; CS336 assignment 2, FlashAttention-2 backward; Dao 2023, section 3.2",
)

test_gradients_half_precision = gradients(
    "attention.gradients.half-precision",
    "In float16 and bfloat16 the gradients MUST be within 1.25 roundings in norm.",
    law.varied(RAGGED, causal=law.BOTH, dtype=HALF),
    is_about_dtype=True,
    source="contract: one-rounding; "
    "flash-attn tests; errors in norm see what the largest error does not",
)

test_long_sums = fitted(
    "attention.gradients.long-sums",
    "Over 1024 keys in bfloat16, O MUST stay within one rounding, its gradients within 1.25.",
    # An accumulator in bfloat16 loses what is small beside it, a little everywhere; the largest
    # error, which the field compares, barely moves.
    Problem(seq_q=1024, heads=1, dtype="bfloat16"),
    names=OUTPUT_AND_GRADIENTS,
    judges=TILED,
    source="contract: one-rounding; "
    "accumulators in bfloat16: three times the error, of which the largest shows nothing",
)


@clause("attention.gradients.scale", source="contract: scale")
@law.problems(law.varied(RAGGED, scale=(0.3, -0.3)))
def test_gradients_know_the_scale(world, subject, problem):
    """With a custom scale, dQ and dK MUST be multiplied by it once, and dV not at all."""
    law.as_fitted(world, subject, problem, OUTPUT_AND_GRADIENTS)


@clause("attention.gradients.scale-zero", source="contract: scale; `scale or default`")
def test_a_scale_of_zero_leaves_only_the_values_to_learn(world, subject):
    """With a scale of zero, dQ and dK MUST be zero."""
    problem = law.fitting(world, subject, RAGGED.but(scale=0.0))
    seen = law.asked(world, subject, problem, ("dQ", "dK"), same)

    zeros = inputs(problem).each(torch.zeros_like)
    judge.tensors(seen, {"dQ": zeros.q, "dK": zeros.k}, quantity="gradient")


test_gradients_large_logits = gradients(
    "attention.gradients.large-logits",
    "Logits of hundreds, of either sign, MUST give the definition's gradients, all finite.",
    LOGITS,
    source="contract: one-rounding; "
    "flash-attn tests, overflow in the backward; TransformerEngine issue 3216",
)

RANGE = "Triton tutorial: P and dS are cast to float16, whatever the inputs are"


@clause("attention.gradients.wide-range", source="contract: one-rounding; " + RANGE)
@pytest.mark.parametrize("upstream", [1e6, 1e-6])
def test_gradients_have_the_range_of_their_dtype(world, subject, upstream):
    """In bfloat16 a dO of 1e6 or 1e-6 MUST give gradients as exact as one of 1.

    bfloat16 has the range of float32 and is chosen for it; a step through float16 overflows, or
    loses everything below 6e-8.
    """
    problem = law.fitting(world, subject, RAGGED.but(dtype="bfloat16"))
    law.require_right(world, subject, problem)
    law.as_defined(world, subject, problem.but(upstream=upstream), GRADIENTS)


test_float32_range = gradients(
    "attention.gradients.float32-range",
    "In float32 a dO of 1e6 or 1e-6 MUST give gradients as exact as one of 1.",
    law.varied(RAGGED, upstream=(1e6, 1e-6)),
    source="contract: one-rounding; " + RANGE,
)


@clause(
    "attention.gradients.of-the-lse",
    source="contract: lse-gradient; "
    "flash-attn issues 889 and 1137: returned, and its gradient silently zero",
)
@pytest.mark.parametrize("upstream", [1.0, 0.0], ids=["beside", "alone"])
@pytest.mark.parametrize("heads", [2, 4])
@law.problems(law.varied(RAGGED.but(seq_q=40, kv_heads=2), causal=law.BOTH))
def test_the_lse_is_differentiable_or_says_that_it_is_not(world, subject, problem, heads, upstream):
    """A log-sum-exp that requires grad MUST pass its gradient on to q and k.

    Marked non-differentiable it is right as well. What is wrong is to look differentiable and to
    drop the gradient: a z-loss that trains nothing. A loss may be of the log-sum-exp alone. Heads
    that share keys, and a scale, are judged where gradients are right with them and without it.
    """
    problem = law.fitting(world, subject, problem.but(heads=heads))
    if heads != problem.kv_heads:
        problem = problem.but(scale=0.3)
        law.require_right(world, subject, problem)
    seen, is_differentiable = observe(
        world, subject, with_lse_gradient, problem.but(lse_gradient=True, upstream=upstream)
    )

    problem = problem.but(lse_gradient=is_differentiable, upstream=upstream)
    law.close(world, subject, seen, problem, *GRADIENTS)


def with_lse_gradient(ctx, subject, problem):
    """The gradients with one of L, too, if L takes part in autograd; and whether it does."""
    x = inputs(problem).to(ctx.device)
    _, lse = bodies.forward(ctx, subject, problem, x, return_lse=True)
    return bodies.answer(ctx, subject, problem, x, GRADIENTS), lse.requires_grad


def wanted_only(ctx, subject, problem, names):
    """Gradients by name where only `names` of q, k, v require them; others as None."""
    x = inputs(problem).to(ctx.device)
    leaves = dict(zip(GRADIENTS, (x.q, x.k, x.v), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in names)
    bodies.forward(ctx, subject, problem, x).backward(x.do)
    return {name: leaf.grad for name, leaf in leaves.items()}


@clause(
    "attention.gradients.only-where-wanted",
    source="contract: wanted-gradients; torch.autograd.Function: needs_input_grad",
)
@pytest.mark.parametrize("names", ["dQ", "dK", "dV", "dK+dV"])
@law.problems(law.varied(Problem(seq_q=40), causal=law.BOTH))
def test_gradients_arrive_where_they_are_wanted_and_nowhere_else(world, subject, problem, names):
    """Inputs that require no gradient MUST get none, and the others theirs."""
    problem, wanted = law.fitting(world, subject, problem), names.split("+")
    seen = observe(world, subject, wanted_only, problem, wanted)

    missing = {name for name, gradient in seen.items() if gradient is None}
    judge.equal([missing], {*GRADIENTS} - {*wanted}, quantity="names without one")
    law.close(world, subject, seen, problem, *wanted)
