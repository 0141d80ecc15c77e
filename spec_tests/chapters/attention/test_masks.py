"""The mask: which key a query sees, where lengths differ, and where it sees none.

Causal is aligned bottom-right: the last query sees all keys, as with a cache of earlier keys.
PyTorch's own `is_causal` is top-left; on square inputs, which is what most tests use, the two are
the same. A row that sees nothing is 0/0 in the definition; zeros, -inf and zero gradients are what
every library came to.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spec_tests.chapters.attention import law, rules
from spec_tests.chapters.attention.bodies import ATTENTION, KERNELS, TILED
from spec_tests.chapters.attention.problem import (
    AS_THE_EXERCISE,
    OUTPUT_AND_GRADIENTS,
    WHOLE_TILES,
    Problem,
    inputs,
    same,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))
fitted = rows(clause, law.as_fitted)

LENGTHS = {
    "more-keys": Problem(seq_q=50, seq_k=83, causal=True),
    "one-more-key": Problem(seq_q=64, seq_k=65, causal=True),
    "fewer-keys": Problem(seq_q=83, seq_k=50, causal=True),
    "decode": Problem(seq_q=1, seq_k=77, causal=True),
    "few-keys": Problem(seq_q=70, seq_k=3, causal=True),
}
"""Shorter, longer, by less and by more than a tile, one query of a decoder."""
UNEQUAL = ("", "head dims", "whole tiles")
"""Of `FITS`, those that keep what clauses about unequal lengths are about."""
PARTS = {"forward": ("O", "L"), "backward": OUTPUT_AND_GRADIENTS}


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
    law.as_defined(world, subject, AS_THE_EXERCISE.but(causal=True), PARTS[part])


@clause(
    "attention.causal.equal-lengths",
    judges=TILED,
    source="contract: causal; CS336 assignment 2 lets its version without Triton ignore the flag",
)
@pytest.mark.parametrize("part", PARTS)
def test_a_causal_mask_is_not_ignored(world, subject, part):
    """With a causal mask and equal lengths O, L and gradients MUST be those of the definition."""
    law.as_defined(world, subject, AS_THE_EXERCISE.but(causal=True), PARTS[part])


@clause(
    "attention.causal.off-by-default",
    source="contract: not-causal; CS336 assignment 2: the flag is optional and defaults to False",
)
def test_no_mask_is_applied_unless_one_asks(world, subject):
    """Without `causal` the output MUST be that of a call with `causal=False`."""
    law.require_right(world, subject, AS_THE_EXERCISE, is_differentiated=False)
    law.as_defined(world, subject, AS_THE_EXERCISE.but(causal=None), ("O",))


test_bottom_right = fitted(
    "attention.causal.bottom-right",
    "Row i MUST see exactly the keys j <= i + seq_k - seq_q.",
    LENGTHS,
    names=("O", "L"),
    fits=UNEQUAL,
    source="contract: causal; flash-attn 2.1 changed it; PyTorch issues 103082 and 108108",
)

test_gradients_bottom_right = fitted(
    "attention.causal.gradients-bottom-right",
    "With a causal mask and unequal lengths the gradients MUST be those of the definition.",
    # The backward walks down a column of tiles where the forward walks along a row, and so has
    # bounds that can be wrong independently.
    LENGTHS,
    names=OUTPUT_AND_GRADIENTS,
    fits=UNEQUAL,
    source="contract: causal; the Triton tutorial's backward was always causal, issue 5660",
)


@clause("attention.causal.first-row", source="contract: causal; one key has weight one")
def test_the_first_query_of_a_square_sees_its_own_key_alone(world, subject):
    """With a causal mask and equal lengths, row 0 MUST be v[0], whatever its score is."""
    problem = law.fitting(world, subject, Problem(causal=True))
    [seen] = law.asked(world, subject, problem, ("O",), same)

    # One weight over itself: a product and a quotient.
    within = rounding(torch.float32, terms=1)
    if law.is_tf32(world, subject):
        within = within.plus(2 * rules.TF32, "weights and values of eleven bits")
    judge.tensors(
        [{"O[0]": seen["O"][:, :, 0]}],
        {"O[0]": inputs(problem).v[:, :, 0]},
        quantity="value of the only key it sees",
        within=within,
    )


BLIND = Problem(seq_q=83, seq_k=20, causal=True)


def blind_rows(problem):
    """The rows that see nothing."""
    return slice(problem.seq_q - problem.num_keys)


@clause(
    "attention.blind-rows.zeros",
    source="contract: blind-rows; flash-attn README, 2.1; PyTorch issues 41508 and 103963",
)
@law.problems({dtype: BLIND.but(dtype=dtype) for dtype in ("float32", "float16")})
def test_a_row_that_sees_nothing_is_zero(world, subject, problem):
    """A row that sees no key MUST give zeros and -inf: neither NaN nor the mean of v."""
    problem = law.fitting(world, subject, problem, fits=UNEQUAL)
    [seen] = law.asked(world, subject, problem, ("O", "L"), same)

    q = inputs(problem).q[:, :, blind_rows(problem)]
    wanted = {"O": torch.zeros_like(q), "L": torch.full(q.shape[:-1], -torch.inf)}
    judge.tensors(
        [{name: found[:, :, blind_rows(problem)] for name, found in seen.items()}],
        {name: wanted[name] for name in seen},
        quantity="answer of a row that sees nothing",
    )


def with_upstream(x, rows, value):
    """dO of these rows is `value`."""
    x.do[:, :, rows] = value
    return x


@clause(
    "attention.blind-rows.gradients",
    source="contract: blind-rows; exp(s - L) with L = -inf is inf, and inf times zero is NaN",
)
def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none(world, subject):
    """A row that sees no key MUST have a gradient of zero and add nothing to those of k and v."""
    problem = law.fitting(world, subject, BLIND, fits=UNEQUAL)
    rows = blind_rows(problem)
    changes = [partial(with_upstream, rows=rows, value=value) for value in (1.0, -1000.0)]
    seen, again = law.asked(world, subject, problem, ("dQ", "dK", "dV"), *changes)

    dq = seen["dQ"][:, :, rows]
    wanted = {**again, "dQ": torch.zeros_like(dq)}
    judge.tensors([{**seen, "dQ": dq}], wanted, quantity="gradient")


def with_garbage(x, first, garbage):
    """Keys and values from `first` on are garbage."""
    x.k[:, :, first:], x.v[:, :, first:] = garbage, -garbage
    return x


def judge_hidden(world, subject, garbage):
    """What is in the last keys must not change a bit of the rows that cannot see them."""
    __tracebackhide__ = True
    problem = law.fitting(world, subject, Problem(seq_q=70, seq_k=80, heads=1, causal=True))
    first = problem.num_keys - 35
    rows = first - (problem.num_keys - problem.seq_q)

    def answer(value):
        change = partial(with_garbage, first=first, garbage=value)
        [found] = law.asked(world, subject, problem, ("O", "L", "dQ"), change)
        return {name: tensor[:, :, :rows] for name, tensor in found.items()}

    clean = answer(0.5)
    law.require_finite(clean)
    judge.tensors([answer(garbage)], clean, quantity="value before the garbage")


hidden = rows(clause, judge_hidden)

test_hidden_keys_do_not_matter = hidden(
    "attention.causal.hidden-keys-do-not-matter",
    "Finite values of keys that a row cannot see MUST not change a bit of it, nor of its gradient.",
    # The rows of the diagonal's own tiles are among them.
    [100.0, -1e4],
    source="contract: rows-apart; "
    "PyTorch issue 101967; a mask that is added to the scores lets large ones through",
)

test_hidden_keys_of_any_size = hidden(
    "attention.causal.hidden-keys-of-any-size",
    "Keys of 1e8 that a row cannot see MUST NOT change a bit of it, nor of its gradient.",
    [1e8, -1e8],
    level="production",
    source="contract: rows-apart; "
    "CS336 assignment 2 adds -1e6 to the scores, which larger ones survive",
)


def cut(x, rows):
    """The first rows of everything."""
    return x.each(lambda t: t[:, :, :rows].contiguous())


@clause(
    "attention.causal.prefix",
    source="contract: rows-apart; a decoder that looks ahead in training cannot generate",
)
@pytest.mark.parametrize("rows", [1, 32, 45])
def test_the_future_has_no_effect(world, subject, rows):
    """With a causal mask the first rows MUST be those of a call on the prefix alone."""
    problem = law.fitting(world, subject, Problem(causal=True))
    if "whole tiles" in problem.fit:  # so has the prefix to be
        problem, rows = problem.but(seq_q=2 * WHOLE_TILES, seq_k=None), WHOLE_TILES
    whole, alone = law.asked(world, subject, problem, ("O", "L"), same, partial(cut, rows=rows))

    law.near(world, subject, {name: t[:, :, :rows] for name, t in whole.items()}, alone)
