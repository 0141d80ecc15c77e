"""Programs: any sequence of calls of a sharded optimizer, in any order of events.

Schedules: in whichever order ranks run and operations complete, the weights are the same.

Each rank sends what it owns and takes what the others own, in as many messages as there are owners
or parameters. Who overlaps them relies on what has arrived; here arrival is an input
(`laws.schedules`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from spec_tests.clause import clauses
from spec_tests.laws import program_machine, programs, schedules
from spec_tests.programs import draw
from spec_tests.rig import judge
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.toys import TOYS
from spec_tests.zero1.runs import SEED, TOY, Run, fitting, gradient, same_as_unsharded

clause = clauses(needs=("sharded_optimizer", "full_optimizer_state"), level="correct")

# Gradients arrive reduced: there are no windows, and a forward is not the optimizer's.
CALLS = frozenset({"micro", "step", "zero_grad", "rate", "interrupt", "save", "load"})


LARGE = 2.0**8
"""At the rates of programs a step by one would be lost among what rounding may do."""


class Dealt(programs.Trainee):
    """A toy whose micro-batches deal integers as gradients, the same on all ranks.

    Args:
        impl: the implementation; the plain optimizer where it is None, which is the oracle.
    """

    def __init__(self, impl: Any = None, toy: str = TOY) -> None:
        self.impl = impl
        self.module = TOYS[toy].build(SEED)
        self.parameters = dict(self.module.named_parameters())
        groups = programs.two_groups(self.parameters.values())
        options: dict[str, Any] = {"lr": 2.0**programs.RATE, "momentum": programs.MOMENTUM}
        self.optimizer = (
            torch.optim.SGD(groups, **options)
            if impl is None
            else impl.sharded_optimizer(groups, torch.optim.SGD, **options)
        )

    def micro(self, number: int) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            dealt = LARGE * gradient(parameter, 1000 * number + index)
            parameter.grad = dealt if parameter.grad is None else parameter.grad + dealt

    def interrupt(self, number: int) -> None:
        def closure() -> float:
            raise programs.PlantedError

        with contextlib.suppress(programs.PlantedError):
            self.optimizer.step(closure)

    def optimizer_state(self) -> dict[str, Any]:
        if self.impl is None:
            return self.optimizer.state_dict()
        return self.impl.full_optimizer_state(self.optimizer)


def trained(ctx, toy, program):
    """What each call of the program let see on this rank."""
    return programs.run(program, Dealt(ctx.impl, toy))


@clause(
    "zero1.programs.any-sequence",
    source="contract: same-values, unsharded; hypothesis, stateful testing",
    worlds=(2, 3),
)
def test_any_sequence_of_calls_does_what_the_plain_optimizer_does(world):
    """Any sequence of an optimizer's calls MUST do on the ranks what it does in one process.

    Steps, `zero_grad` both ways, a changed learning rate of a group, a closure that raises, the
    full state saved and loaded.
    """
    toy = fitting(world)
    program_machine.any_sequence(
        world,
        trained,
        toy,
        alone=lambda rank: Dealt(toy=toy),
        # Exact until small and large learning rates meet in one weight.
        within=lambda program: rounding(torch.float32, terms=4, depth=len(program) + 2),
        calls=CALLS,
        given=f"toy {toy!r}, two groups, momentum",
    )


@clause(
    "zero1.programs.any-situation",
    judges=("sharded_optimizer",),
    source="contract: same-values; Cohen et al. 1997, The AETG system",
    worlds=(2, 3),
)
@pytest.mark.parametrize("part", range(draw.PARTS))
def test_any_situation_does_what_the_plain_optimizer_does(world, subject, part):
    """In any scene any legal program MUST give the weights of the plain optimizer.

    Scenes in which every two words meet, in each a program of up to 24 calls, and the situations of
    `spec_tests/programs/seeds.toml`, which once told a fault.
    """
    draw.judge_part(world, subject, "correct", part)


def back_to_the_start(run):
    """Weights after a step that follows the load of what was saved before the first step."""
    run.save()
    run.micro(0)
    run.step()
    run.load()
    run.zero_grad(True)
    run.micro(1)
    return run.step()


def rewound(ctx, toy):
    """The same in a rank."""
    return back_to_the_start(Dealt(ctx.impl, toy))


@clause(
    "zero1.state.load-replaces",
    source="contract: load-replaces; "
    "found by zero1.programs.any-sequence; torch.optim.Optimizer.load_state_dict",
)
def test_a_loaded_state_replaces_the_one_before(world):
    """A load MUST replace the whole state: entries missing from the loaded state are gone."""
    toy = fitting(world)
    ranks = world.run(rewound, toy)

    judge.tensors(
        ranks,
        back_to_the_start(Dealt(toy=toy)),
        quantity="weight after going back to the start",
        within=rounding(torch.float32, terms=4, depth=4),
        given="an empty state is saved, a step taken, the empty state loaded, a step taken",
    )


@clause(
    "zero1.schedule.same-weights",
    source="contract: same-values; " + schedules.LAUNCH_ORDER,
    worlds=(3,),
    needs=("sharded_optimizer",),
    transports=schedules.SIM,
)
@schedules.drawn
def test_no_order_of_events_changes_the_weights(world, schedule):
    """All ranks MUST hold the unsharded weights, whatever rank runs when and what completes first.

    A buffer that is filled again in flight, or read before its message is in, is right as long as
    the wire is faster than the loop over parameters.
    """
    scheduled, toy = schedules.under(world, schedule), fitting(world)
    same_as_unsharded(scheduled, Run.steps, 1, 2, optimizer="momentum", toy=toy)


@clause(
    "zero1.schedule.waits-for-every-launch",
    source="contract: waits; " + schedules.WAITED_FOR,
    worlds=(2, 3),
    needs=("sharded_optimizer",),
    transports=schedules.SIM,
)
def test_every_exchange_is_waited_for(world):
    """Every exchange that is launched MUST be waited for by the rank that launched it."""
    same_as_unsharded(world, Run.steps, 1, 2, optimizer="momentum")
