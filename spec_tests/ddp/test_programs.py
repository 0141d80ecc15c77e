"""Any sequence of training calls on replicas: what no single situation would show."""

from __future__ import annotations

import torch

from spec_tests.clause import clause
from spec_tests.ddp.replica import Replica
from spec_tests.laws import program_machine, programs
from spec_tests.rig.tolerance import rounding

TOY, SEED = "mlp", 7


def trained(ctx, subject, program):
    """What each call of the program let see on this rank."""
    replica = Replica(ctx, subject, TOY, SEED)
    return programs.run(program, programs.OneRank(replica, replica.parameters.values()))


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
    program_machine.any_sequence(
        world,
        trained,
        subject,
        alone=lambda rank: programs.OneProcess(TOY, SEED, size=world.size, rank=rank),
        within=lambda program: rounding(
            torch.float32, terms=24 * world.size, depth=4 * len(program) + 8
        ),
        given=f"toy {TOY!r}, seed {SEED}",
    )
