"""Choice and refusal: which save is loaded, what does not fit, and what may not run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from torch import nn

from spec_tests.chapters.checkpoint.disk import contents, damaged, in_folder
from spec_tests.chapters.checkpoint.trainee import Trainee
from spec_tests.programs.laws import durability, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

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


def strangers(directory, fresh):
    """Files and folders of other people."""
    Path(directory, "lost+found").mkdir()
    Path(directory, "plots", "step-99999999").mkdir(parents=True)
    Path(directory, "notes.txt").write_text("step 2 looked odd\n")


def names_alike(directory, fresh):
    """Copies of files and folders that somebody named in words."""
    for path in list(Path(directory).iterdir()):
        other = path.with_name(re.sub("[0-9]+", "good", path.name))
        if not other.exists():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, other)


def backup(directory, fresh):
    """A word is added to the newer save's name."""
    for path in fresh:
        path.rename(path.with_name(f"{path.stem}-backup{path.suffix}"))


def after_meddling(ctx, directory, meddling):
    """Of two saves, what loads after somebody changed the folder; and whether the newer is new."""
    trainee = Trainee.saved(ctx, directory)
    older, before = trainee.state(), set(Path(directory).iterdir())
    ctx.barrier()
    trainee.train()
    trainee.save(directory, step=2)
    ctx.barrier()
    fresh = set(Path(directory).iterdir()) - before
    ctx.barrier()
    if ctx.rank == 0:
        meddling(directory, fresh)
    ctx.barrier()
    reading = Trainee(ctx, seed=8).read(directory, f"after {meddling.__name__}")
    return {"older": older, "newer": trainee.state(), "fresh": bool(fresh), "reading": reading}


def newest_loads(world, meddling):
    """The newer save loads, whatever somebody put beside it."""
    __tracebackhide__ = True
    for rank in in_folder(world, after_meddling, meddling):
        durability.one_of([rank["reading"]], {"the newer save": (2, rank["newer"])})


newest = rows(clause, newest_loads)

test_foreign_files = newest(
    "checkpoint.choice.foreign-files",
    "Foreign files and folders beside the saves MUST not keep the newest one from loading.",
    strangers,
    source="contract: foreign; a user's notes, plots and lost+found lie where the checkpoints do",
)


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


test_names_alike = newest(
    "checkpoint.choice.names-alike",
    "Names like those of the saves, with a word for the number, MUST NOT confuse a load.",
    names_alike,
    level="production",
    source="contract: foreign; cp -r step-900 step-good",
)


@clause(
    "checkpoint.choice.backups",
    level="production",
    source="contract: foreign; mv step-900 step-900-backup",
)
def test_a_save_that_was_put_aside_is_no_checkpoint(world):
    """A save to whose name a word was added MUST NOT be loaded; an error is right as well."""
    likely = "a name counts that only begins like a checkpoint's"
    for rank in in_folder(world, after_meddling, backup):
        which, step = ("older", 1) if rank["fresh"] else ("newer", 2)
        saved = {f"the {which} save": (step, rank[which])}
        durability.one_of([rank["reading"]], saved, may_refuse=True, likely=likely)


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


def refusing_once(load):
    """A function that raises first, and then loads: an undo may load the former state."""
    calls = iter(["the first"])

    def refuse(*given):
        if next(calls, ""):
            raise ValueError("refused")
        return load(*given)

    return refuse


def with_a_part_that_refuses(ctx, directory, part):
    """A load into a model that fits, where the loader or the optimizer refuses what was saved."""
    Trainee.saved(ctx, directory, toy="mlp")
    other = Trainee(ctx, toy="mlp", seed=8)
    if part == "loader":
        vars(other.loader)["load_state_dict"] = refusing_once(other.loader.load_state_dict)
    else:
        other.optimizer.register_load_state_dict_pre_hook(refusing_once(lambda *given: None))
    return other.read(directory, f"the {part} refuses its state")


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


OTHERS = pytest.mark.parametrize("change", list(CHANGES))


@clause("checkpoint.mismatch.raises", source="contract: no-fit")
@OTHERS
def test_a_model_that_does_not_fit_is_an_error(world, change):
    """A load into a model with other names or shapes MUST raise on all ranks.

    With `strict=False` what does not fit keeps its random values.
    """
    ranks = in_folder(world, into_another_model, change)

    refusal.on_all_ranks([rank["error"] for rank in ranks], given=f"the model is {change}")


@clause(
    "checkpoint.mismatch.changes-nothing",
    level="production",
    source="contract: failed-load; "
    "a load that fails half way leaves a model that nobody ever trained",
)
@pytest.mark.parametrize("change", [*CHANGES, "optimizer", "loader"])
def test_a_load_that_raises_changes_nothing(world, change):
    """A load that raises MUST leave model, optimizer, loader and generators as they were."""
    body = into_another_model if change in CHANGES else with_a_part_that_refuses
    ranks = in_folder(world, body, change)

    durability.untouched(ranks)


@clause(
    "checkpoint.mismatch.names-the-culprit",
    level="production",
    source="contract: names-tensor; torch.nn.Module.load_state_dict names the keys",
    worlds=(2,),
)
@OTHERS
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
        for kind in ("archive", "pickle"):
            witness = f"{directory}-witness-{number}-{kind}"
            copy = damaged(directory, file, f"{kind} {witness}", f"{directory}-{number}-{kind}")
            Trainee(ctx, seed=8).read(copy)
            if Path(witness).exists():
                ran.append(f"{Path(file).name} as {kind}")
    return ran


@clause(
    "checkpoint.safety.runs-no-code",
    level="production",
    source="contract: runs-no-code; "
    "torch.load, weights_only; torch.distributed.checkpoint unpickles its metadata freely",
    worlds=(1,),
)
def test_a_checkpoint_runs_no_code(world):
    """A load MUST not run code that a file of the checkpoint asks for.

    Checkpoints are downloaded. What a load makes of such a file, an error or the save before, is
    not promised here.
    """
    judge.equal(in_folder(world, with_traps), [], quantity="files whose code ran")
