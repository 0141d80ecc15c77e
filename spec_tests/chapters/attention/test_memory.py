"""Memory and work: no matrix of scores, and no tile that nobody sees.

That is what FlashAttention is for, and what no value shows. Exercises let a backward recompute all
scores at once, so what it takes is level `production`; that of the forward is in the name.

What is judged is how memory grows with the length, so tiles may be large: those of a fixed size do
not grow. The length is doubled while a slow implementation ends in time. Of interpreted kernels
the tensors around them are seen, and not their tiles.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies
from spec_tests.chapters.attention.bodies import ATTENTION, KERNELS, arguments, call, observe
from spec_tests.chapters.attention.defined import fitting
from spec_tests.chapters.attention.problem import WHOLE_TILES, Problem, inputs
from spec_tests.programs.laws import footprint
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

SMALL_CHANGE = 2**16
MEMORY = "Dao et al. 2022, theorem 1: O(N) memory beyond inputs and output"


def _lengths(world, subject):
    """Queries and keys: several tiles; interpreted kernels take milliseconds for each."""
    if world.transport == "cuda":
        return (1024, 2048)
    return (128, 256) if subject in KERNELS else (256, 512, 1024, 2048)


def _measured(world, subject, body, problem, *args):
    """Return what the body saw, by length, and the problem of the longest as it was chosen."""
    lengths = _lengths(world, subject)
    found = observe(world, subject, body, problem, *args, lengths)
    problem = problem.but(seq_q=max(found))
    given = f"{problem!r}, of the lengths {lengths} the longest for {bodies.CPU_SECONDS:g} CPU s"
    judge.SITUATION.get().given = given
    return found, problem, given


def peaks(ctx, subject, problem, part, lengths):
    """By length, peak bytes of a forward, or of that and the backward, after one that warmed up."""

    def peak(length):
        x = inputs(problem.but(seq_q=length)).to(ctx.device)

        def step(stop=None):
            q, k, v, do = (t[:, :, :stop] for t in (x.q, x.k, x.v, x.do))
            out = call(ctx, subject, q, k, v, **arguments(problem))
            return out if part == "forward" else torch.autograd.grad(out, (x.q, x.k, x.v), do)

        step(WHOLE_TILES)
        return bodies.peak_bytes(ctx, step)[0]

    return bodies.while_cheap(lengths, peak)


def _is_linear(world, subject, problem, part):
    found, problem, given = _measured(world, subject, peaks, problem, part)
    once, twice = [*found.values()][-2:]
    footprint.at_most(
        [twice],
        {"2.5 times that of half the length": int(2.5 * once), "small change": SMALL_CHANGE},
        quantity=f"a peak at {problem.seq_q} keys",
        likely=f"scores, or a mask of their shape, are materialised somewhere in the {part}",
        given=given,
    )


@clause("attention.memory.forward-is-linear", source="contract: forward-linear; " + MEMORY)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_forward_over_twice_the_length_takes_twice_the_memory(world, subject, mask):
    """A forward over twice the length MUST NOT take more than 2.5 times the peak memory."""
    _is_linear(world, subject, Problem(heads=1, causal=mask == "causal"), "forward")


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
    _is_linear(world, subject, Problem(heads=1, causal=mask == "causal"), "step")


def kept_bytes(ctx, subject, problem, lengths):
    """By length, bytes that a forward leaves: output and what it keeps for the backward."""

    def kept(length):
        x = inputs(problem.but(seq_q=length)).to(ctx.device)

        def forward():
            return call(ctx, subject, x.q, x.k, x.v, **arguments(problem))

        forward()
        return bodies.peak_bytes(ctx, forward)[1]

    return bodies.while_cheap(lengths, kept)


@clause("attention.memory.keeps-no-scores", source="contract: keeps-no-scores; " + MEMORY)
def test_the_forward_keeps_rows_and_no_matrix(world, subject):
    """A forward MUST leave no more than copies of q, k, v and O, and a few numbers per row."""
    found, problem, given = _measured(world, subject, kept_bytes, Problem(heads=1))

    x = inputs(problem)
    rows = problem.batch * problem.heads * problem.seq_q
    footprint.at_most(
        [found[problem.seq_q]],
        {
            "output": x.q.nbytes,
            "copies of q, k, v and output": x.q.nbytes + x.k.nbytes + x.v.nbytes + x.q.nbytes,
            "16 numbers per row": 16 * 4 * rows,
            "small change": SMALL_CHANGE,
        },
        quantity="what a forward leaves",
        likely="the probabilities are kept for the backward",
        given=given,
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
    """Keys 256 or more beyond a row's last visible one MUST NOT be read: NaN has no effect.

    A mask after the product hides a finite number; zero times NaN is NaN. Tiles on the diagonal may
    mix, so nothing is asked of the 256 rows before.
    """
    problem = fitting(world, subject, Problem(seq_q=400, heads=1, causal=True))
    seen, clean = observe(world, subject, poisoned, problem, problem.seq_q - 10)

    judge.tensors([seen], clean, quantity="value without NaN in hidden keys", given=repr(problem))
