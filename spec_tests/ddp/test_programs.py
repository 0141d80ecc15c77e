"""Any sequence of training calls on replicas: what no single situation would show."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.clause import clause
from spec_tests.ddp.replica import Replica
from spec_tests.laws import program_machine, programs
from spec_tests.rig.oracle import Named
from spec_tests.rig.tolerance import rounding

TOY, SEED = "mlp", 7


class Replicated(programs.Trainee):
    """A wrapped toy."""

    def __init__(self, ctx: Any, subject: str) -> None:
        self.replica = Replica(ctx, subject, TOY, SEED)
        self.optimizer = programs.plain_optimizer(self.replica.parameters.values())

    def micro(self, number: int) -> None:
        self.replica.backward(number)

    def local(self, number: int) -> None:
        self.replica.accumulate(number)

    def finish(self) -> None:
        self.replica.finish()

    def evaluate(self, number: int) -> Named:
        replica = self.replica
        with torch.no_grad():
            batch = replica.toy.batch(SEED, rank=replica.ctx.rank, micro=number)
            return {"output": replica.wrapped(batch)}

    def interrupt(self, number: int) -> None:
        with programs.failing(self.replica.module.get_submodule("second")):
            self.replica.loss(number)

    def state(self) -> Any:
        return self.replica.module.state_dict(), self.optimizer.state_dict()

    def restore(self, state: Any) -> None:
        self.replica.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def weights(self) -> Named:
        return self.replica.weights()


def trained(ctx, subject, program):
    """What each call of the program let see on this rank."""
    return programs.run(program, Replicated(ctx, subject))


@clause(
    "ddp.programs.any-sequence",
    level="correct",
    judges=("ddp", "ddp_bucketed"),
    needs=("no_sync",),
    source="contract, Ddp and NoSync; hypothesis, stateful testing",
    worlds=(2, 3),
)
def test_any_sequence_of_calls_does_what_one_process_does(world, subject):
    """Any sequence of training calls MUST do on the ranks what it does in one process.

    Micro-batches in and out of `no_sync`, `finish` twice, `step`, `zero_grad` both ways also in a
    window, evaluation, save, load, a changed learning rate, an exception caught in forward.
    """

    def compare(program):
        ranks = world.run(trained, subject, program)
        programs.agree(
            ranks,
            lambda rank: programs.OneProcess(TOY, SEED, size=world.size, rank=rank),
            program,
            within=rounding(torch.float32, terms=24 * world.size, depth=4 * len(program) + 8),
            given=f"toy {TOY!r}, seed {SEED}",
        )

    program_machine.any_program(compare)
