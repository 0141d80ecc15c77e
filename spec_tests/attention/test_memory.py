"""Memory and work: no matrix of scores, and no tile that nobody sees.

That is what FlashAttention is for, and what no value shows. Exercises let a backward recompute all
scores at once, so what it takes is level `production`; that of the forward is in the name.

What is judged is how memory grows with the length, so tiles may be large: those of a fixed size do
not grow. Of interpreted kernels the tensors around them are seen, and not their tiles.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.attention import bodies
from spec_tests.attention.bodies import ATTENTION, KERNELS, arguments, call, observe
from spec_tests.attention.defined import fitting
from spec_tests.attention.problem import WHOLE_TILES, Problem, inputs
from spec_tests.clause import clauses
from spec_tests.laws import footprint
from spec_tests.rig import judge

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

SMALL_CHANGE = 2**16
MEMORY = "Dao et al. 2022, theorem 1: O(N) memory beyond inputs and output"


def _length(world, subject):
    """Queries and keys: several tiles; interpreted kernels take milliseconds for each."""
    return 128 if subject in KERNELS and world.transport != "cuda" else 1024


def peaks(ctx, subject, problem, part):
    """Peak bytes of a forward, or of that and the backward, after a small one that warmed up."""
    x = inputs(problem).to(ctx.device)

    def step(stop=None):
        q, k, v, do = (t[:, :, :stop] for t in (x.q, x.k, x.v, x.do))
        out = call(ctx, subject, q, k, v, **arguments(problem))
        return out if part == "forward" else torch.autograd.grad(out, (x.q, x.k, x.v), do)

    step(WHOLE_TILES)
    return bodies.peak_bytes(ctx, step)[0]


def _is_linear(world, subject, problem, part):
    once = observe(world, subject, peaks, problem, part)
    twice = observe(world, subject, peaks, problem.but(seq_q=2 * problem.seq_q), part)
    footprint.at_most(
        [twice],
        {"2.5 times that of half the length": int(2.5 * once), "small change": SMALL_CHANGE},
        quantity=f"a peak at {2 * problem.seq_q} keys",
        likely=f"scores, or a mask of their shape, are materialised somewhere in the {part}",
        given=repr(problem),
    )


@clause("attention.memory.forward-is-linear", source="contract: forward-linear; " + MEMORY)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_forward_over_twice_the_length_takes_twice_the_memory(world, subject, mask):
    """A forward over twice the length MUST NOT take more than 2.5 times the peak memory."""
    problem = Problem(seq_q=_length(world, subject), heads=1, causal=mask == "causal")
    _is_linear(world, subject, problem, "forward")


@clause(
    "attention.memory.peak-is-linear",
    level="production",
    source="contract: backward-linear; " + MEMORY,
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_twice_the_length_takes_twice_the_memory(world, subject, mask):
    """Twice the length MUST NOT take more than 2.5 times the peak memory of a step.

    Scores take four times as much; what is linear twice, beside tiles of a fixed size. Below the
    small change an allocator's habits count for more than what is asked of it.
    """
    problem = Problem(seq_q=_length(world, subject), heads=1, causal=mask == "causal")
    _is_linear(world, subject, problem, "step")


def kept_bytes(ctx, subject, problem):
    """Bytes that a forward leaves, output and what it keeps for the backward."""
    x = inputs(problem).to(ctx.device)
    call(ctx, subject, x.q, x.k, x.v, **arguments(problem))
    return bodies.peak_bytes(ctx, lambda: call(ctx, subject, x.q, x.k, x.v, **arguments(problem)))[
        1
    ]


@clause("attention.memory.keeps-no-scores", source="contract: keeps-no-scores; " + MEMORY)
def test_the_forward_keeps_rows_and_no_matrix(world, subject):
    """A forward MUST leave no more than copies of q, k, v and O, and a few numbers per row."""
    problem = Problem(seq_q=2 * _length(world, subject), heads=1)
    kept = observe(world, subject, kept_bytes, problem)

    x = inputs(problem)
    rows = problem.batch * problem.heads * problem.seq_q
    footprint.at_most(
        [kept],
        {
            "output": x.q.nbytes,
            "copies of q, k, v and output": x.q.nbytes + x.k.nbytes + x.v.nbytes + x.q.nbytes,
            "16 numbers per row": 16 * 4 * rows,
            "small change": SMALL_CHANGE,
        },
        quantity="what a forward leaves",
        likely="the probabilities are kept for the backward",
        given=repr(problem),
    )


def poisoned(ctx, subject, problem, first):
    """O and L of the rows that end 256 keys before `first`, from where keys are NaN, and zero."""
    rows = first - (problem.num_keys - problem.seq_q) - 256
    found = []
    for garbage in (float("nan"), 0.0):
        x = inputs(problem)
        x.k[:, :, first:], x.v[:, :, first:] = garbage, garbage
        x = x.to(ctx.device)
        with torch.no_grad():
            out, lse = call(ctx, subject, x.q, x.k, x.v, causal=True, return_lse=True)
        found.append({"O": out[:, :, :rows], "L": lse[:, :, :rows]})
    return found


@clause(
    "attention.causal.skips-hidden-tiles",
    level="production",
    source="contract: rows-apart; "
    "Dao 2023, section 3.1.1: blocks above the diagonal are skipped, half of the work",
)
def test_tiles_that_nobody_sees_are_not_computed(world, subject):
    """Keys 256 or more beyond what a row sees MUST NOT be read for it: NaN there has no effect.

    A mask after the product hides a finite number; zero times NaN is NaN. Tiles on the diagonal may
    mix, so nothing is asked of the 256 rows before.
    """
    problem = fitting(world, subject, Problem(seq_q=400, heads=1, causal=True))
    seen, clean = observe(world, subject, poisoned, problem, problem.seq_q - 10)

    judge.tensors([seen], clean, quantity="value without NaN in hidden keys", given=repr(problem))
