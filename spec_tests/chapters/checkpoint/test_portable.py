"""Portability: another wrapper, another world size, another place; the values are the same.

What is saved today on eight ranks is looked at tomorrow on one, without any wrapper. Names that
carry the wrapper (`module.`) load nowhere else; one file per rank loads at one world size only.

A sharded optimizer's state is on many ranks, and in a checkpoint it is one state again.

Every rank has the moments of other parameters, so whoever saves what the first rank has loses most
of them. The save must be the plain optimizer's: for any number of ranks, and for none. A save that
refuses a sharded optimizer, with an error on all ranks, is right as well.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests.chapters.checkpoint.disk import folder, in_folder
from spec_tests.chapters.checkpoint.trainee import Remembering, Trainee, compare, part, round_trip
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct")

PARTS = ("model", "optimizer", "loader")


def same_under_both(world, wrapper, direction):
    """What is saved under a wrapper loads plain, or the other way round."""
    __tracebackhide__ = True
    wrappers = (wrapper, None) if direction == "to-plain" else (None, wrapper)
    ranks = in_folder(world, round_trip, toy="tied", wrappers=wrappers)
    saver, loader = (each or "no wrapper" for each in wrappers)
    given = f"saved under {saver}, loaded under {loader}"
    compare(ranks, *PARTS, quantity="saved value", given=given)


@clause(
    "checkpoint.names.across-own-wrappers",
    judges=("ddp", "ddp_bucketed"),
    source="contract: plain-names, model",
)
@pytest.mark.parametrize("direction", ["to-plain", "from-plain"])
def test_wrapped_and_plain_models_load_each_others(world, subject, direction):
    """A model saved under the implementation's wrapper MUST load plain, and the other way round."""
    same_under_both(world, subject, direction)


@clause(
    "checkpoint.names.across-torch-wrapper",
    source="contract: plain-names, model; "
    "the `module.` prefix of DistributedDataParallel's state_dict",
)
@pytest.mark.parametrize("direction", ["to-plain", "from-plain"])
def test_pytorchs_wrapper_and_plain_models_load_each_others(world, direction):
    """A model saved under DistributedDataParallel MUST load plain, and the other way round."""
    same_under_both(world, "torch", direction)


def of_a_whole_model(ctx, directory):
    """Full weights of a whole model that is sharded, and what a plain model loads of its save."""
    model, plain = (TOYS["even"].build(seed).to(ctx.device) for seed in (7, 8))
    saved = {f"model: {name}": p.detach().clone() for name, p in model.named_parameters()}
    wrapped = ctx.impl.fsdp(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (wrapped, plain))
    with refusal.caught(BaseException) as caught:  # the library's own is no Exception
        ctx.impl.save_checkpoint(directory, step=1, model=wrapped, optimizer=optimizer)
    if caught["error"]:
        return caught["error"], {}, {}
    ctx.impl.load_checkpoint(directory, model=plain, optimizer=other)
    return "", saved, {f"model: {name}": p.detach() for name, p in plain.named_parameters()}


@clause(
    "checkpoint.names.of-a-whole-model",
    level="production",
    needs=("save_checkpoint", "load_checkpoint", "fsdp"),
    source="contract: whole-model; "
    "a wrapper that is known by its class, and another one that is not",
    worlds=(2,),
)
def test_what_a_whole_model_saves_loads_plain(world):
    """A save of a model that `fsdp` wrapped MUST load plain, or the save be refused."""
    errors, saved, loaded = zip(*in_folder(world, of_a_whole_model), strict=True)

    if any(errors):
        refusal.on_all_ranks(errors, given="a model that fsdp wrapped")
        return
    judge.tensors(loaded, saved, quantity="saved value", given="saved under fsdp, loaded plain")


def into_another_order(ctx, directory, groups):
    """A round trip into an optimizer with the parameters reversed, and what it raised."""
    found: dict[str, Any] = {}
    with refusal.caught(BaseException) as caught:  # the library's own is no Exception
        found = round_trip(ctx, directory, reverses=("", groups))
    return {**found, "error": caught["error"]}


@clause(
    "checkpoint.names.optimizer-by-parameter",
    level="production",
    source="contract: optimizer-names; "
    "torch.distributed.checkpoint.state_dict: state keyed by name; torch issue 126948",
)
@pytest.mark.parametrize("groups", ["one-group", "two-groups"])
def test_optimizer_state_follows_the_parameters_name(world, groups):
    """Optimizer state MUST find its parameter by name, whatever the order and grouping.

    An error on all ranks is an answer, too, of who can save and load the same order.
    """
    ranks = in_folder(world, into_another_order, groups)

    given = f"loaded with the parameters reversed, {groups}"
    errors = [rank["error"] for rank in ranks]
    if any(errors):
        refusal.on_all_ranks(errors, given=given)
        in_folder(world, round_trip)  # the ordinary, which nobody may refuse
        return
    compare(ranks, "optimizer", quantity="saved state of that parameter", given=given)


def save_another(ctx, directory):
    """Save another run under the step of `save_only`; the state that was saved."""
    trainee = Trainee(ctx, wrapper="torch")
    trainee.train(3)
    trainee.save(directory, step=2)
    return part(trainee.state(), *PARTS)


def save_only(ctx, directory, wrapper):
    """Train and save; the state that was saved."""
    return part(Trainee.saved(ctx, directory, step=2, wrapper=wrapper).state(), *PARTS)


def load_only(ctx, directory):
    """What a fresh run loads, and the step; it can train on."""
    fresh = Trainee(ctx, seed=8)
    step = fresh.load(directory)
    loaded = part(fresh.state(), *PARTS)
    fresh.train()
    return loaded, step


@clause(
    "checkpoint.world-size.any",
    source="contract: any-world-size, replaces; torchtitan issue 1136, Lightning issue 16815; "
    "what more ranks left under the step, taken for a part of the save",
    worlds=(1, 2, 3),
)
@pytest.mark.parametrize("other", [1, 4])
def test_a_save_loads_at_any_other_world_size(world, other):
    """A save MUST load at any other world size: model, optimizer, loader and step.

    The ranks that load are other processes than those that saved: nothing comes from memory. The
    save replaces one of the same step that had the other world size.
    """
    with folder() as directory:
        others = world.worlds.world(other, world.target)
        before = others.run(save_another, directory)
        saved = world.run(save_only, directory, "torch")
        ranks = others.run(load_only, directory)

    loaded, steps = zip(*ranks, strict=True)
    given = f"saved on {other} ranks, again on {world.size}, loaded on {other}"
    hint = Hint("the value of the save that this one replaces, which had another size", before[0])
    judge.tensors(loaded, saved[0], quantity="saved value", hints=[hint], given=given)
    judge.equal(steps, 2, quantity="step")


MOVED = "elsewhere [1]"  # letters that have a meaning in a pattern


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
        shutil.move(place, base / MOVED)
    ctx.barrier()
    fresh = Trainee(ctx, seed=8)
    reading = fresh.read(str(base / MOVED) if how == "moved" else "../checkpoints")
    os.chdir("/")
    return saved, reading["state"], reading["error"]


@clause(
    "checkpoint.place.any",
    level="production",
    source="contract: any-place; "
    "paths inside a checkpoint are relative to it, as torch.distributed.checkpoint's are",
    worlds=(1, 2),
)
@pytest.mark.parametrize("how", ["other-working-directory", "moved"])
def test_neither_working_directory_nor_place_matter(world, how):
    """A save MUST load from another working directory, and after its folder was moved."""
    saved, loaded, errors = zip(*in_folder(world, from_elsewhere, how), strict=True)

    judge.equal(errors, "", quantity="error of the load")
    judge.tensors(loaded, saved, quantity="saved value")


NEEDS = ("save_checkpoint", "load_checkpoint", "sharded_optimizer")
TOY = "ragged"

OPTIMIZERS = {
    "adamw": lambda shards: torch.optim.AdamW(shards, lr=0.01),
    # Large, so that float32 would round the gradients that are added to it.
    "wide": lambda shards: Remembering(
        shards,
        lambda old, gradient: (1e4 / 3 if old is None else old) + gradient.double(),
        lambda kept: kept - 1e4 / 3,
        0.01,
    ),
    "list": lambda shards: Remembering(
        shards, lambda old, gradient: [*(old or []), gradient.clone()], sum, 0.01
    ),
    "rows": lambda shards: Remembering(
        [shard for shard in shards if shard.dim() > 1],
        lambda old, gradient: (0 if old is None else old) + gradient.sum(1, keepdim=True),
        lambda kept: kept,
        0.01,
    ),
}


class Run:
    """A toy and its optimizer: its state divided over the ranks, or layers and state, or nothing.

    Args:
        kind: "zero1" or "unsharded", where all ranks train on the same batches, or a key of
            `OPTIMIZERS`, of layers that are sharded.
    """

    def __init__(self, ctx, kind, seed):
        self.ctx = ctx
        self.is_divided = kind in OPTIMIZERS
        # Shards of one shape fit where they do not belong.
        self.toy = TOYS["even" if self.is_divided and kind != "adamw" else TOY]
        self.module: Any = self.toy.build(seed).to(ctx.device)
        if self.is_divided:
            for unit in (*getattr(self.module, "layers", self.module).children(), self.module):
                ctx.impl.fully_shard(unit)
        parameters = self.module.parameters()
        if kind == "zero1":
            self.optimizer = ctx.impl.sharded_optimizer(parameters, torch.optim.AdamW, lr=0.01)
        else:
            self.optimizer = OPTIMIZERS.get(kind, OPTIMIZERS["adamw"])(parameters)

    def train(self, *numbers):
        """Steps on the batches of these numbers; the full weights afterwards."""
        for number in numbers:
            self.optimizer.zero_grad()
            batch = self.toy.batch(7, rank=self.ctx.rank * self.is_divided, micro=number)
            sum_of_squares(self.module(batch.to(self.ctx.device))).backward()
            self.optimizer.step()
        named = self.module.named_parameters()
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
        return {name: tensor.detach().clone() for name, tensor in whole.items()}


def stopped(ctx, directory, kind):
    """Weights of a run that saves after a step and goes on without stopping."""
    run = Run(ctx, kind, 7)
    run.train(1)
    ctx.impl.save_checkpoint(directory, step=1, model=run.module, optimizer=run.optimizer)
    return run.train(2, 3)


def went_on(ctx, directory, kind):
    """Weights of a fresh run that loads and goes on."""
    run = Run(ctx, kind, 8)
    run.train(9)  # whatever was there before must not matter
    ctx.impl.load_checkpoint(directory, model=run.module, optimizer=run.optimizer)
    return run.train(2, 3)


def saved_again(ctx, directory, kind):
    """Weights of a run that goes on from the save of one that went on itself, for a step."""
    between = Run(ctx, "zero1", 8)
    ctx.impl.load_checkpoint(directory, model=between.module, optimizer=between.optimizer)
    between.train(2)
    run, state = Run(ctx, kind, 8), {"model": between.module, "optimizer": between.optimizer}
    ctx.impl.save_checkpoint(directory, step=2, **state)
    ctx.impl.load_checkpoint(directory, model=run.module, optimizer=run.optimizer)
    return run.train(3)


def stopped_and_went_on(ctx, directory, kind):
    return stopped(ctx, directory, kind), went_on(ctx, directory, kind)


def without_a_checkpoint(ctx, kind):
    """Weights where the moments are lost; no implementation may refuse these steps."""
    run = Run(ctx, kind, 7)
    run.train(1)
    run.optimizer.state.clear()
    return run.train(2, 3)


@clause(
    "checkpoint.sharded-optimizer.any-world-size",
    level="correct",
    needs=NEEDS,
    source="contract: sharded-optimizer; "
    "ZeroRedundancyOptimizer.consolidate_state_dict; KempnerForge pull request 115",
)
@pytest.mark.parametrize("then", ["on-2-ranks", "on-3-ranks", "unsharded", "saved-again"])
def test_it_goes_on_with_any_number_of_ranks_or_unsharded(world, then):
    """A save of a sharded optimizer MUST go on at any world size, and unsharded, or be refused."""
    size = {"on-3-ranks": 3, "unsharded": 1}.get(then, 2)
    with folder() as directory:
        first = refusal.answer_or_refusal(world, stopped, directory, "zero1")
        if first is None:
            return
        other = world.worlds.world(size, world.target)
        kind = "zero1" if then.startswith("on-") else "unsharded"
        body = saved_again if then == "saved-again" else went_on
        ranks = refusal.answer_or_refusal(other, body, directory, kind)
        lost = world.run(without_a_checkpoint, "unsharded")[0]

    if ranks is not None:
        judge.tensors(
            ranks,
            first[0],
            quantity="weight of the uninterrupted run",
            within=rounding(torch.float32, terms=64, depth=4),
            hints=[
                Hint("the weight without the moments: they were not saved, or not loaded", lost)
            ],
            given=f"saved on {world.size} ranks, went on {then}",
        )


@clause(
    "checkpoint.sharded-model.goes-on",
    level="production",
    needs=("save_checkpoint", "load_checkpoint", "fully_shard"),
    source="contract: sharded-model; "
    "torch.distributed.checkpoint.state_dict: get_state_dict of FSDP2 models and optimizers",
    worlds=(2,),
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_sharded_model_goes_on_as_if_it_had_not_stopped(world, kind):
    """A save of a sharded model and its optimizer MUST go on to the same bits, or be refused.

    Whatever the optimizer keeps: lists of shards, a number for each row, more digits.
    """
    with folder() as directory:
        ranks = refusal.answer_or_refusal(
            world, stopped_and_went_on, directory, kind, ordinary=(without_a_checkpoint, "adamw")
        )
    if ranks is not None:
        first, second = zip(*ranks, strict=True)
        judge.tensors(second, first, quantity="weight of the run that did not stop")
