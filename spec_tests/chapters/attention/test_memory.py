"""Memory and work: no matrix of scores, and no tile that nobody sees.

That is what FlashAttention is for, and what no value shows. Exercises let a backward recompute all
scores at once, so what it takes is level `production`; that of the forward is in the name.

What is judged is how memory grows with the length, so tiles may be large: those of a fixed size do
not grow. The length is doubled while a slow implementation ends in time. Of interpreted kernels
the tensors around them are seen, and not their tiles.
"""

from __future__ import annotations

from functools import partial

import torch

from spec_tests.chapters.attention import bodies, law
from spec_tests.chapters.attention.bodies import ATTENTION, KERNELS, observe
from spec_tests.chapters.attention.problem import WHOLE_TILES, Problem, inputs
from spec_tests.programs.laws import footprint
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import exact

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

SMALL_CHANGE = 2**16
MEMORY = "Dao et al. 2022, theorem 1: O(N) memory beyond inputs and output"


def _measured(world, subject, problem, part):
    """Return peak bytes and kept bytes by length, and the problem of the longest."""
    # Several tiles; interpreted kernels take milliseconds for each.
    lengths = (128, 256) if subject in KERNELS else (256, 512, 1024, 2048)
    lengths = (1024, 2048) if world.transport == "cuda" else lengths
    found = observe(world, subject, by_length, problem, part, lengths)
    problem = problem.but(seq_q=max(found))
    judge.SITUATION.get().given = (
        f"{problem!r}, of the lengths {lengths} the longest for {bodies.CPU_SECONDS:g} CPU s"
    )
    return found, problem


def by_length(ctx, subject, problem, part, lengths):
    """Bytes at the peak and kept, of a forward or a whole step, after one that warmed up.

    Peaks after a short one; what is "kept" after one of the same length.
    """

    def measured(length):
        x = inputs(problem.but(seq_q=length)).to(ctx.device)

        def step(stop=None):
            now = x.but(**{name: t[:, :, :stop] for name, t in vars(x).items()})
            out = bodies.forward(ctx, subject, problem, now)
            return torch.autograd.grad(out, (x.q, x.k, x.v), now.do) if part == "step" else out

        step(None if part == "kept" else WHOLE_TILES)
        return footprint.peak_bytes(ctx.device, step)

    return bodies.while_cheap(lengths, measured)


def _is_linear(world, subject, problem, part):
    __tracebackhide__ = True
    found, problem = _measured(world, subject, problem, part)
    once, twice = [peak for peak, _ in found.values()][-2:]
    footprint.at_most(
        [twice],
        {"2.5 times that of half the length": int(2.5 * once), "small change": SMALL_CHANGE},
        quantity=f"a peak at {problem.seq_q} keys",
        likely=f"scores, or a mask of their shape, are materialised somewhere in the {part}",
    )


@clause("attention.memory.forward-is-linear", source="contract: forward-linear; " + MEMORY)
@law.problems(law.varied(Problem(heads=1), causal=law.BOTH))
def test_a_forward_over_twice_the_length_takes_twice_the_memory(world, subject, problem):
    """A forward over twice the length MUST NOT take more than 2.5 times the peak memory."""
    _is_linear(world, subject, problem, "forward")


@clause(
    "attention.memory.peak-is-linear",
    level="production",
    source="contract: backward-linear; " + MEMORY,
)
@law.problems(law.varied(Problem(heads=1), causal=law.BOTH))
def test_twice_the_length_takes_twice_the_memory(world, subject, problem):
    """Twice the length MUST NOT take more than 2.5 times the peak memory of a step.

    Scores take four times as much; what is linear twice, beside tiles of a fixed size. Below the
    small change an allocator's habits count for more than what is asked of it.
    """
    _is_linear(world, subject, problem, "step")


@clause("attention.memory.keeps-no-scores", source="contract: keeps-no-scores; " + MEMORY)
def test_the_forward_keeps_rows_and_no_matrix(world, subject):
    """A forward MUST leave no more than copies of q, k, v and O, and a few numbers per row."""
    found, problem = _measured(world, subject, Problem(heads=1), "kept")

    x = inputs(problem)
    rows = problem.batch * problem.heads * problem.seq_q
    footprint.at_most(
        [found[problem.seq_q][1]],
        {
            "output": x.q.nbytes,
            "copies of q, k, v and output": x.q.nbytes + x.k.nbytes + x.v.nbytes + x.q.nbytes,
            "16 numbers per row": 16 * 4 * rows,
            "small change": SMALL_CHANGE,
        },
        quantity="what a forward leaves",
        likely="the probabilities are kept for the backward",
    )


def ending_in(x, value):
    """The last ten keys and values are `value`."""
    x.k[:, :, -10:], x.v[:, :, -10:] = value, value
    return x


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
    problem = law.fitting(world, subject, Problem(seq_q=400, heads=1, causal=True))
    changes = [partial(ending_in, value=value) for value in (torch.nan, 0.0)]
    rows = problem.seq_q - 10 - 256
    seen, clean = (
        {name: t[:, :, :rows] for name, t in answer.items()}
        for answer in law.asked(world, subject, problem, ("O", "L"), *changes)
    )

    within = exact("equal bits asked: a hidden key must not choose the order of sums")
    judge.tensors([seen], clean, quantity="value without NaN in hidden keys", within=within)
