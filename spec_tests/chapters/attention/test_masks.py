"""The mask: which key a query sees, where lengths differ, and where it sees none.

Causal is aligned bottom-right: the last query sees all keys, as with a cache of earlier keys.
PyTorch's own `is_causal` is top-left; on square inputs, which is what most tests use, the two are
the same. A row that sees nothing is 0/0 in the definition; zeros, -inf and zero gradients are what
every library came to.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.bodies import ATTENTION, KERNELS, TILED, call, observe
from spec_tests.chapters.attention.defined import (
    OUTPUT_AND_GRADIENTS,
    OUTPUT_AND_LSE,
    as_defined,
    fitting,
    is_tf32,
    require_finite,
    require_right,
)
from spec_tests.chapters.attention.problem import AS_THE_EXERCISE, WHOLE_TILES, Problem, inputs
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

# Name to (seq_q, seq_k): shorter, longer, by less and by more than a tile, one query of a decoder.
LENGTHS = {
    "more-keys": (50, 83),
    "one-more-key": (64, 65),
    "fewer-keys": (83, 50),
    "decode": (1, 77),
    "few-keys": (70, 3),
}
UNEQUAL = ("", "head dims", "whole tiles")
"""Of `FITS`, those that keep what clauses about unequal lengths are about."""
PARTS = {"forward": OUTPUT_AND_LSE, "backward": OUTPUT_AND_GRADIENTS}


@clause(
    "attention.causal.values",
    level="course",
    judges=KERNELS,
    source="contract: triton-causal; "
    "CS336 assignment 2, flash_forward (c): a flag for causal masking, in Triton",
)
@pytest.mark.parametrize("part", PARTS)
def test_a_kernel_with_a_causal_mask_has_the_values(world, subject, part):
    """With a causal mask a kernel's O, L and gradients MUST be those of the definition."""
    as_defined(world, subject, AS_THE_EXERCISE.but(causal=True), *PARTS[part])


@clause(
    "attention.causal.equal-lengths",
    judges=TILED,
    source="contract: causal; CS336 assignment 2 lets its version without Triton ignore the flag",
)
@pytest.mark.parametrize("part", PARTS)
def test_a_causal_mask_is_not_ignored(world, subject, part):
    """With a causal mask and equal lengths O, L and gradients MUST be those of the definition."""
    as_defined(world, subject, AS_THE_EXERCISE.but(causal=True), *PARTS[part])


def without_the_flag(ctx, subject, problem):
    """The output of a call that does not say whether it is causal."""
    x = inputs(problem).to(ctx.device)
    return {"O": call(ctx, subject, x.q, x.k, x.v)}


@clause(
    "attention.causal.off-by-default",
    source="contract: not-causal; CS336 assignment 2: the flag is optional and defaults to False",
)
def test_no_mask_is_applied_unless_one_asks(world, subject):
    """Without `causal` the output MUST be that of a call with `causal=False`."""
    require_right(world, subject, AS_THE_EXERCISE, is_differentiated=False)
    seen = observe(world, subject, without_the_flag, AS_THE_EXERCISE)
    rules.close(seen, AS_THE_EXERCISE, tf32=is_tf32(world, subject))


@clause(
    "attention.causal.bottom-right",
    source="contract: causal; flash-attn 2.1 changed it; PyTorch issues 103082 and 108108",
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_is_aligned_at_the_last_query(world, subject, lengths):
    """Row i MUST see exactly the keys j <= i + seq_k - seq_q."""
    seq_q, seq_k = LENGTHS[lengths]
    problem = Problem(seq_q=seq_q, seq_k=seq_k, causal=True)
    problem = fitting(world, subject, problem, fits=UNEQUAL)
    as_defined(world, subject, problem, *OUTPUT_AND_LSE)


@clause(
    "attention.causal.gradients-bottom-right",
    source="contract: causal; the Triton tutorial's backward was always causal, issue 5660",
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_follow_the_same_mask(world, subject, lengths):
    """With a causal mask and unequal lengths the gradients MUST be those of the definition.

    The backward walks down a column of tiles where the forward walks along a row, and so has bounds
    that can be wrong independently.
    """
    seq_q, seq_k = LENGTHS[lengths]
    problem = Problem(seq_q=seq_q, seq_k=seq_k, causal=True)
    problem = fitting(world, subject, problem, fits=UNEQUAL)
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


def first_row(ctx, subject, problem):
    """O of the first row, and the value that it must equal."""
    x = inputs(problem)
    return bodies.forward(ctx, subject, problem)["O"][:, :, 0], x.v[:, :, 0]


@clause("attention.causal.first-row", source="contract: causal; one key has weight one")
def test_the_first_query_of_a_square_sees_its_own_key_alone(world, subject):
    """With a causal mask and equal lengths, row 0 MUST be v[0], whatever its score is."""
    problem = fitting(world, subject, Problem(causal=True))
    out, value = observe(world, subject, first_row, problem)

    # One weight over itself: a product and a quotient.
    within = rounding(torch.float32, terms=1)
    if is_tf32(world, subject):
        within = within.plus(2 * rules.TF32, "weights and values of eleven bits")
    judge.tensors(
        [{"O[0]": out}],
        {"O[0]": value},
        quantity="value of the only key it sees",
        within=within,
        given=repr(problem),
    )


@clause(
    "attention.blind-rows.zeros",
    source="contract: blind-rows; flash-attn README, 2.1; PyTorch issues 41508 and 103963",
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_that_sees_nothing_is_zero(world, subject, dtype):
    """A row that sees no key MUST give zeros and -inf: neither NaN nor the mean of v."""
    problem = Problem(seq_q=83, seq_k=20, causal=True, dtype=dtype)
    problem = fitting(world, subject, problem, fits=UNEQUAL)
    seen = observe(world, subject, bodies.forward, problem, lse=True)

    blind = problem.seq_q - problem.num_keys
    judge.tensors(
        [{"O": seen["O"][:, :, :blind], "L": seen["L"][:, :, :blind]}],
        {
            "O": torch.zeros(1, 2, blind, problem.head_dim, dtype=problem.torch_dtype),
            "L": torch.full((1, 2, blind), -torch.inf),
        },
        quantity="answer of a row that sees nothing",
        given=repr(problem),
    )


def blind_gradients(ctx, subject, problem, upstream):
    """dQ of the rows that see nothing, and dK and dV, with `upstream` as dO of those rows."""
    x = inputs(problem)
    blind = problem.seq_q - problem.num_keys
    x.do[:, :, :blind] = upstream
    found = bodies.differentiate(ctx, subject, problem, x.to(ctx.device))
    return {"dQ": found["dQ"][:, :, :blind], "dK": found["dK"], "dV": found["dV"]}


@clause(
    "attention.blind-rows.gradients",
    source="contract: blind-rows; exp(s - L) with L = -inf is inf, and inf times zero is NaN",
)
def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none(world, subject):
    """A row that sees no key MUST have a gradient of zero and add nothing to those of k and v."""
    problem = Problem(seq_q=83, seq_k=20, causal=True)
    problem = fitting(world, subject, problem, fits=UNEQUAL)
    seen = observe(world, subject, blind_gradients, problem, 1.0)
    again = observe(world, subject, blind_gradients, problem, -1000.0)

    judge.tensors(
        [seen],
        {**again, "dQ": torch.zeros_like(again["dQ"])},
        quantity="gradient",
        given=repr(problem),
    )


def with_garbage(ctx, subject, problem, first, garbage):
    """O, L and dQ of the rows that see no key from `first` on, with garbage in those keys."""
    x = inputs(problem)
    x.k[:, :, first:], x.v[:, :, first:] = garbage, -garbage
    x = x.to(ctx.device)
    out, lse = call(ctx, subject, x.q, x.k, x.v, causal=True, return_lse=True)
    dq, *_ = torch.autograd.grad(out, (x.q,), x.do)
    rows = first - (problem.num_keys - problem.seq_q)
    return {"O": out[:, :, :rows], "L": lse[:, :, :rows], "dQ": dq[:, :, :rows]}


@clause(
    "attention.causal.hidden-keys-do-not-matter",
    source="contract: rows-apart; "
    "PyTorch issue 101967; a mask that is added to the scores lets large ones through",
)
@pytest.mark.parametrize("garbage", [100.0, -1e4])
def test_what_is_hidden_does_not_matter(world, subject, garbage):
    """Finite values of keys that a row cannot see MUST not change a bit of it, nor of its gradient.

    The rows of the diagonal's own tiles are among them.
    """
    _judge_hidden(world, subject, garbage)


@clause(
    "attention.causal.hidden-keys-of-any-size",
    level="production",
    source="contract: rows-apart; "
    "CS336 assignment 2 adds -1e6 to the scores, which larger ones survive",
)
@pytest.mark.parametrize("garbage", [1e8, -1e8])
def test_what_is_hidden_does_not_matter_however_large(world, subject, garbage):
    """Keys of 1e8 that a row cannot see MUST NOT change a bit of it, nor of its gradient."""
    _judge_hidden(world, subject, garbage)


def _judge_hidden(world, subject, garbage):
    __tracebackhide__ = True
    problem = fitting(world, subject, Problem(seq_q=70, seq_k=80, heads=1, causal=True))
    first = problem.num_keys - 35
    clean = observe(world, subject, with_garbage, problem, first, 0.5)
    require_finite(clean)
    seen = observe(world, subject, with_garbage, problem, first, garbage)

    judge.tensors([seen], clean, quantity="value before the garbage", given=repr(problem))


def prefix(ctx, subject, problem, rows):
    """O and L of the first `rows` rows, of a whole call and of one on the prefix alone."""
    x = inputs(problem).to(ctx.device)
    found = {}
    for name, stop in (("whole", problem.seq_q), ("alone", rows)):
        cut = [t[:, :, :stop].contiguous() for t in (x.q, x.k, x.v)]
        out, lse = call(ctx, subject, *cut, causal=True, return_lse=True)
        found[name] = {"O": out[:, :, :rows], "L": lse[:, :, :rows]}
    return found


@clause(
    "attention.causal.prefix",
    source="contract: rows-apart; a decoder that looks ahead in training cannot generate",
)
@pytest.mark.parametrize("rows", [1, 32, 45])
def test_the_future_has_no_effect(world, subject, rows):
    """With a causal mask the first rows MUST be those of a call on the prefix alone."""
    problem = fitting(world, subject, Problem(causal=True))
    if "whole tiles" in problem.fit:  # so has the prefix to be
        problem, rows = problem.but(seq_q=2 * WHOLE_TILES, seq_k=None), WHOLE_TILES
    seen = observe(world, subject, prefix, problem, rows)

    rules.near(seen["whole"], seen["alone"], given=repr(problem), tf32=is_tf32(world, subject))
