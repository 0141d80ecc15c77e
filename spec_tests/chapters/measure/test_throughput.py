"""Throughput: the rate of a steady step, with how steady it was.

A course divides the tokens of twenty steps by the time of the block, after five steps of warm-up,
however long those take. One slow step, and a run that had not settled, are in the result and cannot
be seen there. Here the clock is the suite's, so what is right is known without measuring anything.
"""

from __future__ import annotations

import builtins
import math
import time

import pytest
import torch

from spec_tests.chapters.measure.machine import DURATIONS, LIMIT, Machine, numbers
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=("measure_throughput",), level="correct", worlds=(1,))
TOKENS = 4096


def measured(ctx, name="constant", tokens=TOKENS, error=None, at=0):
    """What is reported of steps with those durations, and how many were taken."""
    machine = Machine(DURATIONS[name], error, at)
    found = ctx.impl.measure_throughput(machine.step, tokens_per_step=tokens, clock=machine.clock)
    return {**found, "calls": machine.calls}


@clause("measure.throughput.rate", level="course", source="contract: rate")
def test_the_rate_is_tokens_over_the_time_of_a_step(world, subject):
    """Of equal steps, tokens/s and steps/s MUST be those of one step by the clock that is given."""
    [found] = world.run(measured, "constant")

    likely = "another clock than the one that was given"
    expected = {"tokens_per_s": 4.0 * TOKENS, "steps_per_s": 4.0, "step_s": 0.25}
    numbers(found, expected, likely=likely, given="steps of 0.25 s")


@clause("measure.throughput.without-warm-up", level="course", source="contract: warm-up")
def test_slow_first_steps_are_no_part_of_the_rate(world, subject):
    """Slow first steps MUST NOT change the rate."""
    [found] = world.run(measured, "slow-start")

    given = "three steps of 10 s, then 0.25 s each"
    numbers(found, {"tokens_per_s": 4.0 * TOKENS}, likely="warm-up steps are counted", given=given)


@clause(
    "measure.throughput.median",
    source="contract: median; torch.utils.benchmark reports medians for the same reason",
)
def test_an_outlier_does_not_move_the_rate(world, subject):
    """The rate MUST be that of the median step: neither of the mean nor of the fastest."""
    [found] = world.run(measured, "uneven")

    likely = "a mean or a minimum; the mean of the steps is 1.36 s, the fastest takes 0.5 s"
    expected = {"step_s": 1.0, "tokens_per_s": float(TOKENS)}
    numbers(found, expected, likely=likely, given="steps of 1, 1, 0.5, 1, 1, 4, 1 s, and again")


@clause("measure.throughput.spread", source="contract: spread, five-steps")
def test_the_spread_is_reported_with_the_number_of_steps(world, subject):
    """Minimum, quartiles and numbers of steps MUST be those of steps that were taken."""
    [found] = world.run(measured, "uneven")

    taken, given = found["calls"], f"{found['num_steps']} of 1, 1, 0.5, 1, 1, 4, 1 s"
    numbers(found, {"num_steps": (5, taken), "num_warmup_steps": taken - found["num_steps"]})
    # The fastest, or the usual one where no such step was timed.
    numbers(found, {"min_s": 0.5 if found["min_s"] < 0.75 else 1.0}, given=given)
    # Five in seven take a second; of few steps, some definitions of a quartile reach beyond them.
    likely = "the range from the fastest to the slowest, or a variance"
    numbers(found, {"iqr_s": (0.0, 2.0)}, likely=likely, given=given)


@clause(
    "measure.throughput.warms-up-until-steady",
    level="production",
    source="contract: warm-up; "
    "an allocator's growth and autotuning take more steps than any fixed number",
)
def test_the_warm_up_lasts_until_steps_are_steady(world, subject):
    """Where steps keep getting faster for long, the rate MUST be within 10 % of the last ones'."""
    [found] = world.run(measured, "long-warm-up")

    given = f"steps of 1 + 20 * 0.8^i s, {found['num_warmup_steps']} of warm-up"
    likely = "a fixed number of warm-up steps"
    numbers(found, {"step_s": (0.0, 1.1)}, likely=likely, given=given)


@clause("measure.throughput.says-when-unsteady", source="contract: unsteady, bounded")
@pytest.mark.parametrize("steps", ["never-steady", "constant"])
def test_a_run_that_never_settles_ends_and_is_called_unsteady(world, subject, steps):
    """Steps that get slower and slower MUST be called unsteady, equal ones steady; both end."""
    [found] = world.run(measured, steps)

    given = f"{steps} steps; {found['calls']} were taken, at most {LIMIT} are allowed"
    is_steady = bool(found["is_steady"])
    judge.equal([is_steady], steps == "constant", quantity="is_steady", given=given)


@clause("measure.throughput.errors-are-the-callers", source="contract: errors")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("kind", ["ValueError", "OutOfMemoryError", "StopIteration"])
def test_what_a_step_raises_reaches_the_caller(world, subject, kind, at):
    """An error in a step MUST reach the caller as it is."""
    error = getattr(builtins, kind, torch.OutOfMemoryError)("from the step")
    ranks = world.run(refusal.raised, measured, error=error, at=at)

    found = [rank["error"] for rank in ranks]
    given = f"step {at} raises a {kind}"
    judge.equal(found, f"{kind}: from the step", quantity="error", given=given)


@clause("measure.throughput.refuses-no-tokens", source="contract: positive")
@pytest.mark.parametrize("tokens", [0, -8])
def test_tokens_that_are_not_positive_are_refused(world, subject, tokens):
    """Tokens per step that are not positive MUST be a ValueError."""
    refusal.of_kinds(world.run(refusal.raised, measured, tokens=tokens), "ValueError")


def of_device_work(ctx):
    """Reported seconds of steps that only launch work, and what that work takes by itself."""

    def step():
        torch.cuda._sleep(40_000_000)

    for _ in range(2):  # the first warms up
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
    alone = time.perf_counter() - begun
    found = ctx.impl.measure_throughput(step, tokens_per_step=1, clock=time.perf_counter)
    return alone, found["step_s"]


@clause(
    "measure.throughput.waits-for-the-device",
    level="course",
    source="contract: device; CUDA semantics: asynchronous execution",
    transports=("cuda",),
    no_impostor="seen on a GPU alone: a CPU step has done its work when it returns",
)
def test_work_of_the_device_is_inside_the_time(world, subject):
    """A step's work on a device MUST be finished inside of its time."""
    [(alone, step_s)] = world.run(of_device_work)

    likely = "the clock is read before the device has finished: a launch is timed"
    numbers({"step_s": step_s}, {"step_s": (0.5 * alone, math.inf)}, likely=likely)
