"""Choice and refusal: which save is loaded, what does not fit, and what may not run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from torch import nn

from spec_tests.chapters.checkpoint.disk import contents, in_folder, trapped
from spec_tests.chapters.checkpoint.trainee import Trainee
from spec_tests.programs.laws import durability, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct", worlds=(1, 2))


def several(ctx, directory, steps):
    """Saves of several steps; the state at the highest one, and what is loaded."""
    trainee = Trainee(ctx)
    states = {}
    for step in steps:
        trainee.train()
        trainee.save(directory, step=step)
        states[step] = trainee.state()
    reading = Trainee(ctx, seed=8).read(directory, f"saved {steps}")
    return states[max(steps)], reading


ORDERS = {
    "rising": ((8, 9, 10, 100), "steps are compared as text"),
    "falling": ((20, 10, 10), "the latest save is taken, not the highest step"),
}


@clause(
    "checkpoint.choice.highest-step",
    source="contract: newest; a sort of names puts 9 behind 10 and 100",
)
@pytest.mark.parametrize("order", ORDERS)
def test_the_highest_step_is_loaded(world, order):
    """Of several saves a load MUST take that of the highest step, as a number.

    A run that was repeated from an earlier step saves lower ones later.
    """
    steps, likely = ORDERS[order]
    ranks = in_folder(world, several, steps)

    for highest, reading in ranks:
        saved = {"the save of the highest step": (max(steps), highest)}
        durability.one_of([reading], saved, likely=likely)


def with_strangers(ctx, directory):
    """A save among files and folders of other people."""
    trainee = Trainee.saved(ctx, directory)
    if ctx.rank == 0:
        Path(directory, "lost+found").mkdir()
        Path(directory, "plots", "step-99999999").mkdir(parents=True)
        Path(directory, "notes.txt").write_text("step 2 looked odd\n")
    ctx.barrier()
    reading = Trainee(ctx, seed=8).read(directory, "with foreign files beside it")
    return trainee.state(), reading


@clause(
    "checkpoint.choice.foreign-files",
    source="contract: foreign; a user's notes, plots and lost+found lie where the checkpoints do",
)
def test_foreign_files_are_no_checkpoints(world):
    """Foreign files and folders beside the saves MUST not keep the newest one from loading."""
    ranks = in_folder(world, with_strangers)

    for saved, reading in ranks:
        durability.one_of([reading], {"the save": (1, saved)})


def without_any(ctx, directory, exists):
    """A load where there is nothing."""
    if exists and ctx.rank == 0:
        Path(directory).mkdir(parents=True)
    ctx.barrier()
    return Trainee(ctx).read(directory)


@clause("checkpoint.choice.none", source="contract: none")
@pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
def test_without_a_checkpoint_nothing_is_loaded(world, exists):
    """Without a complete save a load MUST raise, or return 0, and change nothing."""
    ranks = in_folder(world, without_any, exists)

    for rank in ranks:
        judge.holds(
            bool(rank["error"]) or rank["step"] == 0,
            f"expected an error or step 0, got step {rank['step']!r}",
        )
        changed = durability.differing(rank, rank["before"])
        judge.holds(not changed, f"expected nothing to change, got changes in {changed[:3]}")


def with_names_alike(ctx, directory):
    """A save beside copies of its files and folders that somebody named in words."""
    trainee = Trainee.saved(ctx, directory)
    if ctx.rank == 0:
        for path in list(Path(directory).iterdir()):
            other = path.with_name(re.sub("[0-9]+", "good", path.name))
            if not other.exists():
                (shutil.copytree if path.is_dir() else shutil.copy)(path, other)
    ctx.barrier()
    return trainee.state(), Trainee(ctx, seed=8).read(directory, "with names alike beside it")


@clause(
    "checkpoint.choice.names-alike",
    level="production",
    source="contract: foreign; cp -r step-900 step-good",
)
def test_a_copy_that_is_named_in_words_is_no_checkpoint(world):
    """Names like those of the saves, with a word for the number, MUST NOT confuse a load."""
    ranks = in_folder(world, with_names_alike)

    for saved, reading in ranks:
        durability.one_of([reading], {"the save": (1, saved)})


def with_a_backup(ctx, directory):
    """Of two saves, what loads when somebody added a word to the newer one's name."""
    trainee = Trainee.saved(ctx, directory)
    older, before = trainee.state(), set(Path(directory).iterdir())
    ctx.barrier()
    trainee.train()
    trainee.save(directory, step=2)
    ctx.barrier()
    renamed = set(Path(directory).iterdir()) - before
    ctx.barrier()
    for path in renamed if ctx.rank == 0 else ():
        path.rename(path.with_name(f"{path.stem}-backup{path.suffix}"))
    ctx.barrier()
    reading = Trainee(ctx, seed=8).read(directory, "with the newer save as a backup")
    return older, trainee.state(), bool(renamed), reading


@clause(
    "checkpoint.choice.backups",
    level="production",
    source="contract: foreign; mv step-900 step-900-backup",
)
def test_a_save_that_was_put_aside_is_no_checkpoint(world):
    """A save to whose name a word was added MUST NOT be loaded; an error is right as well."""
    for older, newer, is_renamed, reading in in_folder(world, with_a_backup):
        saved = {"the older save": (1, older)} if is_renamed else {"the newer save": (2, newer)}
        durability.one_of(
            [reading],
            saved,
            may_refuse=True,
            likely="a name counts that only begins like a checkpoint's",
        )


CHANGES = {
    # the layer that is replaced or added, what it is then, and what an error must name
    "wider": ("second", lambda: nn.Linear(5, 4), "second"),
    "longer": ("third", lambda: nn.Linear(3, 3), "third"),
    "without-bias": ("second", lambda: nn.Linear(5, 3, bias=False), "second.bias"),
    "shorter": ("frozen", None, "frozen"),
}


def into_another_model(ctx, directory, change, ranks=None):
    """A load into a model of another shape, on all ranks or on the last one alone.

    The one that is shorter lacks a frozen layer, which no optimizer knows.
    """
    name, layer, _ = CHANGES[change]
    before = (lambda model: setattr(model, name, frozen())) if layer is None else None
    Trainee.saved(ctx, directory, toy="mlp", change=before)
    if layer is None or ctx.rank not in (range(ctx.world_size) if ranks is None else ranks):
        return Trainee(ctx, toy="mlp", seed=8).read(directory, change)
    other = Trainee(ctx, toy="mlp", seed=8, change=lambda model: setattr(model, name, layer()))
    return other.read(directory, change)


def frozen():
    """A layer that does not train."""
    return nn.Linear(3, 3).requires_grad_(False)


@clause(
    "checkpoint.mismatch.on-one-rank", level="production", source="contract: no-fit", worlds=(2,)
)
def test_a_model_that_fits_on_some_ranks_alone_is_an_error_on_all(world):
    """Where one rank's model does not fit, a load MUST raise on all ranks, without a hang."""
    ranks = in_folder(world, into_another_model, "wider", (world.size - 1,))

    errors = [rank["error"] for rank in ranks]
    refusal.on_all_ranks(errors, given="the last rank's model is wider")


@clause("checkpoint.mismatch.raises", source="contract: no-fit")
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_model_that_does_not_fit_is_an_error(world, change):
    """A load into a model with other names or shapes MUST raise on all ranks.

    With `strict=False` what does not fit keeps its random values.
    """
    ranks = in_folder(world, into_another_model, change)

    judge.equal(
        [bool(rank["error"]) for rank in ranks],
        True,
        quantity="whether the load raised, the answer",
        given=f"the model is {change}",
    )


@clause(
    "checkpoint.mismatch.changes-nothing",
    level="production",
    source="a load that fails half way leaves a model that nobody ever trained",
)
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_load_that_raises_changes_nothing(world, change):
    """A load that raises MUST leave model, optimizer, loader and generators as they were."""
    ranks = in_folder(world, into_another_model, change)

    durability.untouched(ranks)


@clause(
    "checkpoint.mismatch.names-the-culprit",
    level="production",
    source="torch.nn.Module.load_state_dict names the keys",
    worlds=(2,),
)
@pytest.mark.parametrize("change", list(CHANGES))
def test_the_error_names_what_does_not_fit(world, change):
    """The error of a load that does not fit MUST name a tensor that is to blame."""
    ranks = in_folder(world, into_another_model, change)

    culprit = CHANGES[change][2]
    for number, rank in enumerate(ranks):
        judge.holds(
            not rank["error"] or culprit in rank["error"],
            f"rank {number}: expected an error that names {culprit!r}, got {rank['error']}",
            given=f"the model is {change}",
        )


def with_traps(ctx, directory):
    """Every file of a checkpoint in turn replaced by a pickle that runs code; what ran."""
    Trainee.saved(ctx, directory)
    ran = []
    for number, file in enumerate(contents(directory)):
        for archive in (False, True):
            witness = f"{directory}-witness-{number}-{archive}"
            copy = trapped(
                directory, file, witness, f"{directory}-{number}-{archive}", archive=archive
            )
            Trainee(ctx, seed=8).read(copy)
            if Path(witness).exists():
                ran.append(f"{Path(file).name} as {'an archive' if archive else 'a pickle'}")
    return ran


@clause(
    "checkpoint.safety.runs-no-code",
    level="production",
    source="torch.load, weights_only; torch.distributed.checkpoint unpickles its metadata freely",
    worlds=(1,),
)
def test_a_checkpoint_runs_no_code(world):
    """A load MUST not run code that a file of the checkpoint asks for.

    Checkpoints are downloaded. What a load makes of such a file, an error or the save before, is
    not promised here.
    """
    judge.equal(in_folder(world, with_traps), [], quantity="files whose code ran")
