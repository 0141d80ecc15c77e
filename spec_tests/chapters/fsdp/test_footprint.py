"""Footprint: what a rank holds are its shards, and full weights only while they are in use.

This is what sharding is for, and no number that a model computes depends on it: code that keeps
everything on every rank passes every comparison of losses. Bytes are counted from before the model
is built, as sums of named terms. See Zhao et al. 2023, sections 3.2.1 and 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import BOTH, FULLY_SHARD, finish, kinds_of, shard
from spec_tests.programs.laws import footprint, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=BOTH, level="correct")

MEMORY = "test_fully_shard_memory"
WIDTH = 72
UNIT = WIDTH * WIDTH * 4
"""Bytes of one layer's weight: 72 rows divide by two, three and four."""
ACTIVATIONS = 16 * WIDTH * 4
"""More than one layer keeps for backward."""


def _linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


class _TwoDtypes(nn.Sequential):
    """A third of a layer's bytes in float32, two thirds in float64."""

    def __init__(self) -> None:
        super().__init__(_linear(outputs=WIDTH // 3), _linear(inputs=WIDTH // 3).double())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](input).double()).to(input.dtype)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "one-weight": _linear,
    "two-weights": lambda: nn.Sequential(_linear(outputs=WIDTH // 2), _linear(inputs=WIDTH // 2)),
    "two-dtypes": _TwoDtypes,
}
"""How a layer comes to its bytes."""


class Tower(nn.Module):
    """Layers of equal size, called with their input, with `input=` or by `checkpoint`.

    Args:
        layer: a key of `LAYERS`.
    """

    def __init__(
        self,
        depth: int,
        by_keyword: bool = False,
        recomputes: bool = False,
        layer: str = "one-weight",
    ) -> None:
        super().__init__()
        self.by_keyword, self.recomputes = by_keyword, recomputes
        self.layers = nn.ModuleList(LAYERS[layer]() for _ in range(depth))

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


def footprints(ctx, subject, depth, reshard_after_forward=True, steps=2, **calls):
    """Live bytes at each moment of life, and the peaks of forward and backward.

    "history" is the same over time, of every step.
    """
    seen: Any = {"history": []}

    def see(moment, phase=""):
        found = {f"peak of {phase}": recorder.log().peak_bytes} if phase else {}
        found[moment] = footprint.settled(recorder)
        seen.update(found)
        seen["history"].extend(found.items())
        recorder.forget_peak()

    options = {} if subject == "fsdp" else {"reshard_after_forward": reshard_after_forward}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Tower(depth, **calls), **options)
        see("built")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for step in range(steps):
            recorder.forget_peak()
            output = model(torch.ones(2, WIDTH, device=ctx.device))
            see("after forward", "forward")
            output.sum().backward()
            finish(ctx, subject, model)
            del output
            see("after backward", "backward")
            optimizer.step()
            optimizer.zero_grad()
            see(f"after step {step}")
        with torch.no_grad():
            model(torch.ones(2, WIDTH, device=ctx.device))
        see("after evaluation")
    return seen


def judge_bytes(ranks, moment, *, likely, **terms):
    """At this moment no rank may hold more than the terms say; of six layers, if not otherwise."""
    __tracebackhide__ = True
    footprint.at_most(
        [rank[moment] for rank in ranks],
        {term.replace("_", " "): size for term, size in terms.items()},
        quantity=f"live bytes, {moment},",
        likely=likely,
        given=f"six layers of {UNIT} bytes over {len(ranks)} ranks",
        history=[rank["history"] for rank in ranks],
        moment=moment,
    )


def judge_kept(ranks, least, likely):
    """After forward each rank must hold so many bytes of full weights."""
    __tracebackhide__ = True
    for rank, seen in enumerate(ranks):
        kept = seen["after forward"] - 3 * 6 * UNIT // len(ranks)
        judge.holds(
            kept >= least,
            f"rank {rank}: expected full weights of {least} bytes after forward, got {kept} beyond "
            "shards and moments",
            likely=likely,
        )


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
    own |= {"slack_of_half_a_layer": UNIT // 2}
    likely = "full weights, or optimizer state for them, are kept on every rank"
    judge_bytes(ranks, "built", **own, likely=likely)
    later = {"moments": 2 * shards, "gathered_ahead": 3 * UNIT // 2}
    judge_bytes(ranks, "after step 1", **own, **later, likely=likely)


@clause(
    "fsdp.footprint.freed-after-use",
    source="contract: freed, mixed-dtypes; "
    f"{MEMORY}; Efficient DL week 5, task 1; CS336: free the gathered weights after use",
)
@pytest.mark.parametrize("layer", LAYERS)
def test_full_weights_are_freed_after_forward_and_backward(world, subject, layer):
    """Full weights MUST be freed after forward and after backward, unless they are to be kept.

    A forward without gradients frees them, too. Autograd holds views of them: dropping the
    wrapper's references frees nothing. A unit may have one weight or several; one of two dtypes may
    be refused.
    """
    if layer == "two-dtypes":
        ordinary = (footprints, subject, 6)
        ranks = refusal.answer_or_refusal(
            world, footprints, subject, 6, layer=layer, ordinary=ordinary
        )
        if ranks is None:
            return
    else:
        ranks = world.run(footprints, subject, 6, layer=layer)

    shards = 6 * UNIT // world.size
    state = {"shards": shards, "moments": 2 * shards, "slack_of_one_layer": UNIT}
    kept = {**state, "gradients": gradients_from_the_start(ranks, shards)}
    likely = "full weights or full gradients are not freed; autograd holds views of them"
    judge_bytes(ranks, "after forward", **kept, activations=6 * ACTIVATIONS, likely=likely)
    judge_bytes(ranks, "after backward", **state, gradients=shards, likely=likely)
    judge_bytes(ranks, "after evaluation", **kept, likely=likely)


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
        left = footprint.settled(recorder)
    return {"after backward": left, "history": [], "kinds": kinds_of(model)}


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
        if subject == "fully_shard":
            kinds = [rank["kinds"] for rank in ranks]
            judge.equal(kinds, ["DTensor"], quantity="kinds of parameters after backward")
        judge_bytes(
            ranks,
            "after backward",
            shards=6 * UNIT // world.size,
            gradient=UNIT // world.size,
            slack_of_a_layer_and_a_half=3 * UNIT // 2,
            likely="full weights, or frozen ones alone, are not freed, or shards are views of them",
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

    judge_kept(ranks, 6 * UNIT, "reshard_after_forward=False is not read: backward gathers again")
    shards = 6 * UNIT // world.size
    judge_bytes(
        ranks,
        "after backward",
        shards=shards,
        moments=2 * shards,
        gradients=shards,
        slack_of_one_layer=UNIT,
        likely="what forward kept is never freed",
    )


@clause(
    "fsdp.footprint.kept-in-part",
    judges=FULLY_SHARD,
    level="production",
    source="contract: kept-part, partial-reshard; "
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

    judge_bytes(
        ranks,
        "after forward",
        shards_and_moments=3 * 6 * UNIT // world.size,
        halves=6 * UNIT // 2,
        activations=6 * ACTIVATIONS,
        slack_of_half_a_layer=UNIT // 2,
        likely="the int is taken for False, or each rank keeps the whole message",
    )
    # A layer's half may be put together from the shard and what is kept beside it.
    halves = 6 * UNIT // 2 - 6 * UNIT // world.size
    judge_kept(ranks, halves, "the int is taken for True: backward gathers from all ranks")


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


flat = rows(clause, _peak_is_flat)

test_peak_does_not_grow_with_depth = flat(
    "fsdp.footprint.peak-does-not-grow-with-depth",
    "Above shards, moments, gradients and activations, the peak MUST NOT grow with depth.",
    # A slope, not a level: how many layers are alive at once is the implementation's choice.
    ["forward", "backward"],
    level="production",
    source="contract: flat-peak, fsdp/freed; " + MEMORY,
)

test_peak_of_calls_by_keyword = flat(
    "fsdp.footprint.peak-of-calls-by-keyword",
    "Units that are called with keyword arguments MUST be reduced and freed one by one, too.",
    "backward",
    by_keyword=True,
    level="production",
    judges=FULLY_SHARD,
    source="contract: flat-peak; "
    f"{MEMORY}; a hook that looks at positional inputs alone sees none of `layer(input=x)`",
)

test_peak_when_recomputed = flat(
    "fsdp.footprint.peak-when-recomputed",
    "With activation checkpointing units MUST be reduced and freed one by one, too.",
    "backward",
    recomputes=True,
    level="production",
    judges=FULLY_SHARD,
    source="contract: recomputed-unit; "
    f"{MEMORY}; a forward that a backward repeats ends no pass and begins none",
)


def window(ctx, subject, depth):
    """Live bytes after two micro-batches that are not reduced, and after one that is."""
    seen: Any = {"history": []}
    with ctx.recording() as recorder:
        with torch.device(ctx.device):
            model: Any = shard(ctx, subject, Tower(depth))
        for moment in ("", "unreduced", "unreduced", "reduced"):
            model.set_requires_gradient_sync(moment != "unreduced")
            backward(ctx, subject, model)
            if not moment:
                model.zero_grad()
            seen[moment] = footprint.settled(recorder)
            seen["history"].append((moment, seen[moment]))
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
    base = {"shards": shards, "slack_of_half_a_layer": UNIT // 2}
    likely = "every micro-batch, or the shard's gradient too, has memory of its own"
    judge_bytes(ranks, "unreduced", **base, full_gradients=6 * UNIT, likely=likely)
    judge_bytes(ranks, "reduced", **base, gradients=shards, likely=likely)
