"""Any sequence of training calls on shards: what no single situation would show."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded
from spec_tests.laws import program_machine, programs
from spec_tests.rig import judge
from spec_tests.rig.oracle import Named
from spec_tests.rig.symptoms import Hint
from spec_tests.rig.tolerance import rounding

clause = clauses(judges=FULLY_SHARD, level="correct")

TOY, SEED = "mlp", 7


class Divided(programs.Trainee):
    """A sharded toy."""

    def __init__(self, ctx: Any, subject: str, reshard: bool) -> None:
        self.sharded = Sharded(ctx, subject, TOY, SEED, reshard_after_forward=reshard)
        self.optimizer = programs.plain_optimizer(self.sharded.held)

    def micro(self, number: int) -> None:
        self.sharded.backward(number)

    def local(self, number: int) -> None:
        self.sharded.accumulate(number)

    def evaluate(self, number: int) -> Named:
        with torch.no_grad():
            return {"output": self.sharded.model(self.sharded.batch(number))}

    def interrupt(self, number: int) -> None:
        with programs.failing(list(self.sharded.module.children())[-1]):
            self.sharded.loss(number)

    def state(self) -> Any:
        return self.sharded.model.state_dict(), self.optimizer.state_dict()

    def restore(self, state: Any) -> None:
        self.sharded.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def weights(self) -> Named:
        # From the shards: a state dict, or `full_parameters`, may free what would be stale.
        shards = zip(self.sharded.names, self.sharded.held, strict=True)
        return {name: shard.full_tensor().detach().clone() for name, shard in shards}


def trained(ctx, subject, program, reshard):
    """What each call of the program let see on this rank."""
    return programs.run(program, Divided(ctx, subject, reshard))


def judge_programs(world, subject, reshard):
    """Any program does what one process does, with full weights kept after forward or not."""
    __tracebackhide__ = True

    def compare(program):
        programs.agree(
            world.run(trained, subject, program, reshard),
            lambda rank: programs.OneProcess(TOY, SEED, size=world.size, rank=rank),
            program,
            within=rounding(torch.float32, terms=24 * world.size, depth=4 * len(program) + 8),
            given=f"toy {TOY!r}, seed {SEED}, reshard_after_forward={reshard}",
        )

    program_machine.any_program(compare, program_machine.ALL_CALLS - {"finish", "discard"})


@clause(
    "fsdp.programs.any-sequence",
    source="contract, FullyShard; hypothesis, stateful testing",
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
    source="contract, FullyShard; hypothesis, stateful testing",
)
def test_any_sequence_with_weights_kept_after_forward(world, subject):
    """With `reshard_after_forward=False` any sequence of training calls MUST do the same.

    Full weights outlive their pass, so every call that changes shards can make them stale.
    """
    judge_programs(world, subject, False)


def after_interruption(ctx, subject):
    """Outputs of an evaluation after an interrupted forward and then a step of the optimizer."""
    run = Divided(ctx, subject, True)
    run.micro(0)
    run.interrupt(1)
    run.step()
    return run.evaluate(2)


@clause("fsdp.lifecycle.fresh-after-exception", source="found by fsdp.programs.any-sequence")
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
