"""The gradients of q, k and v, for a random gradient of the output.

Never for `out.sum()`: there dO is one everywhere, delta is the sum of O, and a wrong scale or a
missing delta can cancel. The backward recomputes probabilities from the log-sum-exp, so what
it does with that number (its own gradient, its base, its infinities) is judged here too.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.bodies import ATTENTION, call, observe
from spec_tests.chapters.attention.defined import (
    ALL,
    GRADIENTS,
    OUTPUT_AND_GRADIENTS,
    as_defined,
    fitting,
    is_tf32,
    require_right,
)
from spec_tests.chapters.attention.problem import AS_THE_EXERCISE, RAGGED, Problem, inputs
from spec_tests.chapters.attention.test_forward import MASKS
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))


@clause(
    "attention.gradients.values",
    level="course",
    source="contract: values; CS336 assignment 2, FlashAttention-2 backward; Dao 2023, section 3.2",
)
def test_gradients_are_those_of_the_definition(world, subject):
    """dQ, dK and dV MUST be those of softmax(q k^T scale) v, to float32 or TF32 rounding.

    O and L are what the backward begins with: where they are wrong, the message says so first.
    """
    as_defined(world, subject, AS_THE_EXERCISE, *ALL)


@clause(
    "attention.gradients.half-precision",
    source="contract: one-rounding; "
    "flash-attn tests; errors in norm see what the largest error does not",
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_half_precision_gradients_are_as_good_as_their_rounding(world, subject, dtype, mask):
    """In float16 and bfloat16 the gradients MUST be within 1.25 roundings in norm."""
    problem = RAGGED.but(dtype=dtype, causal=mask == "causal")
    problem = fitting(world, subject, problem, is_about_dtype=True)
    as_defined(world, subject, problem, *GRADIENTS)


@clause(
    "attention.gradients.long-sums",
    judges=("flash_attention",),
    source="contract: one-rounding; "
    "accumulators in bfloat16: three times the error, of which the largest shows nothing",
)
def test_sums_over_a_thousand_keys_are_wide(world, subject):
    """Over 1024 keys in bfloat16, O MUST stay within one rounding, its gradients within 1.25.

    An accumulator in bfloat16 loses what is small beside it, a little everywhere; the largest
    error, which the field compares, barely moves.
    """
    problem = fitting(world, subject, Problem(seq_q=1024, heads=1, dtype="bfloat16"))
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


@clause("attention.gradients.scale", source="contract: scale")
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_gradients_know_the_scale(world, subject, scale):
    """With a custom scale, dQ and dK MUST be multiplied by it once, and dV not at all."""
    problem = fitting(world, subject, RAGGED.but(scale=scale))
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


@clause("attention.gradients.scale-zero", source="contract: scale; `scale or default`")
def test_a_scale_of_zero_leaves_only_the_values_to_learn(world, subject):
    """With a scale of zero, dQ and dK MUST be zero."""
    problem = fitting(world, subject, RAGGED.but(scale=0.0))
    seen = observe(world, subject, bodies.gradients, problem)

    x = inputs(problem)
    judge.tensors(
        [{name: seen[name] for name in ("dQ", "dK")}],
        {"dQ": torch.zeros_like(x.q), "dK": torch.zeros_like(x.k)},
        quantity="gradient",
        given=repr(problem),
    )


@clause(
    "attention.gradients.large-logits",
    source="contract: one-rounding; "
    "flash-attn tests, overflow in the backward; TransformerEngine issue 3216",
)
@pytest.mark.parametrize("data", ["large", "negative", "outliers"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_survive_large_logits(world, subject, data, mask):
    """Logits of hundreds, of either sign, MUST give the definition's gradients, all finite."""
    problem = fitting(world, subject, RAGGED.but(data=data, causal=mask == "causal"))
    as_defined(world, subject, problem, *GRADIENTS)


@clause(
    "attention.gradients.wide-range",
    source="contract: one-rounding; "
    "Triton tutorial: P and dS are cast to float16, whatever the inputs are",
)
@pytest.mark.parametrize("upstream", [1e6, 1e-6])
def test_gradients_have_the_range_of_their_dtype(world, subject, upstream):
    """In bfloat16 a dO of 1e6 or 1e-6 MUST give gradients as exact as one of 1.

    bfloat16 has the range of float32 and is chosen for it; a step through float16 overflows, or
    loses everything below 6e-8.
    """
    problem = fitting(world, subject, RAGGED.but(dtype="bfloat16"))
    require_right(world, subject, problem)
    problem = problem.but(upstream=upstream)
    as_defined(world, subject, problem, *GRADIENTS)


@clause(
    "attention.gradients.float32-range",
    source="contract: one-rounding; "
    "Triton tutorial: P and dS are cast to float16, whatever the inputs are",
)
@pytest.mark.parametrize("upstream", [1e6, 1e-6])
def test_float32_gradients_have_its_range(world, subject, upstream):
    """In float32 a dO of 1e6 or 1e-6 MUST give gradients as exact as one of 1."""
    as_defined(world, subject, fitting(world, subject, RAGGED.but(upstream=upstream)), *GRADIENTS)


@clause(
    "attention.gradients.of-the-lse",
    source="contract: lse-gradient; "
    "flash-attn issues 889 and 1137: returned, and its gradient silently zero",
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["2-2", "4-2"])
def test_the_lse_is_differentiable_or_says_that_it_is_not(world, subject, mask, heads):
    """A log-sum-exp that requires grad MUST pass its gradient on to q and k.

    Marked non-differentiable it is right as well. What is wrong is to look differentiable and to
    drop the gradient: a z-loss that trains nothing. Heads that share keys are judged where their
    gradients are right without it.
    """
    num_heads, kv_heads = map(int, heads.split("-"))
    problem = RAGGED.but(causal=mask == "causal", seq_q=40, heads=num_heads, kv_heads=kv_heads)
    problem = fitting(world, subject, problem)
    if num_heads != kv_heads:
        require_right(world, subject, problem)
    problem = problem.but(lse_gradient=True)
    is_differentiable = observe(world, subject, lse_requires_grad, problem)
    seen = observe(world, subject, bodies.gradients, problem)

    judged = problem if is_differentiable else problem.but(lse_gradient=False)
    rules.close(seen, judged, names=GRADIENTS, tf32=is_tf32(world, subject))


def lse_requires_grad(ctx, subject, problem):
    """Whether the returned L takes part in autograd."""
    x = inputs(problem).to(ctx.device)
    _, lse = call(ctx, subject, x.q, x.k, x.v, causal=problem.causal, return_lse=True)
    return lse.requires_grad


def wanted_only(ctx, subject, problem, names):
    """Gradients by name where only `names` of q, k, v require them; others as None."""
    x = inputs(problem).to(ctx.device)
    leaves = {"dQ": x.q, "dK": x.k, "dV": x.v}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in names)
    out = call(ctx, subject, x.q, x.k, x.v, causal=problem.causal)
    out.backward(x.do)
    return {name: leaf.grad for name, leaf in leaves.items()}


@clause("attention.gradients.only-where-wanted", source="torch.autograd.Function: needs_input_grad")
@pytest.mark.parametrize("names", ["dQ", "dK", "dV", "dK+dV"])
def test_gradients_arrive_where_they_are_wanted_and_nowhere_else(world, subject, names):
    """Inputs that require no gradient MUST get none, and the others theirs."""
    problem = fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, wanted_only, problem, names.split("+"))

    missing = {name for name, gradient in seen.items() if gradient is None}
    judge.equal([missing], {*GRADIENTS} - {*names.split("+")}, quantity="names without one")
    rules.close(seen, problem, names=names.split("+"), tf32=is_tf32(world, subject))
