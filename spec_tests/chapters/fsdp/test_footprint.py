"""Footprint: what a rank holds are its shards, and full weights only while they are in use.

This is what sharding is for, and no number that a model computes depends on it: code that keeps
everything on every rank passes every comparison of losses. Bytes are counted from before the model
is built, as sums of named terms. See Zhao et al. 2023, sections 3.2.1 and 4.1.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import BOTH, FULLY_SHARD, finish, shard
from spec_tests.programs.laws import footprint, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=BOTH, level="correct")

MEMORY = "test_fully_shard_memory"
WIDTH = 72
UNIT = WIDTH * WIDTH * 4
"""Bytes of one layer's weight: 72 rows divide by two, three and four."""
ACTIVATIONS = 16 * WIDTH * 4
"""More than one layer keeps for backward."""


class Tower(nn.Module):
    """Layers of equal size, called with their input, with `input=` or by `checkpoint`."""

    def __init__(self, depth: int, by_keyword: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.by_keyword, self.recomputes = by_keyword, recomputes
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recomputes:
                x = checkpoint(layer, x, use_reentrant=False).abs()  # type: ignore[no-untyped-call]
            else:
                x = (layer(input=x) if self.by_keyword else layer(x)).abs()
        return x


def backward(ctx, subject, model):
    """Forward and backward of a tower."""
    model(torch.ones(2, WIDTH, device=ctx.device)).sum().backward()
    finish(ctx, subject, model)


def interrupted(ctx, model):
    """A backward in which the first layer raises, when later ones are being reduced."""

    def fail(*args):
        raise KeyError("planted")

    def fail_in_backward(module, args, output):
        output.register_hook(fail)

    handle = model.layers[0].register_forward_hook(fail_in_backward)
    with contextlib.suppress(KeyError):
        model(torch.ones(2, WIDTH, device=ctx.device)).sum().backward()
    handle.remove()
    model.zero_grad()


def footprints(
    ctx, subject, depth, reshard_after_forward=True, steps=2, discards=False, fails=False, **calls
):
    """Live bytes at each moment of life, and the peaks of forward and backward.

    "history" is the same over time, of every step.

    Args:
        discards: after each step all units are gathered for nothing.
        fails: before each step a backward is interrupted.
    """
    seen: Any = {}
    history = []

    def see(moment, size):
        seen[moment] = size
        history.append((moment, size))

    options = {} if subject == "fsdp" else {"reshard_after_forward": reshard_after_forward}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Tower(depth, **calls), **options)
        see("built", footprint.settled(recorder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for step in range(steps):
            if fails:
                interrupted(ctx, model)
            recorder.forget_peak()
            output = model(torch.ones(2, WIDTH, device=ctx.device))
            left = footprint.settled(recorder)
            see("peak of forward", recorder.log().peak_bytes)
            see("after forward", left)
            recorder.forget_peak()
            output.sum().backward()
            finish(ctx, subject, model)
            del output
            left = footprint.settled(recorder)
            see("peak of backward", recorder.log().peak_bytes)
            see("after backward", left)
            optimizer.step()
            optimizer.zero_grad()
            for layer in model.layers if discards else ():
                layer.unshard(async_op=True)
                layer.reshard()
            see(f"after step {step}", footprint.settled(recorder))
        with torch.no_grad():
            model(torch.ones(2, WIDTH, device=ctx.device))
        see("after evaluation", footprint.settled(recorder))
    return {**seen, "history": history}


def gradients_from_the_start(ranks, shards):
    """Bytes of gradients, no more than shards of them, that are there once a model is built."""
    return min(max(0, *(rank["built"] - shards for rank in ranks)), shards)


@clause(
    "fsdp.footprint.shards-alone-stay",
    level="course",
    source="contract: shards-only; "
    "Zhao et al. 2023, section 4.1; the CS336 tests, which code that shards nothing passes",
    worlds=(3, 4),
)
def test_between_steps_a_rank_holds_its_shards_and_no_more(world, subject):
    """Between steps a rank MUST hold its shards of weights and optimizer state, and no more.

    Code that replicates everything and averages gradients computes the same numbers. After an
    update one layer may be on its way to the next forward. Shards of gradients may be there from
    construction on: on two ranks these and the weights' are as large as the whole.
    """
    ranks = world.run(footprints, subject, 6)

    shards = 6 * UNIT // world.size
    own = {"shards": shards, "gradients": gradients_from_the_start(ranks, shards)}
    for moment, terms in (
        ("built", own),
        ("after step 1", {**own, "moments": 2 * shards, "gathered ahead": 3 * UNIT // 2}),
    ):
        footprint.at_most(
            [rank[moment] for rank in ranks],
            {**terms, "slack of half a layer": UNIT // 2},
            quantity=f"resident bytes, {moment},",
            likely="full weights, or optimizer state for them, are kept on every rank",
            given=f"six layers of {UNIT} bytes over {world.size} ranks",
            history=[rank["history"] for rank in ranks],
            moment=moment,
        )


@clause(
    "fsdp.footprint.freed-after-use",
    source="contract: freed; "
    f"{MEMORY}; Efficient DL week 5, task 1; CS336: free the gathered weights after use",
)
def test_full_weights_are_freed_after_forward_and_backward(world, subject):
    """Full weights MUST be freed after forward and after backward, unless they are to be kept.

    A forward without gradients frees them, too. Autograd holds views of them: dropping the
    wrapper's references frees nothing.
    """
    ranks = world.run(footprints, subject, 6)

    shards = 6 * UNIT // world.size
    state = {"shards": shards, "moments": 2 * shards, "slack of one layer": UNIT}
    kept = {**state, "gradients": gradients_from_the_start(ranks, shards)}
    for moment, terms in (
        ("after forward", {**kept, "activations": 6 * ACTIVATIONS}),
        ("after backward", {**state, "gradients": shards}),
        ("after evaluation", kept),
    ):
        footprint.at_most(
            [rank[moment] for rank in ranks],
            terms,
            quantity=f"live bytes {moment}",
            likely="full weights or full gradients are not freed; autograd holds views of them",
            given=f"six layers of {UNIT} bytes, after two steps",
            history=[rank["history"] for rank in ranks],
            moment=moment,
        )


FROZEN = {"above": slice(1, None), "below": slice(-1)}
"""Which layers: a backward passes through the first, and ends before it reaches the others."""


def around_a_trained_layer(ctx, subject, depth, where):
    """Live bytes after a backward of one trained layer among frozen ones, and kinds of parameters.

    What no backward reaches is kept after forward, where that can be said.
    """
    is_kept = subject == "fully_shard" and where == "below"
    options: dict[str, Any] = {"reshard_after_forward": False} if is_kept else {}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            tower = Tower(depth)
        tower.layers[FROZEN[where]].requires_grad_(False)
        model = shard(ctx, subject, tower, **options)
        for _ in range(2):
            model.zero_grad()
            backward(ctx, subject, model)
        return footprint.settled(recorder), {type(p).__name__ for p in model.parameters()}


@clause(
    "fsdp.footprint.frozen-is-freed",
    source="contract: freed, frozen; "
    "test_fully_shard_frozen; freeing hung on the gradient, which a frozen weight never has",
)
@pytest.mark.parametrize("where", FROZEN)
def test_frozen_weights_are_freed_after_backward(world, subject, where):
    """Frozen weights MUST be freed after backward, passed through or not, or be refused."""
    ranks = refusal.answer_or_refusal(
        world, around_a_trained_layer, subject, 6, where, ordinary=(footprints, subject, 6)
    )

    if ranks is not None:
        found, kinds = zip(*ranks, strict=True)
        if subject == "fully_shard":
            judge.equal(kinds, {"DTensor"}, quantity="kinds of parameters after backward")
        shards, slack = 6 * UNIT // world.size, 3 * UNIT // 2
        footprint.at_most(
            found,
            {"shards": shards, "gradient": UNIT // world.size, "slack of 1.5 layers": slack},
            quantity="live bytes after backward",
            likely="full weights, or frozen ones alone, are not freed, or shards are views of them",
            given=f"six layers of {UNIT} bytes, five frozen {where} the other",
        )


@clause(
    "fsdp.footprint.kept-on-request",
    level="production",
    judges=FULLY_SHARD,
    source="contract: as-pytorch; torch.distributed.fsdp.fully_shard, reshard_after_forward=False",
)
def test_full_weights_stay_where_that_was_asked_for(world, subject):
    """With reshard_after_forward=False, full weights MUST stay until their backward, not longer."""
    ranks = world.run(footprints, subject, 6, False)

    shards = 6 * UNIT // world.size
    for rank, seen in enumerate(ranks):
        kept = seen["after forward"] - 3 * shards
        judge.holds(
            kept >= 6 * UNIT,
            f"rank {rank}: expected full weights of {6 * UNIT} bytes after forward, got {kept} "
            "beyond shards and moments",
            likely="reshard_after_forward=False is not read: backward gathers again",
        )
    footprint.at_most(
        [rank["after backward"] for rank in ranks],
        {"shards": shards, "moments": 2 * shards, "gradients": shards, "slack of one layer": UNIT},
        quantity="live bytes after backward",
        likely="what forward kept is never freed",
        history=[rank["history"] for rank in ranks],
        moment="after backward",
    )


@clause(
    "fsdp.footprint.kept-in-part",
    judges=FULLY_SHARD,
    source="contract: partial-reshard; "
    "torch.distributed.fsdp.fully_shard, reshard_after_forward as an int",
    worlds=(4,),
)
def test_an_int_keeps_that_part_of_the_weights_after_forward(world, subject):
    """With reshard_after_forward=2, half of the full weights MUST stay, or 2 be refused.

    More is the memory that was to be saved. Less has backward gather from all ranks, across nodes.
    """
    ordinary = (footprints, subject, 6, True)
    ranks = refusal.answer_or_refusal(world, footprints, subject, 6, 2, ordinary=ordinary)
    if ranks is None:
        return

    given = f"six layers of {UNIT} bytes over {world.size} ranks, second step"
    footprint.at_most(
        [rank["after forward"] for rank in ranks],
        {
            "shards and moments": 3 * 6 * UNIT // world.size,
            "halves": 6 * UNIT // 2,
            "activations": 6 * ACTIVATIONS,
            "slack of half a layer": UNIT // 2,
        },
        quantity="live bytes after forward",
        likely="the int is taken for False, or each rank keeps the whole message",
        given=given,
        history=[rank["history"] for rank in ranks],
        moment="after forward",
    )
    for rank, seen in enumerate(ranks):
        kept = seen["after forward"] - 3 * 6 * UNIT // world.size
        judge.holds(
            # A layer's half may be put together from the shard and what is kept beside it.
            kept >= 6 * UNIT // 2 - 6 * UNIT // world.size,
            f"rank {rank}: expected halves of {6 * UNIT // 2} bytes after forward, got {kept} "
            "beyond shards and moments",
            likely="the int is taken for True: backward gathers from all ranks",
            given=given,
        )


@clause(
    "fsdp.footprint.peak-does-not-grow-with-depth",
    level="production",
    source="contract: flat-peak, fsdp/freed; " + MEMORY,
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_peak_above_the_shards_does_not_grow_with_depth(world, subject, phase):
    """Above shards, moments, gradients and activations, the peak MUST NOT grow with depth.

    A slope, not a level: how many layers are alive at once is the implementation's choice.
    """
    _peak_is_flat(world, subject, phase)


@clause(
    "fsdp.footprint.peak-of-calls-by-keyword",
    level="production",
    judges=FULLY_SHARD,
    source="contract: flat-peak; "
    f"{MEMORY}; a hook that looks at positional inputs alone sees none of `layer(input=x)`",
)
def test_the_peak_of_units_that_are_called_by_keyword_does_not_grow(world, subject):
    """Units that are called with keyword arguments MUST be reduced and freed one by one, too."""
    _peak_is_flat(world, subject, "backward", by_keyword=True)


@clause(
    "fsdp.footprint.peak-when-recomputed",
    level="production",
    judges=FULLY_SHARD,
    source="contract: recomputed-unit; "
    f"{MEMORY}; a forward that a backward repeats ends no pass and begins none",
)
def test_the_peak_of_units_that_are_recomputed_does_not_grow(world, subject):
    """With activation checkpointing units MUST be reduced and freed one by one, too."""
    _peak_is_flat(world, subject, "backward", recomputes=True)


def _peak_is_flat(world, subject, phase, **options):
    __tracebackhide__ = True
    above = []
    for depth in (4, 10):
        ranks = world.run(footprints, subject, depth, **options)
        shards = depth * UNIT // world.size
        gradients = shards if phase == "backward" else 0
        above.append([r[f"peak of {phase}"] - 3 * shards - gradients for r in ranks])

    for rank, (shallow, deep) in enumerate(zip(*above, strict=True)):
        slope = (deep - shallow) / 6 / UNIT
        allowed = 0.2 + ACTIVATIONS / UNIT
        judge.holds(
            slope <= allowed,
            f"rank {rank}: expected a peak of {phase} that grows by at most {allowed:.2f} layers "
            f"with each layer, got {slope:.2f} ({shallow} bytes at 4 layers, {deep} at 10)",
            likely="weights or gradients of all layers are alive at once before they are freed",
        )


def window(ctx, subject, depth):
    """Live bytes after two micro-batches that are not reduced, and after one that is."""
    seen = {}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Tower(depth))
        for moment in ("", "unreduced", "unreduced", "reduced"):
            model.set_requires_gradient_sync(moment != "unreduced")
            backward(ctx, subject, model)
            if not moment:
                model.zero_grad()
            seen[moment] = footprint.settled(recorder)
    return seen


@clause(
    "fsdp.footprint.window-costs-one-copy",
    level="production",
    judges=FULLY_SHARD,
    source="contract: unreduced; "
    f"{MEMORY}: unsharded gradients are kept between micro-batches, and freed when reduced",
    worlds=(2, 4),
)
def test_a_window_costs_one_copy_of_the_gradients_and_gives_it_back(world, subject):
    """Unreduced micro-batches MUST cost one full copy of the gradients; the reduction frees it."""
    ranks = world.run(window, subject, 6)

    shards = 6 * UNIT // world.size
    base = {"shards": shards, "slack of half a layer": UNIT // 2}
    for moment, terms in (
        ("unreduced", {**base, "full gradients": 6 * UNIT}),
        ("reduced", {**base, "gradients": shards}),
    ):
        footprint.at_most(
            [rank[moment] for rank in ranks],
            terms,
            quantity=f"live bytes after {moment} micro-batches",
            likely="every micro-batch, or the shard's gradient too, has memory of its own",
            given=f"six layers of {UNIT} bytes over {world.size} ranks",
        )
