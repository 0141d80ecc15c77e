"""Lifecycle: evaluations, exceptions, a second trainer, sub-groups.

Between two steps a run evaluates, logs, fails and goes on. State that belongs to one trainer and is
kept by class, module or process shows here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.programs.law import same_as_alone
from spec_tests.programs.scene import TRAINERS, Scene
from spec_tests.programs.trained import OnRank, judge_trained
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=TRAINERS, level="correct", worlds=(2,))
holds = rows(clause, same_as_alone)
EVALUATES = "FSDP2 of PyTorch 2.13 computes with stale weights after an evaluation"

test_evaluation_leaves_no_trace = holds(
    "trainer.evaluation.leaves-no-trace",
    "An evaluation between steps MUST NOT change any later weight.",
    # What an evaluation returns is for the next clause to judge.
    {
        number: f"mlp momentum of-{number}: evaluate 51, train 1, evaluate 52, train 2, "
        "evaluate 53, train 3"
        for number in ("one", "two")
    },
    values=False,
    source="contract: Trainer.evaluate/inert; " + EVALUATES,
)

test_evaluation_current_weights = holds(
    "trainer.evaluation.current-weights",
    "`evaluate` MUST return this rank's loss of the batch with the current weights.",
    "mlp adamw: evaluate 50, train 1, evaluate 50, train 2, evaluate 50",
    source="contract: Trainer.evaluate/current; " + EVALUATES,
)


class Seen(set[tuple[bool, bool]]):
    """Training mode, and whether gradients are computed, of forwards; copies share it."""

    def __deepcopy__(self, memo):
        return self


class Watch(nn.Module):
    """The identity; a copy that computes in the model's place is seen as well."""

    def __init__(self):
        super().__init__()
        self.seen = Seen()

    def forward(self, x):
        self.seen.add((self.training, torch.is_grad_enabled()))
        return x


def modes(ctx, subject):
    """Modes of a layer in the forwards of steps and evaluations."""
    watch = Watch()
    layers = nn.Linear(6, 5), watch, nn.Linear(5, 3)
    run = OnRank(ctx, subject, "mlp of-two", module=lambda: nn.Sequential(*layers))
    evaluate = run.method("evaluate")
    found = {}
    for number in (1, 2):
        watch.seen.clear()
        run.trainer.step(run.batches(number))
        found[f"step {number}"] = sorted(watch.seen)
        watch.seen.clear()
        evaluate(run.batch(ctx.rank, 50))
        found[f"evaluation {number}"] = sorted(watch.seen)
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
    layers = nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)
    run = OnRank(ctx, subject, "mlp", module=lambda: nn.Sequential(*layers))
    evaluate = run.method("evaluate")
    run.module.get_submodule("1").eval()
    before = {name: part.training for name, part in run.module.named_modules()}
    evaluate(run.batch(ctx.rank, 50))
    return before, {name: part.training for name, part in run.module.named_modules()}


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


ORDERS = {"alternate": "01" + "01" * 3, "in-turn": "0" * 4 + "1" * 4}
OTHERS = 50
"""Gives the second trainer weights of its own: of equal ones a mix-up would not be seen."""


def two(ctx, subject, scenes, order):
    """Weights of two trainers, each built when its number first comes, and then stepped."""
    runs: dict[int, OnRank] = {}
    seen: tuple[list[Any], list[Any]] = ([], [])
    for which in map(int, ORDERS[order]):
        if which in runs:
            number = str(len(seen[which]) + 1)
            seen[which].append((f"train {number}", runs[which].train(number)))
        else:
            runs[which] = OnRank(ctx, subject, scenes[which], plus=OTHERS * which)
    return [{"seen": seen[which], "declares": run.declares} for which, run in runs.items()]


@clause(
    "trainer.lifecycle.two-trainers",
    source="contract: trainers-apart; torchtitan: a cache by the module's class",
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("second", ["same-class", "other-class"])
def test_two_trainers_do_not_disturb_each_other(world, subject, order, second):
    """Two trainers in one process MUST each train as if it were alone, with its own settings."""
    toy = "mlp" if second == "same-class" else "ragged"
    scenes = [Scene.of("mlp momentum of-two"), Scene.of(f"{toy} clipped")]
    ranks = world.run(two, subject, scenes, order)

    program = tuple(("train", number) for number in "123")
    for which, found in enumerate(zip(*ranks, strict=True)):
        given = f"{scenes[which]}, beside another trainer, {order}"
        judge_trained(found, scenes[which], program, given, plus=OTHERS * which)


test_after_an_exception = holds(
    "trainer.lifecycle.after-an-exception",
    "After an exception that the caller caught the next steps MUST be right, or an error.",
    # Gradients of the interrupted step must not be part of the next one.
    {
        "forward": "mlp of-two: train 1, fails 9 last, train 2, train 3",
        "backward": "mlp of-two: train 1, fails_backward 9 last, train 2, train 3",
        "evaluation": "normalised of-two: train 1, fails_evaluating 50, train 2, train 3",
    },
    source="contract: after-exception; out of memory, caught, and the next batch",
)

test_other_number_of_micro_batches = holds(
    "trainer.lifecycle.other-number-of-micro-batches",
    "A step with another number of micro-batches MUST be their mean's, or be an error.",
    {str(number): f"mlp of-two: train 1, train_of 2 {number}, train 3" for number in (1, 3)},
    source="contract: other-number; the last step of an epoch",
)

test_group_trains_by_itself = holds(
    "trainer.group.trains-by-itself",
    "In a sub-group a trainer MUST train on that group's micro-batches alone.",
    {
        "0-2": "mlp momentum apart: train 1, train 2",
        "1-2-clipped": "mlp momentum last-two clipped: train 1, train 2",
    },
    source="contract: own-group; fairscale ShardedDDP: a group rank for a global one",
    worlds=(3,),
)
