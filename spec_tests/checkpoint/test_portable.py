"""Portability: another wrapper, another world size, another place; the values are the same.

What is saved today on eight ranks is looked at tomorrow on one, without any wrapper. Names that
carry the wrapper (`module.`) load nowhere else; one file per rank loads at one world size only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from spec_tests.checkpoint.disk import folder
from spec_tests.checkpoint.trainee import Trainee, part
from spec_tests.clause import clauses
from spec_tests.rig import judge

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct")
CONTRACT = "contract: by the plain model's names, at any world size"


def saved_and_loaded(ctx, directory, toy, saver, loader):
    """Saved under one wrapper, loaded under another."""
    trainee = Trainee(ctx, toy=toy, wrapper=saver)
    trainee.train(2)
    saved = part(trainee.state(), "model", "optimizer", "loader")
    trainee.save(directory, step=2)
    fresh = Trainee(ctx, toy=toy, wrapper=loader, seed=8)
    fresh.load(directory)
    return {"saved": saved, "loaded": part(fresh.state(), "model", "optimizer", "loader")}


def same_under_both(world, saver, loader):
    """What the one saved is what the other has."""
    __tracebackhide__ = True
    with folder() as directory:
        ranks = world.run(saved_and_loaded, directory, "tied", saver, loader)
    judge.tensors(
        [rank["loaded"] for rank in ranks],
        [rank["saved"] for rank in ranks],
        quantity="saved value",
        given=f"saved under {saver or 'no wrapper'}, loaded under {loader or 'none'}",
    )


@clause("checkpoint.names.across-own-wrappers", judges=("ddp", "ddp_bucketed"), source=CONTRACT)
@pytest.mark.parametrize("direction", ["to-plain", "from-plain"])
def test_wrapped_and_plain_models_load_each_others(world, subject, direction):
    """What is saved under the implementation's wrapper MUST load plain, and the other way round."""
    pair = (subject, None) if direction == "to-plain" else (None, subject)
    same_under_both(world, *pair)


@clause(
    "checkpoint.names.across-torch-wrapper",
    source=CONTRACT + "; the `module.` prefix of DistributedDataParallel's state_dict",
)
@pytest.mark.parametrize("direction", ["to-plain", "from-plain"])
def test_pytorchs_wrapper_and_plain_models_load_each_others(world, direction):
    """What is saved under DistributedDataParallel MUST load plain, and the other way round."""
    same_under_both(world, *(("torch", None) if direction == "to-plain" else (None, "torch")))


def in_other_groups(ctx, directory):
    """Saved with one parameter group, loaded with two in another order."""
    trainee = Trainee(ctx)
    trainee.train(2)
    trainee.save(directory, step=2)
    fresh = Trainee(ctx, seed=8, reverse=True)
    fresh.load(directory)
    return {
        "saved": part(trainee.state(), "optimizer"),
        "loaded": part(fresh.state(), "optimizer"),
    }


@clause(
    "checkpoint.names.optimizer-by-parameter",
    level="production",
    source="torch.distributed.checkpoint.state_dict: state keyed by name; torch issue 126948",
)
def test_optimizer_state_follows_the_parameters_name(world):
    """Optimizer state MUST find its parameter by name, whatever the order and grouping."""
    with folder() as directory:
        ranks = world.run(in_other_groups, directory)

    judge.tensors(
        [rank["loaded"] for rank in ranks],
        [rank["saved"] for rank in ranks],
        quantity="saved state of that parameter",
        given="loaded with the parameters reversed and in two groups",
    )


def save_only(ctx, directory, wrapper):
    """Train and save; the state that was saved."""
    trainee = Trainee(ctx, wrapper=wrapper)
    trainee.train(2)
    trainee.save(directory, step=2)
    return part(trainee.state(), "model", "optimizer", "loader")


def load_only(ctx, directory):
    """Load into a fresh run, and a step of it."""
    fresh = Trainee(ctx, seed=8)
    step = fresh.load(directory)
    loaded = part(fresh.state(), "model", "optimizer", "loader")
    fresh.train()
    return {"loaded": loaded, "step": step}


@clause(
    "checkpoint.world-size.any",
    source=CONTRACT + "; torchtitan issue 1136, Lightning issue 16815",
    worlds=(1, 2, 3),
)
@pytest.mark.parametrize("other", [1, 2, 4])
def test_a_save_loads_at_any_other_world_size(world, other):
    """A save MUST load at any other world size: model, optimizer, loader and step.

    The ranks that load are other processes than those that saved: nothing comes from memory.
    """
    with folder() as directory:
        saved = world.run(save_only, directory, "torch")
        ranks = world.worlds.world(other, world.target).run(load_only, directory)

    judge.tensors(
        [rank["loaded"] for rank in ranks],
        saved[0],
        quantity="saved value",
        given=f"saved on {world.size} ranks, loaded on {other}",
    )
    judge.equal([rank["step"] for rank in ranks], 2, quantity="step")


def from_elsewhere(ctx, directory, how):
    """Saved with a relative path, loaded from another working directory or another place."""
    base = Path(directory).parent
    if ctx.rank == 0:
        (base / "here" / "deeper").mkdir(parents=True)
    ctx.barrier()
    os.chdir(base / "here")
    trainee = Trainee(ctx)
    trainee.train()
    trainee.save("checkpoints", step=1)
    saved, place = trainee.state(), base / "here" / "checkpoints"
    os.chdir(base / "here" / "deeper")
    ctx.barrier()
    if how == "moved" and ctx.rank == 0:
        shutil.move(place, base / "elsewhere")
    ctx.barrier()
    fresh = Trainee(ctx, seed=8)
    reading = fresh.read(str(base / "elsewhere") if how == "moved" else "../checkpoints")
    os.chdir("/")
    return {"saved": saved, "loaded": reading["state"], "error": reading["error"]}


@clause(
    "checkpoint.place.any",
    level="production",
    source="paths inside a checkpoint are relative to it, as torch.distributed.checkpoint's are",
    worlds=(1, 2),
)
@pytest.mark.parametrize("how", ["other-working-directory", "moved"])
def test_neither_working_directory_nor_place_matter(world, how):
    """A save MUST load from another working directory, and after its folder was moved."""
    with folder() as directory:
        ranks = world.run(from_elsewhere, directory, how)

    judge.equal([rank["error"] for rank in ranks], "", quantity="error of the load")
    judge.tensors(
        [rank["loaded"] for rank in ranks],
        [rank["saved"] for rank in ranks],
        quantity="saved value",
    )
