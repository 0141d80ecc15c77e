"""Steps: the weights after every step are those of one process that sees all micro-batches.

A trainer's insides are not looked at. A sum in place of a mean, a lost micro-batch, clipping before
the reduction, an optimizer over the wrong parameters: each ends in other weights. Most clauses use
SGD, since Adam hides a constant factor. See Li et al. 2020, section 3.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.programs.laws.task import (
    BUILDERS,
    Session,
    Setup,
    alone,
    declared,
    loss,
    one_process_or_refusal,
    same_as_one_process,
    session,
    tolerance,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.errors import NotOffered

clause = clauses(judges=BUILDERS, level="correct", worlds=(2,))
THREE = (1, 2, 3)


@clause(
    "trainer.step.equals-one-process", source="contract: Trainer.step/one-process", worlds=(2, 3)
)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_steps_train_as_one_process_does(world, subject, optimizer):
    """After every step the weights MUST be those of one process that gets all ranks' batches."""
    same_as_one_process(world, subject, Session.steps, Setup(optimizer=optimizer), *THREE)


@clause(
    "trainer.step.accumulates",
    source="contract: mean-gradient; DeepSpeed issue 7839",
    worlds=(3,),  # unlike the number of micro-batches: which of the two divides is seen
)
@pytest.mark.parametrize("accumulation", [2, 4])
def test_micro_batches_are_averaged(world, subject, accumulation):
    """The gradient of a step MUST be the mean over all its micro-batches, on all ranks.

    The first is lost where a gradient is overwritten, and all but the last where it is cleared.
    """
    setup = Setup(accumulation=accumulation)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.step.group-options", source="contract: options; torch.optim, per-parameter options"
)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_every_group_keeps_its_options(world, subject, optimizer):
    """Every parameter group MUST be updated with its own learning rate and weight decay.

    Libraries that flatten parameters merge groups, or take the first one's options for all.
    """
    setup = Setup(optimizer=optimizer, splits=True)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.step.layouts",
    source="contract: layouts; FSDP2 refuses parameters that are not contiguous",
)
@pytest.mark.parametrize("toy", ["conv", "strided", "buffers"])
def test_unusual_layouts_are_trained_or_refused(world, subject, toy):
    """Parameters of any memory layout MUST be trained as in one process, or be refused.

    Toy "buffers" has an ordinary layout and batch normalisation beside it.
    """
    setup = Setup(toy=toy, optimizer="momentum")
    one_process_or_refusal(world, subject, Session.steps, setup, *THREE)


def ends(ctx, subject, setup, numbers):
    """Weights after some steps, as this rank has them, twice."""
    found = []
    for _ in range(2):
        run = session(ctx, subject, setup)
        run.steps(*numbers)
        found.append(run.seen)
    return found


@clause("trainer.step.equal-runs-equal-bits", source="contract: equal-ranks, equal-runs")
def test_equal_runs_give_equal_bits(world, subject):
    """All ranks MUST hold the same bits after every step, and a second equal run the same again."""
    ranks = world.run(ends, subject, Setup(optimizer="adamw", accumulation=2), THREE)

    judge.same_on_all_ranks([first for first, _ in ranks], quantity="weight")
    for rank, (first, second) in enumerate(ranks):
        judge.tensors(
            [second], first, quantity="weight of the run before", given=f"rank {rank}, second run"
        )


def from_unequal_starts(ctx, subject, setup):
    """Weights after steps of ranks that began with other weights; and what was declared."""
    run = session(ctx, subject, setup, plus=ctx.rank)
    if declared(run.trainer).get("start") == "own":
        raise NotImplementedError('declares["start"] is "own": the caller seeds all ranks alike')
    run.steps(1, 2)
    return {"seen": run.seen, "declares": declared(run.trainer)}


@clause(
    "trainer.step.starts-from-first-rank",
    source="contract: first-weights; DistributedDataParallel, broadcast",
)
def test_training_starts_from_the_first_ranks_weights(world, subject):
    """Ranks with unequal initial weights MUST train the first rank's, unless "start" is declared.

    Equal updates on unequal weights stay unequal for ever, and each rank's loss falls.
    """
    ranks = world.run(from_unequal_starts, subject, Setup())

    declares = ranks[0]["declares"]
    expected = alone(Session.steps, Setup(), 1, 2, ranks=range(world.size), declares=declares)
    judge.tensors(
        [rank["seen"] for rank in ranks],
        expected,
        quantity="weight trained from the first rank's start",
        within=tolerance(Setup(), expected),
    )


def reported(ctx, subject, setup):
    """The losses that two steps return, None where a rank gets none."""
    run = session(ctx, subject, setup)
    losses = [run.trainer.step(run.micro_batches(number)) for number in (1, 2)]
    found = [None if each is None else float(each) for each in losses]
    return {"losses": found, "declares": declared(run.trainer)}


def means(run, found):
    """Mean losses of two steps by rank, with the weights that everyone has trained."""
    for number in (1, 2):
        each = run.setup.accumulation
        with torch.no_grad():
            losses = [loss(run.module, batch) for batch in run.micro_batches(number)]
        found.append(
            [torch.stack(losses[i : i + each]).mean() for i in range(0, len(losses), each)]
        )
        run.trainer.step(run.micro_batches(number))


@clause(
    "trainer.step.reports-its-loss",
    source="contract: Trainer.step/loss; a course's trainer logs the loss / accumulation",
)
def test_the_loss_that_is_returned_is_a_mean(world, subject):
    """The loss that `step` returns MUST be the mean of this rank's micro-batches, or of all."""
    setup = Setup(accumulation=3)
    ranks = world.run(reported, subject, setup)

    found: list[list[torch.Tensor]] = []
    alone(means, setup, found, ranks=range(world.size), declares=ranks[0]["declares"])
    losses = {rank: seen["losses"] for rank, seen in enumerate(ranks)}
    reporting = {rank: seen for rank, seen in losses.items() if None not in seen}
    if not reporting:
        raise NotOffered("step() returns no loss")
    within = tolerance(setup, {"step 1": found[0][0], "step 2": found[1][0]})
    for rank, each in reporting.items():
        for number, (seen, own) in enumerate(zip(each, found, strict=True), 1):
            both = own[rank], torch.stack(own).mean()
            judge.holds(
                any(abs(seen - float(mean)) <= within.bound(mean) for mean in both),
                f"rank {rank}, step {number}: expected the mean loss of this rank, "
                f"{float(both[0]):.6g}, or of all ranks, {float(both[1]):.6g}, got {seen:.6g}",
                likely="a sum, the last micro-batch's, or a mean over other steps",
                given=str(setup),
            )


def with_a_late_rank(run):
    """Weights after steps in each of which another rank comes late."""
    for number in (1, 2, 3):
        if run.ranks[0] == number % 2:
            run.late()
        run.step(number)


@clause(
    "trainer.step.waits-for-late-ranks",
    source="contract: Trainer.step/one-process; DeepSpeed issues 5545 and 6351",
    worlds=(3,),
)
def test_a_late_rank_changes_nothing(world, subject):
    """When `step` returns, the weights MUST be the new ones, however late another rank came."""
    setup = Setup(optimizer="momentum", accumulation=2)
    same_as_one_process(world, subject, with_a_late_rank, setup)


def declarations(ctx, subject):
    """What a trainer declares."""
    return declared(session(ctx, subject, Setup()).trainer)


@clause("trainer.step.declares-what-is-known", source="contract: declares")
def test_declarations_are_those_of_the_contract(world, subject):
    """Each declared choice MUST be one that the contract names, equal on all ranks."""
    allowed = {
        "unused": ("none", "zero"),
        "gradient": ("mean", "sum"),
        "start": ("first-rank", "own"),
    }
    ranks = world.run(declarations, subject)
    for rank, found in enumerate(ranks):
        for name, choice in found.items():
            judge.holds(
                choice in allowed.get(name, ()),
                f"rank {rank}: expected a declaration out of {allowed}, got {name} = {choice!r}",
            )
    judge.equal(ranks, ranks[0], quantity="declarations")
