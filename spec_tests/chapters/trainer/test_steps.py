"""Steps: the weights after every step are those of one process that sees all micro-batches.

A trainer's insides are not looked at. A sum in place of a mean, a lost micro-batch, clipping before
the reduction, an optimizer over the wrong parameters: each ends in other weights. Most clauses use
SGD, since Adam hides a constant factor. See Li et al. 2020, section 3.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.programs.one_trainer import loss
from spec_tests.programs.scene import TRAINERS, Scene
from spec_tests.programs.trained import OnRank, one_process, within
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.ranks.errors import NotOffered

clause = clauses(judges=TRAINERS, level="correct", worlds=(2,))
holds = rows(clause, same_as_alone)
THREE = "train 1, train 2, train 3"

test_equals_one_process = holds(
    "trainer.step.equals-one-process",
    "After every step the weights MUST be those of one process that gets all ranks' batches.",
    {optimizer: f"mlp {optimizer}: {THREE}" for optimizer in ("sgd", "momentum", "adamw")},
    source="contract: Trainer.step/one-process",
    worlds=(2, 3),
)

test_accumulates = holds(
    "trainer.step.accumulates",
    "The gradient of a step MUST be the mean over all its micro-batches, on all ranks.",
    # The first is lost where a gradient is overwritten, and all but the last where it is cleared.
    {number: f"mlp of-{number}: {THREE}" for number in ("two", "four")},
    source="contract: mean-gradient; DeepSpeed issue 7839",
    worlds=(3,),  # unlike the number of micro-batches: which of the two divides is seen
)

test_group_options = holds(
    "trainer.step.group-options",
    "Every parameter group MUST be updated with its own learning rate and weight decay.",
    # Libraries that flatten parameters merge groups, or take the first one's options for all.
    {optimizer: f"mlp {optimizer} two-groups: {THREE}" for optimizer in ("momentum", "adamw")},
    source="contract: options; torch.optim, per-parameter options",
)

test_layouts = holds(
    "trainer.step.layouts",
    "Parameters of any memory layout MUST be trained as in one process, or be refused.",
    # The last toy has an ordinary layout and batch normalisation beside it.
    {toy: f"{toy} momentum: {THREE}" for toy in ("conv", "strided", "normalised")},
    source="contract: layouts; FSDP2 refuses parameters that are not contiguous",
)


def followed(ctx, subject, scene, program):
    """The weights after some steps, as this rank has them."""
    shown = OnRank(ctx, subject, scene).follow(program)
    return {f"{name} after {call}": t for call, found in shown for name, t in found.items()}


@clause("trainer.step.equal-runs-equal-bits", source="contract: equal-ranks, equal-runs")
def test_equal_runs_give_equal_bits(world, subject):
    """All ranks MUST hold the same bits after every step, and a second equal run the same again."""
    asked = (followed, subject, "mlp adamw of-two", THREE)
    first, second = world.run(*asked), world.run(*asked)

    judge.same_on_all_ranks(first, quantity="weight")
    judge.tensors(second, first, quantity="weight of the run before", given="second run")


test_starts_from_first_rank = holds(
    "trainer.step.starts-from-first-rank",
    'Ranks with unequal initial weights MUST train the first rank\'s, unless "start" is declared.',
    # Equal updates on unequal weights stay unequal for ever, and each rank's loss falls.
    "mlp own-seeds: train 1, train 2",
    source="contract: first-weights; DistributedDataParallel, broadcast",
)


def reported(ctx, subject, scene, between=""):
    """The losses that two steps return, None where a rank gets none; and what is declared."""
    run = OnRank(ctx, subject, scene)
    losses = [run.trainer.step(run.batches(1))]
    run.follow(between)
    losses.append(run.trainer.step(run.batches(2)))
    return [None if each is None else float(each) for each in losses], run.declares


@clause(
    "trainer.step.reports-its-loss",
    source="contract: Trainer.step/loss, after-exception; "
    "a course's trainer logs the loss / accumulation",
)
@pytest.mark.parametrize("between", ["", "fails 9 last"], ids=["in-turn", "after-an-exception"])
def test_the_loss_that_is_returned_is_a_mean(world, subject, between):
    """The loss that `step` returns MUST be the mean of this rank's micro-batches, or of all."""
    scene = Scene.of("mlp of-three")
    asked = (reported, subject, scene)
    if between:  # the step after an exception may be refused
        ranks = refusal.answer_or_refusal(world, *asked, between, ordinary=asked)
    else:
        ranks = world.run(*asked)
    if ranks is None:
        return
    losses, declares = zip(*ranks, strict=True)
    if all(None in each for each in losses):
        raise NotOffered("step() returns no loss")

    everyone = one_process(scene, world.size, 0, declares[0])
    for number in (1, 2):
        batches = everyone.batches(number)
        own = torch.stack([loss(everyone.module, each).detach() for each in batches])
        own = own.view(world.size, -1).mean(1)
        for rank, each in enumerate(losses):
            both = own[rank], own.mean()
            judge.holds(
                None in each
                or any(abs(each[number - 1] - m) <= within(scene, 2).bound(m) for m in both),
                f"rank {rank}, step {number}: expected the mean loss of this rank, "
                f"{both[0]:.6g}, or of all ranks, {both[1]:.6g}, got {each[number - 1]}",
                likely="a sum, the last micro-batch's, or a mean over other steps",
                given=f"{scene}: {between}",
            )
        everyone.trainer.step(batches)


def declared(ctx, subject):
    return dict(getattr(OnRank(ctx, subject, "mlp").trainer, "declares", {}))


@clause("trainer.step.declares-what-is-known", source="contract: declares")
def test_declarations_are_those_of_the_contract(world, subject):
    """Each declared choice MUST be one that the contract names, equal on all ranks."""
    allowed = {
        "unused": ("none", "zero"),
        "gradient": ("mean", "sum"),
        "start": ("first-rank", "own"),
    }
    ranks = world.run(declared, subject)
    for rank, found in enumerate(ranks):
        for name, choice in found.items():
            judge.holds(
                choice in allowed.get(name, ()),
                f"rank {rank}: expected a declaration out of {allowed}, got {name} = {choice!r}",
            )
    judge.equal(ranks, ranks[0], quantity="declarations")
