"""Checkpoints of a trainer: what `save` wrote, `load` brings back, also at another size.

The run that was not interrupted is the oracle, so whatever a checkpoint leaves out shows.
"""

from __future__ import annotations

import tempfile

import pytest

from spec_tests.programs.laws import refusal
from spec_tests.programs.laws.task import (
    BUILDERS,
    Session,
    Setup,
    alone,
    declared,
    matches,
    method,
    session,
    tolerance,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import exact

clause = clauses(judges=BUILDERS, level="correct", worlds=(2,))


def in_folder(world, body, *args):
    """Run a body whose first argument is a folder that does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="trainspec-trainer-") as directory:
        return world.run(body, f"{directory}/checkpoint", *args)


def resumed(ctx, directory, subject, setup):
    """Weights of a run, and of one that was stopped after two steps and loaded elsewhere."""
    first, second = session(ctx, subject, setup), session(ctx, subject, setup, plus=5)
    save, load = method(first.trainer, "save"), method(second.trainer, "load")
    second.trainer.step(second.micro_batches(9))  # what was there before must not matter
    rates = [run.trainer.set_lr for run in (first, second) if hasattr(run.trainer, "set_lr")]
    for set_lr in rates[:1]:  # the factor is the caller's matter, and not the checkpoint's
        set_lr(0.5)
    first.steps(1, 2)
    first.seen.clear()
    if ctx.rank == 0:  # when `save` returns on another rank, all is written
        ctx.be_late(0.05)
    save(directory)
    load(directory)
    for set_lr in rates:
        set_lr(0.25)
    for run in (first, second):
        run.note("loaded")
        run.steps(3, 4)
    return {"wanted": first.seen, "seen": second.seen}


@clause(
    "trainer.checkpoint.resumes",
    source="contract: Trainer.load/replaces; torchtitan issue 811; DeepSpeed load_checkpoint",
)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("toy", ["mlp", "tied"])
def test_a_loaded_run_goes_on_as_if_it_had_not_stopped(world, subject, optimizer, toy):
    """A loaded trainer MUST go on with the bits of the run that was not interrupted.

    Weights alone are not enough: moments and step counts decide the next update.
    """
    setup = Setup(toy=toy, optimizer=optimizer, splits=True)
    ranks = in_folder(world, resumed, subject, setup)

    judge.tensors(
        [rank["seen"] for rank in ranks],
        [rank["wanted"] for rank in ranks],
        quantity="weight of the run that was not stopped",
        within=exact(),
        given=str(setup),
    )


def saves_between(ctx, directory, subject, setup):
    """Weights of a run that saves after every step."""
    run = session(ctx, subject, setup)
    for number in (1, 2, 3):
        run.step(number)
        method(run.trainer, "save")(f"{directory}-{number}")
    return {"seen": run.seen, "declares": declared(run.trainer)}


@clause(
    "trainer.checkpoint.saving-changes-nothing", source="contract: Trainer.save/inert", worlds=(3,)
)
def test_saving_changes_nothing(world, subject):
    """Saving MUST NOT change later training."""
    setup = Setup(optimizer="adamw", accumulation=2)
    ranks = in_folder(world, saves_between, subject, setup)

    options = {"ranks": range(world.size), "declares": ranks[0]["declares"]}
    matches([rank["seen"] for rank in ranks], Session.steps, setup, 1, 2, 3, **options)


def evaluated(ctx, directory, subject, setup):
    """Losses of one batch in the run that saved, and in one that loaded, right afterwards."""
    first = session(ctx, subject, setup)
    first.steps(1, 2)
    method(first.trainer, "save")(directory)
    second = session(ctx, subject, setup, plus=5)
    method(second.trainer, "evaluate")(second.batch(ctx.rank, 50))  # computes with what it has
    second.trainer.load(directory)
    return [float(run.trainer.evaluate(run.batch(ctx.rank, 50))) for run in (first, second)]


@clause(
    "trainer.checkpoint.evaluates-what-was-loaded",
    source="contract: Trainer.load/replaces; "
    "Megatron-Bridge issue 3397: loaded weights were active only after a step",
)
def test_what_was_loaded_is_what_is_evaluated(world, subject):
    """The first evaluation after `load` MUST use the loaded weights."""
    ranks = in_folder(world, evaluated, subject, Setup(optimizer="momentum"))

    for rank, (saved, loaded) in enumerate(ranks):
        judge.holds(
            abs(saved - loaded) <= 1e-6 * max(1.0, abs(saved)),
            f"rank {rank}: expected the loss of the run that saved, {saved}, got {loaded}",
            likely="weights from before the load are computed with: a copy was not replaced",
        )


def at_another_size(ctx, directory, subject, setup, groups):
    """Weights after a load by groups of other sizes than the one that saved, and two steps."""
    first = session(ctx, subject, setup)
    first.steps(1, 2)
    method(first.trainer, "save")(directory)
    ctx.barrier()
    run = session(ctx, subject, setup, group=ctx.split(groups), plus=5)
    method(run.trainer, "load")(directory)
    run.steps(3, 4)
    return {"seen": run.seen, "declares": declared(run.trainer)}


def then_in_group(run, group):
    """One process: two steps of everyone, two of the group."""
    for number in (1, 2):
        run.trainer.step(run.micro_batches(number))
    run.ranks, run.trainer.ranks = group, len(group)
    run.steps(3, 4)


@clause(
    "trainer.checkpoint.another-size",
    source="contract: other-world, Trainer.save/on-return",
    worlds=(3,),
)
def test_a_checkpoint_loads_at_another_size(world, subject):
    """A checkpoint MUST load on another number of ranks with the same values, or be an error."""
    setup, groups = Setup(optimizer="adamw"), ((0, 2), (1,))
    with tempfile.TemporaryDirectory(prefix="trainspec-trainer-") as directory:
        ordinary = (saves_between, f"{directory}/plain", subject, setup)
        ranks = refusal.answer_or_refusal(
            world, at_another_size, f"{directory}/c", subject, setup, groups, ordinary=ordinary
        )
    if ranks is None:
        return
    for group in groups:
        declares = ranks[0]["declares"]
        expected = alone(then_in_group, setup, group, ranks=range(3), declares=declares)
        judge.tensors(
            [ranks[rank]["seen"] for rank in group],
            expected,
            quantity="weight of one process that goes on with the group's micro-batches",
            within=tolerance(setup, expected),
            given=f"saved by 3 ranks, loaded by the group {group}",
        )
