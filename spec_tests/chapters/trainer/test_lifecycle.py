"""Lifecycle: evaluations, exceptions, a second trainer, sub-groups.

Between two steps a run evaluates, logs, fails and goes on. State that belongs to one trainer and is
kept by class, module or process shows here.
"""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from spec_tests.programs.laws import refusal
from spec_tests.programs.laws.task import (
    BUILDERS,
    Session,
    Setup,
    alone,
    declared,
    in_ranks,
    loss,
    matches,
    method,
    same_as_one_process,
    session,
    tolerance,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=BUILDERS, level="correct", worlds=(2,))
EVALUATES = "FSDP2 of PyTorch 2.13 computes with stale weights after an evaluation"


def evaluates(run, numbers):
    """Weights of a run that evaluates before and after every step."""
    evaluate = method(run.trainer, "evaluate")
    for number in numbers:
        evaluate(run.batch(run.ranks[0], 50 + number))
        run.step(number)
        evaluate(run.batch(run.ranks[0], 60 + number))


@clause(
    "trainer.evaluation.leaves-no-trace", source="contract: Trainer.evaluate/inert; " + EVALUATES
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluations_change_nothing(world, subject, accumulation):
    """An evaluation between steps MUST NOT change any later weight."""
    setup = Setup(accumulation=accumulation, optimizer="momentum")
    same_as_one_process(world, subject, evaluates, setup, (1, 2, 3))


def losses_of(ctx, subject, setup):
    """What evaluations of one batch return between steps."""
    run = session(ctx, subject, setup)
    evaluate = method(run.trainer, "evaluate")
    found = {}
    for number in range(3):
        found[f"loss after {number} steps"] = float(evaluate(run.batch(ctx.rank, 50)))
        run.trainer.step(run.micro_batches(number))
    losses = {name: torch.tensor(value) for name, value in found.items()}
    return {"losses": losses, "declares": declared(run.trainer)}


@clause(
    "trainer.evaluation.current-weights", source="contract: Trainer.evaluate/current; " + EVALUATES
)
def test_an_evaluation_uses_current_weights(world, subject):
    """`evaluate` MUST return this rank's loss of the batch with the current weights."""
    setup = Setup(optimizer="adamw")
    ranks = world.run(losses_of, subject, setup)

    expected = []
    for rank in range(world.size):
        found: dict[str, torch.Tensor] = {}

        def script(run, rank=rank, found=found):
            for number in range(3):
                found[f"loss after {number} steps"] = run.trainer.evaluate(run.batch(rank, 50))
                run.trainer.step(run.micro_batches(number))

        alone(script, setup, ranks=range(world.size), declares=ranks[0]["declares"])
        expected.append(found)
    judge.tensors(
        [rank["losses"] for rank in ranks],
        expected,
        quantity="loss of the evaluation",
        within=tolerance(setup, expected[0]),
    )


SEEN: list[tuple[bool, bool]] = []
"""Training mode, and whether gradients are computed, in each forward of a `Watch` on this rank."""


class Watch(nn.Module):
    """The identity; a copy that computes in the model's place is seen as well."""

    def forward(self, x):
        SEEN.append((self.training, torch.is_grad_enabled()))
        return x


def modes(ctx, subject):
    """Modes of a layer in the forwards of steps and evaluations."""
    module = nn.Sequential(nn.Linear(6, 5), Watch(), nn.Linear(5, 3))
    run = session(ctx, subject, Setup(accumulation=2), module=module)
    evaluate = method(run.trainer, "evaluate")
    found = {}
    for number in (1, 2):
        for what in ("step", "evaluation"):
            SEEN.clear()
            if what == "step":
                run.trainer.step(run.micro_batches(number))
            else:
                evaluate(run.batch(ctx.rank, 50))
            found[f"{what} {number}"] = sorted({*SEEN})
    return found


@clause(
    "trainer.evaluation.mode",
    source="contract: Trainer.evaluate/mode; torch.nn.Module.eval; torch.no_grad",
)
def test_evaluations_run_in_evaluation_mode(world, subject):
    """An evaluation MUST run in evaluation mode without gradients, and a step in training mode."""
    ranks = world.run(modes, subject)
    training, evaluation = [(True, True)], [(False, False)]
    for rank, found in enumerate(ranks):
        for what, seen in found.items():
            wanted = training if what.startswith("step") else evaluation
            judge.holds(
                seen == wanted,
                f"rank {rank}, {what}: expected (training mode, gradients enabled) to be "
                f"{wanted}, got {seen}",
                likely="the mode of the last evaluation, or of the last step, was left as it was",
            )


def modes_kept(ctx, subject):
    """Modes of all layers, of which one is in evaluation mode, before and after an evaluation."""
    module = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    run = session(ctx, subject, Setup(), module=module)
    evaluate = method(run.trainer, "evaluate")
    module[1].eval()
    before = {name: part.training for name, part in module.named_modules()}
    evaluate(run.batch(ctx.rank, 50))
    return before, {name: part.training for name, part in module.named_modules()}


@clause(
    "trainer.evaluation.restores-modes",
    source="contract: Trainer.evaluate/restores; torch.nn.Module.train sets every submodule",
)
def test_modes_are_afterwards_what_they_were(world, subject):
    """After an evaluation every module MUST be in the mode in which it was before.

    A layer that the caller keeps in evaluation mode, frozen batch normalisation for one, stays so.
    """
    for rank, (before, after) in enumerate(world.run(modes_kept, subject)):
        judge.equal([after], before, quantity=f"modes of the modules on rank {rank}")


def two_at_once(ctx, subject, setups):
    """Weights of two trainers whose steps alternate."""
    runs = [session(ctx, subject, setup) for setup in setups]
    for number in (1, 2, 3):
        for run in runs:
            run.step(number)
    return [{"seen": run.seen, "declares": declared(run.trainer)} for run in runs]


def one_after_the_other(ctx, subject, setups):
    """The same, where the second is built when the first one is done."""
    found = []
    for setup in setups:
        run = session(ctx, subject, setup)
        run.steps(1, 2, 3)
        found.append({"seen": run.seen, "declares": declared(run.trainer)})
    return found


@clause(
    "trainer.lifecycle.two-trainers",
    source="contract: trainers-apart; torchtitan: a cache by the module's class",
)
@pytest.mark.parametrize("body", [two_at_once, one_after_the_other], ids=["alternate", "in-turn"])
@pytest.mark.parametrize("second", ["same-class", "other-class"])
def test_two_trainers_do_not_disturb_each_other(world, subject, body, second):
    """Two trainers in one process MUST each train as if it were alone, with its own settings."""
    setups = [
        Setup(optimizer="momentum", accumulation=2),
        Setup(toy="mlp" if second == "same-class" else "tied", seed=8, max_norm=0.25),
    ]
    ranks = world.run(body, subject, setups)

    for index, setup in enumerate(setups):
        found = [rank[index] for rank in ranks]
        seen = [each["seen"] for each in found]
        options = {"ranks": range(world.size), "declares": found[0]["declares"]}
        matches(seen, Session.steps, setup, 1, 2, 3, **options)


class Interrupted(Exception):
    """What a body raises on purpose."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Interrupted("in the backward")


def interrupted(ctx, subject, where):
    """Weights after a step that is interrupted on all ranks, and the two steps after it."""
    state = {"raises": False, "calls": 0}

    def raising(model, batch):
        state["calls"] += 1
        # In a step the second micro-batch: the first one's gradients are there already.
        if not state["raises"] or (state["calls"] == 1 and where != "evaluation"):
            return loss(model, batch)
        if where == "backward":
            return _RaisesInBackward.apply(loss(model, batch))
        model(batch["x"], **batch["flags"])
        raise Interrupted("in the forward")

    run = session(ctx, subject, Setup(accumulation=2), loss=raising)
    trainer = run.trainer
    run.step(1)
    evaluate = method(trainer, "evaluate") if where == "evaluation" else None
    state.update(raises=True, calls=0)
    came = ""
    try:
        if evaluate is not None:
            evaluate(run.batch(ctx.rank, 50))
        else:
            trainer.step(run.micro_batches(9))
    except Exception as error:  # the interruption, possibly wrapped
        came = "".join(traceback.format_exception(error))
    state["raises"] = False
    run.steps(2, 3)
    return {"seen": run.seen, "declares": declared(trainer), "raised": came}


@clause(
    "trainer.lifecycle.after-an-exception",
    source="contract: after-exception; out of memory, caught, and the next batch",
)
@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
def test_after_an_exception_the_next_step_is_right(world, subject, where):
    """After an exception that the caller caught the next steps MUST be right, or an error.

    Gradients of the interrupted step must not be part of the next one.
    """
    ordinary = (in_ranks, subject, Session.steps, Setup(), 1, 2)
    ranks = refusal.answer_or_refusal(world, interrupted, subject, where, ordinary=ordinary)

    if ranks is None:
        return
    for rank, found in enumerate(ranks):
        judge.holds(
            "Interrupted" in found["raised"],
            f"rank {rank}: expected the caller's exception, raised in the {where}, got "
            f"{found['raised'].rstrip().rpartition(chr(10))[2] or 'none'}",
            likely="an exception of the caller's code is swallowed",
        )
    setup, options = Setup(accumulation=2), {"declares": ranks[0]["declares"]}
    seen = [rank["seen"] for rank in ranks]
    matches(seen, Session.steps, setup, 1, 2, 3, ranks=range(world.size), **options)


def with_too_few(run, number):
    """Weights of a run of which one step gets another number of micro-batches."""
    run.step(1)
    batches = run.micro_batches(2)
    each = len(batches) // len(run.ranks)
    chosen = [b for r in range(len(run.ranks)) for b in (2 * batches[r * each :][:each])[:number]]
    run.trainer.step(chosen)
    run.note("after step 2")
    run.step(3)


@clause(
    "trainer.lifecycle.other-number-of-micro-batches",
    source="contract: other-number; the last step of an epoch",
)
@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_micro_batches_is_right_or_refused(world, subject, number):
    """A step with another number of micro-batches MUST be their mean's, or be an error."""
    setup = Setup(accumulation=2)
    ordinary = (in_ranks, subject, Session.steps, setup, 1, 2)
    ranks = refusal.answer_or_refusal(
        world, in_ranks, subject, with_too_few, setup, number, ordinary=ordinary
    )
    if ranks is None:
        return
    expected = alone(
        with_too_few, setup, number, ranks=range(world.size), declares=ranks[0]["declares"]
    )
    judge.tensors(
        [rank["seen"] for rank in ranks],
        expected,
        quantity="weight that one process gets",
        within=tolerance(setup, expected),
        given=f"{number} micro-batches where accumulation is 2",
    )


def in_groups(ctx, subject, setup, groups):
    """Weights of trainers that each belong to a sub-group."""
    run = session(ctx, subject, setup, group=ctx.split(groups))
    run.steps(1, 2)
    return {"seen": run.seen, "declares": declared(run.trainer)}


@clause(
    "trainer.group.trains-by-itself",
    source="contract: own-group; fairscale ShardedDDP: a group rank for a global one",
    worlds=(3,),
)
@pytest.mark.parametrize("max_norm", [None, 0.25], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("groups", [((0, 2), (1,)), ((0,), (1, 2))], ids=["0-2", "1-2"])
def test_a_sub_group_trains_by_itself(world, subject, max_norm, groups):
    """In a sub-group a trainer MUST train on that group's micro-batches alone."""
    setup = Setup(optimizer="momentum", max_norm=max_norm)
    ranks = world.run(in_groups, subject, setup, groups)

    for group in groups:
        found = [ranks[rank]["seen"] for rank in group]
        options = {"ranks": group, "declares": ranks[0]["declares"]}
        matches(found, Session.steps, setup, 1, 2, **options)
