"""Content: what was saved comes back, bit for bit, and into the objects that train.

A checkpoint that loads is not yet one that is right. Moments left out, a loader that starts anew, a
random stream repeated: training goes on and the loss looks as before. So everything is compared,
and what is loaded into is always freshly built from another seed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.chapters.checkpoint.disk import in_folder
from spec_tests.chapters.checkpoint.trainee import Stream, Trainee, compare, part, round_trip
from spec_tests.programs.laws import durability
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct", worlds=(1, 2))
QUANTITIES = {
    "model": "saved parameter or buffer",
    "optimizer": "saved optimizer state",
    "loader": "saved loader position",
    "random": "saved generator state",
}


def comes_back(world, kind, *, given="", **situation):
    """This part of a state is after a load what it was when it was saved.

    Args:
        situation: of `round_trip`.
    """
    __tracebackhide__ = True
    ranks = in_folder(world, round_trip, **situation)
    compare(ranks, kind, quantity=QUANTITIES[kind], given=given)


back = rows(clause, comes_back)


@clause("checkpoint.content.model", source="contract: model")
@pytest.mark.parametrize(
    "toy", ["ragged", "tied", "frozen", "buffers", "mixed", "double", "strided"]
)
def test_parameters_and_buffers_come_back(world, toy):
    """A load MUST bring back every parameter and buffer as it was when it was saved."""
    comes_back(world, "model", given=f"toy {toy!r}", toy=toy)


def with_a_child_called_module(model):
    """Give the model a child of the name under which wrappers keep theirs."""
    model.add_module("module", nn.Linear(3, 3))
    model.register_parameter("weight", nn.Parameter(torch.arange(2.0)))  # and `module.weight`


test_child_called_module = back(
    "checkpoint.content.child-called-module",
    "Of a model that has a child called `module` a load MUST bring back the whole.",
    "model",
    change=with_a_child_called_module,
    level="production",
    source="contract: model, plain-names; `getattr(model, 'module', model)`",
    worlds=(1,),
)


def with_a_view(model):
    """Give the model a buffer in the memory of another one."""
    first = next(model.parameters()).detach()
    model.register_buffer("table", torch.arange(6.0, device=first.device) + first.sum())
    model.register_buffer("head", model.table[1:3])


test_views = back(
    "checkpoint.content.views",
    "A load MUST bring back a buffer that is a part of another one, and that other one.",
    "model",
    change=with_a_view,
    level="production",
    source="contract: part-buffers; ties that are known by their memory",
    worlds=(1,),
)


@clause(
    "checkpoint.content.optimizer",
    source="contract: optimizer; "
    "KempnerForge pull request 115 (moments lost); build-nanogpt keeps none at all",
)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd", "python-count", "count-alone"])
def test_optimizer_state_comes_back(world, optimizer):
    """A load MUST bring back moments, step counts and options of every parameter.

    Without moments the loss hardly shows it: a bump of some steps after each restart.
    """
    given = f"optimizer {optimizer!r}"
    comes_back(world, "optimizer", given=given, toy="tied", optimizer=optimizer)


SITUATIONS: dict[str, dict[str, Any]] = {
    "two-groups": {"reverses": ("two-groups", "two-groups")},
    "frozen-since": {"freezes": True},
}


@clause(
    "checkpoint.content.optimizer-as-it-stands",
    source="contract: optimizer; "
    "fine-tuning: a rate for each group, layers that are frozen in turn",
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_group_and_each_frozen_layer_gets_its_own_back(world, situation):
    """A load MUST give each group its own options, and frozen parameters their moments as well."""
    changed = SITUATIONS[situation]
    comes_back(world, "optimizer", given=situation, toy="tied", **changed)


test_optimizer_dtypes = back(
    "checkpoint.content.optimizer-dtypes",
    "State of float32 beside a narrow parameter MUST come back as it was, not rounded.",
    "optimizer",
    toy="mixed",
    optimizer="wide",
    level="production",
    source="contract: state-dtypes; "
    "torch.optim.Optimizer.load_state_dict casts state to the dtype of its parameter",
)

test_loader = back(
    "checkpoint.content.loader",
    "A load MUST give the loader the state that it had when it was saved.",
    # Otherwise the first batches are seen again, and the last ones never.
    "loader",
    source="contract: loader; torchtitan issues 291 and 811; nanoGPT issue 467",
)

test_random_state = back(
    "checkpoint.content.random-state",
    "At equal world size a load MUST bring back each rank's torch, NumPy and Python generators.",
    # Each rank's own: all with the first rank's would draw one dropout mask for all.
    "random",
    source="contract: generators; "
    "torchtitan pull request 409: one key for all ranks keeps one rank's",
    worlds=(1, 2, 3),
)


class Shuffles(Stream):
    """A loader that draws the order of its epoch anew when it takes up a state."""

    def load_state_dict(self, state):
        """As Stream, and one number of each generator."""
        super().load_state_dict(state)
        self.order = (torch.rand(()), np.random.random(), random.random())


class AtItsEnd(Stream):
    """A loader whose length is what is left of the pass, nothing here: as a truth value, False."""

    def __len__(self):
        return 0


class OfEachRank(Stream):
    """A loader that begins at a place of its rank's own."""

    def __init__(self, toy, seed, rank):
        super().__init__(toy, seed, rank)
        self.place["position"] = 10 * dist.get_rank()

    def next(self):
        """The next batch, the same on all ranks."""
        self.place["position"] += 1
        return self.toy.batch(self.seed, rank=self.rank, micro=self.position % 10)


test_loader_at_its_end = back(
    "checkpoint.content.loader-at-its-end",
    "The state of a loader whose length is 0 MUST be saved and loaded.",
    "loader",
    loaders=(AtItsEnd, AtItsEnd),
    level="production",
    source="contract: each-loader; `if loader:` where `if loader is not None:` is meant",
)

test_loader_of_each_rank = back(
    "checkpoint.content.loader-of-each-rank",
    "At equal world size a load MUST give each rank's loader the state that it had.",
    "loader",
    loaders=(OfEachRank, Stream),
    level="production",
    source="contract: each-loader; "
    "a loader whose workers ran ahead on one rank; a stream of each rank's own",
    worlds=(2, 3),
)

test_loader_that_draws = back(
    "checkpoint.content.loader-that-draws",
    "After a load generators MUST be those of the save, also if the loader used them in it.",
    "random",
    given="a loader that draws",
    loaders=(Stream, Shuffles),
    source="contract: save_checkpoint/generators; "
    "torch's DataLoader draws the seed of its workers for each iterator",
)


@clause(
    "checkpoint.content.step",
    source="contract: step; a course's trainer saves the step before it counts it",
)
def test_the_step_is_that_of_the_save(world):
    """A load MUST return the step that was given to the save, on every rank."""
    ranks = in_folder(world, round_trip)

    judge.equal([rank["step"] for rank in ranks], 2, quantity="step")


def trained_after_load(ctx, directory):
    """Parameters that are other objects after loading, and those that a step then leaves."""
    Trainee(ctx).save(directory, step=0)
    fresh = Trainee(ctx, seed=8)
    objects = {name: id(p) for name, p in fresh.module.named_parameters()}
    fresh.load(directory)
    replaced = [n for n, p in fresh.module.named_parameters() if objects.get(n) != id(p)]
    loaded = fresh.weights()
    fresh.train()
    return replaced, [n for n, t in fresh.weights().items() if torch.equal(loaded[n], t)]


@clause("checkpoint.content.reaches-live-objects", source="contract: live-objects")
def test_what_is_loaded_is_what_trains(world):
    """After a load the model's own Parameter objects MUST hold the values and go on training.

    New Parameter objects in their place are unknown to the optimizer and to every wrapper: the
    loss stands still, or the replicas drift.
    """
    replaced, unmoved = zip(*in_folder(world, trained_after_load), strict=True)

    judge.equal(replaced, [], quantity="names of parameters that were not kept")
    judge.equal(unmoved, [], quantity="names of parameters that were not moved")


def loaded_twice(ctx, directory):
    """A loaded run's state before and after another one, loaded from the same place, trains."""
    first = Trainee.saved(ctx, directory)
    one, two = Trainee(ctx, seed=8), Trainee(ctx, seed=9)
    one.load(directory)
    two.load(directory)
    before = part(one.state(), "model", "optimizer", "loader")
    first.train()
    two.train()
    return before, part(one.state(), "model", "optimizer", "loader")


@clause("checkpoint.content.shares-no-memory", source="contract: shares-nothing", worlds=(2,))
def test_loaded_values_are_nobody_elses(world):
    """Loaded tensors MUST share no memory with the run that saved or with another that loaded."""
    before, after = zip(*in_folder(world, loaded_twice), strict=True)

    judge.tensors(after, before, quantity="value from before the others trained")


def trained(ctx, directory, toy, steps, saves):
    """State after training, with a save before each step and before one is finished, or none."""
    trainee = Trainee(ctx, toy=toy)
    parts = dict(trainee.module.named_modules())
    [*parts.values()][-1].eval()  # one layer, as those who fine-tune do
    for buffer in trainee.module.buffers():
        buffer.fill_(ctx.rank)  # replicas' may differ
    for step in range(steps):
        if saves:
            trainee.save(directory, step=step)
        trainee.train()
    trainee.backward()
    if saves:
        trainee.save(directory, step=steps)
    modes = {f"mode: {name}": torch.tensor(part.training) for name, part in parts.items()}
    gradients = {f"gradient: {name}": p.grad for name, p in trainee.original.items()}
    return trainee.state() | modes | gradients


@clause(
    "checkpoint.save.changes-nothing",
    source="contract: independent; "
    "torch issue 164929: a cold AdamW's first step becomes its second",
)
@pytest.mark.parametrize("toy", ["ragged", "buffers"])
def test_saving_leaves_no_trace_in_training(world, toy):
    """A run that saves, also before its first step, MUST end like one that does not.

    Modes of layers, buffers and gradients of a step that is not finished are part of it.

    Asking PyTorch's `get_optimizer_state_dict` for the state of an optimizer that never stepped
    makes it step, and the count stays: the first real update is corrected like a second one.
    """
    saving = in_folder(world, trained, toy, 3, True, seed=5)
    silent = world.run(trained, "", toy, 3, False, seed=5)

    judge.tensors(saving, silent, quantity="state of the run that never saved")


def saved_again(ctx, directory):
    """What loads after the last of twelve saves of one step and some before, and what it was."""
    trainee = Trainee(ctx)
    found = []
    for number in range(12):
        trainee.train()
        trainee.save(directory, step=1)
        if 3 < number < 11:
            continue
        reading = Trainee(ctx, seed=8).read(directory, f"after save {number + 1} of one step")
        found.append((trainee.state(), reading))
    return found


@clause(
    "checkpoint.save.again-and-again",
    source="contract: replaces; a run that is restarted from an older step",
)
def test_a_step_may_be_saved_any_number_of_times(world):
    """Each save of a step MUST replace the one before, the third and the twelfth as well."""
    for found in in_folder(world, saved_again):
        for state, reading in found:
            durability.one_of([reading], {"the latest save": (1, state)})
