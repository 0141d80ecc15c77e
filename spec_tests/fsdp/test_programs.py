"""Programs: any sequence of training calls on shards, in any order of events.

Schedules: in whichever order ranks run and operations complete, the gradients are the same.

Gathers run ahead of the computation and reductions behind it, so several are in flight at any time
and buffers go from one to the next. Whether each is waited for before its buffer is touched shows
where completion is an input (`laws.schedules`).
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded, mean_gradients
from spec_tests.laws import program_machine, programs, refusal, schedules
from spec_tests.rig import judge
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="correct")

TOY, SEED = "mlp", 7


def divided(ctx, subject, reshard):
    """A sharded toy that a program trains."""
    sharded = Sharded(ctx, subject, TOY, SEED, reshard_after_forward=reshard)
    return programs.OneRank(sharded, sharded.held)


def trained(ctx, subject, reshard, program):
    """What each call of the program let see on this rank."""
    return programs.run(program, divided(ctx, subject, reshard))


def judge_programs(world, subject, reshard):
    """Any program does what one process does, with full weights kept after forward or not."""
    __tracebackhide__ = True
    program_machine.any_sequence(
        world,
        trained,
        subject,
        reshard,
        alone=lambda rank: programs.OneProcess(TOY, SEED, size=world.size, rank=rank),
        within=lambda program: rounding(
            torch.float32, terms=24 * world.size, depth=4 * len(program) + 8
        ),
        calls=program_machine.ALL_CALLS - {"finish", "discard"},
        given=f"toy {TOY!r}, seed {SEED}, reshard_after_forward={reshard}",
    )


@clause(
    "fsdp.programs.any-sequence",
    source="contract: mean-gradient, fresh-weights, zero-grad; hypothesis, stateful testing",
    worlds=(2, 3),
)
def test_any_sequence_of_calls_does_what_one_process_does(world, subject):
    """Any sequence of training calls MUST do on the shards what it does in one process.

    Micro-batches with and without gradient synchronisation, `step`, `zero_grad` both ways,
    evaluation, save, load, a changed learning rate, an exception caught in forward. (A `zero_grad`
    within a window has a separate clause.)
    """
    judge_programs(world, subject, True)


@clause(
    "fsdp.programs.any-sequence-with-kept-weights",
    source="contract: mean-gradient, fresh-weights, zero-grad; hypothesis, stateful testing",
)
def test_any_sequence_with_weights_kept_after_forward(world, subject):
    """With `reshard_after_forward=False` any sequence of training calls MUST do the same.

    Full weights outlive their pass, so every call that changes shards can make them stale.
    """
    judge_programs(world, subject, False)


def after_interruption(ctx, subject):
    """Outputs of an evaluation after an interrupted forward and then a step of the optimizer."""
    run = divided(ctx, subject, True)
    run.micro(0)
    run.interrupt(1)
    run.step()
    return run.evaluate(2)


@clause(
    "fsdp.lifecycle.fresh-after-exception",
    source="contract: fresh-weights, after-exception; found by fsdp.programs.any-sequence",
)
def test_a_step_after_an_interrupted_forward_is_seen(world, subject):
    """After an exception in forward was caught and a step taken, a forward MUST see new weights.

    What the interrupted forward had gathered has no end of forward that would free it.
    """
    ranks = world.run(after_interruption, subject)

    expected, before = [], []
    for rank in range(world.size):
        alone = programs.OneProcess(TOY, SEED, size=world.size, rank=rank)
        alone.micro(0)
        before.append(alone.evaluate(2))
        alone.step()
        expected.append(alone.evaluate(2))
    judge.tensors(
        ranks,
        expected,
        quantity="output of the updated model",
        within=rounding(torch.float32, terms=24 * world.size, depth=8),
        hints=[Hint("the output of the weights before the step: a stale gathered copy", before)],
        given="backward, a forward that raises in its last layer, step, forward",
    )


def after_an_interrupted_backward(ctx, subject):
    """Output after a backward that raised, a forward for nothing, and then a change in place."""
    sharded = Sharded(ctx, subject, "even", reshard_after_forward=False)
    loss = sharded.interrupted("up", 0)
    with pytest.raises(AttributeError):
        loss.backward()
    sharded.loss(1)
    with torch.no_grad():
        for shard in sharded.held:
            shard.mul_(2.0)
    return {"output": sharded.wrapped(sharded.batch(9)).detach()}


@clause(
    "fsdp.lifecycle.fresh-after-interrupted-backward",
    source="contract: fresh-weights, after-exception",
    worlds=(2,),
)
def test_a_change_after_an_interrupted_backward_is_seen(world, subject):
    """After an exception in backward, and a forward, a forward MUST see weights that changed.

    A unit that counts as being in its backward for ever is never looked at again.
    """
    ranks = refusal.answer_or_refusal(world, after_an_interrupted_backward, subject)

    if ranks is not None:
        plain = TOYS["even"].build(SEED)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2.0)
            batches = [TOYS["even"].batch(SEED, rank=rank, micro=9) for rank in range(world.size)]
            expected = [{"output": plain(batch)} for batch in batches]
        judge.tensors(ranks, expected, quantity="output of the doubled weights")


SCHEDULED_TOY = "stack"
# What an early step leaves behind would show in the second.
TWO_STEPS = "backward 0, zero_grad, backward 1, gather"


@clause(
    "fsdp.schedule.same-gradients",
    source="contract: mean-gradient; " + schedules.LAUNCH_ORDER,
    worlds=(3,),
    transports=schedules.SIM,
)
@schedules.drawn
def test_no_order_of_events_changes_the_gradients(world, subject, schedule):
    """Whatever schedule the ranks of a sharded model run by, its gradients MUST be the mean."""
    scheduled = schedules.under(world, schedule)
    mean_gradients(
        scheduled, subject, SCHEDULED_TOY, TWO_STEPS, absent_is_zero=False, given=str(schedule)
    )


@clause(
    "fsdp.schedule.waits-for-every-launch",
    source="contract: waits; " + schedules.WAITED_FOR,
    worlds=(2, 3),
    transports=schedules.SIM,
)
def test_every_gather_and_every_reduction_is_waited_for(world, subject):
    """Every collective that is launched MUST be waited for by the rank that launched it.

    Also a gather that was launched ahead and then not needed: its buffer may be freed in flight.
    """
    mean_gradients(world, subject, SCHEDULED_TOY, TWO_STEPS, absent_is_zero=False)
