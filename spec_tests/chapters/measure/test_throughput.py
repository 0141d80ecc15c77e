"""Throughput: the rate of a steady step, with how steady it was.

A course divides the tokens of twenty steps by the time of the block, after five steps of warm-up,
however long those take. One slow step, and a run that had not settled, are in the result and cannot
be seen there. Here the clock is the suite's, so what is right is known without measuring anything.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.measure.machine import DURATIONS, LIMIT, SAME, Machine
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=("measure_throughput",), level="correct", worlds=(1,))
TOKENS = 4096


def measured(ctx, name):
    """What is reported of steps with those durations, and how many were taken."""
    machine = Machine(DURATIONS[name])
    found = ctx.impl.measure_throughput(machine.step, tokens_per_step=TOKENS, clock=machine.clock)
    return {**found, "calls": machine.calls}


def _is(found, key, expected, *, likely, given):
    judge.holds(
        abs(found[key] - expected) <= SAME.bound(torch.tensor(expected)),
        f"rank 0: expected {key} {expected:g}, got {found[key]:g}, "
        f"{found[key] / expected:.3f} times that",
        likely=likely,
        given=given,
    )


@clause("measure.throughput.rate", level="course", source="contract: rate")
def test_the_rate_is_tokens_over_the_time_of_a_step(world, subject):
    """Of equal steps, tokens/s and steps/s MUST be those of one step by the clock that is given."""
    [found] = world.run(measured, "constant")

    for key, expected in (("tokens_per_s", 4.0 * TOKENS), ("steps_per_s", 4.0), ("step_s", 0.25)):
        _is(
            found,
            key,
            expected,
            likely="another clock than the one that was given",
            given="steps of 0.25 s",
        )


@clause("measure.throughput.without-warm-up", level="course", source="contract: warm-up")
def test_slow_first_steps_are_no_part_of_the_rate(world, subject):
    """Slow first steps MUST NOT change the rate."""
    [found] = world.run(measured, "slow-start")

    _is(
        found,
        "tokens_per_s",
        4.0 * TOKENS,
        likely="warm-up steps are counted",
        given="three steps of 10 s, then 0.25 s each",
    )


@clause(
    "measure.throughput.median",
    source="contract: median; torch.utils.benchmark reports medians for the same reason",
)
def test_an_outlier_does_not_move_the_rate(world, subject):
    """The rate MUST be that of the median step: neither of the mean nor of the fastest."""
    [found] = world.run(measured, "uneven")

    _is(
        found,
        "step_s",
        1.0,
        likely="a mean or a minimum; the mean of the steps is 1.36 s, the fastest takes 0.5 s",
        given="steps of 1, 1, 0.5, 1, 1, 4, 1 s, and again",
    )
    _is(found, "tokens_per_s", float(TOKENS), likely="not of the median step", given="as above")


@clause("measure.throughput.spread", source="contract: spread, five-steps")
def test_the_spread_is_reported_with_the_number_of_steps(world, subject):
    """Minimum, quartiles and numbers of steps MUST be those of steps that were taken."""
    [found] = world.run(measured, "uneven")

    timed, warmup = found["num_steps"], found["num_warmup_steps"]
    judge.holds(
        timed >= 5 and warmup >= 0 and timed + warmup == found["calls"],
        f"rank 0: expected at least 5 steps, and as many in all as were taken, {found['calls']}; "
        f"got {timed} and {warmup} of warm-up",
    )
    judge.holds(
        found["min_s"] in (0.5, 1.0),
        f"rank 0: expected min_s 0.5, or 1 where no such step was timed, got {found['min_s']}",
        given=f"{timed} of 1, 1, 0.5, 1, 1, 4, 1 s",
    )
    # Five in seven take a second; of few steps, some definitions of a quartile reach beyond them.
    judge.holds(
        0 <= found["iqr_s"] <= 2.0,
        f"rank 0: expected quartiles at most 2 s apart, got {found['iqr_s']}",
        likely="the range from the fastest to the slowest, or a variance",
        given=f"{timed} of 1, 1, 0.5, 1, 1, 4, 1 s",
    )


@clause(
    "measure.throughput.warms-up-until-steady",
    level="production",
    source="contract: warm-up; "
    "an allocator's growth and autotuning take more steps than any fixed number",
)
def test_the_warm_up_lasts_until_steps_are_steady(world, subject):
    """Where steps keep getting faster for long, the rate MUST be within 10 % of the last ones'."""
    [found] = world.run(measured, "long-warm-up")

    judge.holds(
        found["step_s"] <= 1.1,
        f"rank 0: expected a step of 1.0 to 1.1 s, got {found['step_s']:.3f} after "
        f"{found['num_warmup_steps']} of warm-up",
        likely="a fixed number of warm-up steps",
        given="steps of 1 + 20 * 0.8^i s",
    )


@clause("measure.throughput.says-when-unsteady", source="contract: unsteady, bounded")
@pytest.mark.parametrize("steps", ["never-steady", "constant"])
def test_a_run_that_never_settles_ends_and_is_called_unsteady(world, subject, steps):
    """Steps that get slower and slower MUST be called unsteady, equal ones steady; both end."""
    [found] = world.run(measured, steps)

    judge.equal(
        [bool(found["is_steady"])],
        steps == "constant",
        quantity="is_steady",
        given=f"{steps} steps; {found['calls']} were taken, at most {LIMIT} are allowed",
    )


def failing(ctx, kind, at):
    """The kind and text of what the caller gets when a step raises."""
    machine = Machine(DURATIONS["constant"])

    def step():
        machine.step()
        if machine.calls == at:
            raise {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}[kind](
                "from the step"
            )

    with refusal.caught() as error:
        ctx.impl.measure_throughput(step, tokens_per_step=TOKENS, clock=machine.clock)
    return error["kinds"][:1], error["text"]


@clause("measure.throughput.errors-are-the-callers", source="contract: errors")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("kind", ["ValueError", "OutOfMemoryError"])
def test_what_a_step_raises_reaches_the_caller(world, subject, kind, at):
    """An error in a step MUST reach the caller as it is."""
    ranks = world.run(failing, kind, at)

    judge.equal(
        ranks, ([kind], "from the step"), quantity="error", given=f"step {at} raises a {kind}"
    )


def with_tokens(ctx, tokens):
    """The kinds of the error, or nothing."""
    machine = Machine(DURATIONS["constant"])
    with refusal.caught() as error:
        ctx.impl.measure_throughput(machine.step, tokens_per_step=tokens, clock=machine.clock)
    return error["kinds"]


@clause("measure.throughput.refuses-no-tokens", source="contract: positive")
@pytest.mark.parametrize("tokens", [0, -8])
def test_tokens_that_are_not_positive_are_refused(world, subject, tokens):
    """Tokens per step that are not positive MUST be a ValueError."""
    ranks = world.run(with_tokens, tokens)

    for rank, kinds in enumerate(ranks):
        judge.holds("ValueError" in kinds, f"rank {rank}: expected a ValueError, got {kinds}")


def of_device_work(ctx):
    """Reported seconds of steps that only launch work, and what that work takes by itself."""
    import time

    cycles = 40_000_000

    def step():
        torch.cuda._sleep(cycles)

    step()
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
    ranks = world.run(of_device_work)

    for rank, (alone, step_s) in enumerate(ranks):
        judge.holds(
            step_s >= 0.5 * alone,
            f"rank {rank}: expected a step of about {alone:.4f} s, got {step_s:.4f}",
            likely="the clock is read before the device has finished: a launch is timed",
        )
