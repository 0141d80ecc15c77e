"""Checkpoints of a trainer: what `save` wrote, `load` brings back, also at another size.

The run that was not interrupted is the oracle, so whatever a checkpoint leaves out shows.
"""

from __future__ import annotations

import tempfile

import pytest

from spec_tests.programs import trained
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.programs.scene import TRAINERS, Scene
from spec_tests.programs.trained import OnRank
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.tolerance import exact

clause = clauses(judges=TRAINERS, level="correct", worlds=(2,))
holds = rows(clause, same_as_alone)


def resumed(ctx, folder, subject, scene):
    """Weights of a run, and of one that was stopped after two steps and loaded elsewhere."""
    first, second = (OnRank(ctx, subject, scene, folder, plus=plus) for plus in (0, 5))
    first.method("save")
    second.method("load")
    second.train("9")  # what was there before must not matter
    first.follow("train 1, train 2")
    if ctx.rank == 0:  # when `save` returns on another rank, all is written
        ctx.be_late(0.05)
    first.save()
    second.trainer.load(f"{first.folder}/1")
    found = []
    for run in (first, second):
        if hasattr(run.trainer, "set_lr"):  # the factor is the caller's matter
            run.rate("0.25")
        shown = run.follow("read, train 3, train 4")
        found.append({f"{name}, {call}": t for call, each in shown for name, t in each.items()})
    return found


@clause(
    "trainer.checkpoint.resumes",
    source="contract: Trainer.load/replaces; torchtitan issue 811; DeepSpeed load_checkpoint",
)
@pytest.mark.parametrize(
    "scene",
    ["mlp momentum two-groups", "tied adamw two-groups", "mlp adamw not-the-second"],
    ids=["mlp-momentum", "tied-adamw", "frozen"],
)
def test_a_loaded_run_goes_on_as_if_it_had_not_stopped(world, subject, scene):
    """A loaded trainer MUST go on with the bits of the run that was not interrupted.

    Weights alone are not enough: moments and step counts decide the next update.
    """
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        wanted, seen = zip(*world.run(resumed, folder, subject, scene), strict=True)

    quantity = "weight of the run that was not stopped"
    judge.tensors(seen, wanted, quantity=quantity, within=exact(), given=scene)


test_saving_changes_nothing = holds(
    "trainer.checkpoint.saving-changes-nothing",
    "Saving MUST NOT change later training.",
    "mlp adamw of-two: train 1, save, train 2, save, train 3",
    source="contract: Trainer.save/inert",
    worlds=(3,),
)

test_evaluates_what_was_loaded = holds(
    "trainer.checkpoint.evaluates-what-was-loaded",
    "The first evaluation after `load` MUST use the loaded weights.",
    "mlp momentum: train 1, train 2, save, train 3, evaluate 50, load copied, evaluate 50",
    source="contract: Trainer.load/replaces; "
    "Megatron-Bridge issue 3397: loaded weights were active only after a step",
)


def at_another_size(ctx, folder, subject, saved, loaded):
    """Weights after a load by groups of other sizes than the one that saved, and two steps."""
    first = OnRank(ctx, subject, saved, folder)
    first.follow("train 1, train 2, save")
    ctx.barrier()
    run = OnRank(ctx, subject, loaded, folder, plus=5)
    run.method("load")(f"{first.folder}/1")
    found = {"seen": run.follow("train 3, train 4"), "declares": run.declares}
    if ctx.rank in run.scene.peers(ctx.world_size, 0):  # one group saves by itself
        run.trainer.save(f"{run.folder}/2")
    return found


@clause(
    "trainer.checkpoint.another-size",
    source="contract: other-world, own-group, Trainer.save/on-return",
    worlds=(3,),
)
def test_a_checkpoint_loads_at_another_size(world, subject):
    """A checkpoint MUST load on another number of ranks with the same values, or be an error."""
    saved, loaded = Scene.of("mlp adamw"), Scene.of("mlp adamw apart")
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        ordinary = (trained.follow, subject, saved, "train 1, save", f"{folder}/plain")
        ranks = refusal.answer_or_refusal(
            world, at_another_size, folder, subject, saved, loaded, ordinary=ordinary
        )
    if ranks is None:
        return
    expected = []
    for rank in range(world.size):
        run = trained.one_process(saved, world.size, rank, ranks[0]["declares"])
        run.follow("train 1, train 2")
        run.ranks = loaded.peers(world.size, rank)
        run.trainer.size = len(run.ranks)
        expected.append(run.follow("train 3, train 4"))
    for number in range(2):
        judge.tensors(
            [rank["seen"][number][1] for rank in ranks],
            [each[number][1] for each in expected],
            quantity="weight of one process that goes on with the group's micro-batches",
            within=trained.within(loaded, 4),
            given=f"saved by 3 ranks, loaded by the groups {loaded['group']}",
        )
