"""Freshness: whatever happened before, a forward computes with the weights of now.

Full weights are copies, and a copy that is kept for speed can outlive what it was made of. The
loss still falls, only later and less: that is why nobody notices.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    RATE,
    SEED,
    Sharded,
    finish,
    gradients_after,
    shard,
)
from spec_tests.laws import programs, refusal
from spec_tests.rig import judge
from spec_tests.rig.judge.symptoms import Hint, gap
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=FULLY_SHARD, level="correct", worlds=(2, 3))

FRESH = "contract: after an update, the next forward uses current weights"
SETTINGS: dict[str, dict[str, Any]] = {
    "freed": {"reshard_after_forward": True},
    "default": {},
    "kept-after-forward": {"reshard_after_forward": False},
}


def _output(sharded):
    return {"output": sharded.wrapped(sharded.batch(9)).detach()}


def _judge_fresh(ranks, toy, steps, given):
    size = len(ranks)
    plain = TOYS[toy].build(7)
    old = plain(TOYS[toy].batch(7, rank=0, micro=9)).detach()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for micro in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            sum_of_squares(plain(TOYS[toy].batch(7, rank=rank, micro=micro))).backward()
        optimizer.step()
    with torch.no_grad():
        new = [{"output": plain(TOYS[toy].batch(7, rank=r, micro=9))} for r in range(size)]
    within = rounding(torch.float32, terms=12 * 4 * size, depth=4 * steps)
    moved = float(gap(old, new[0]["output"]).max())
    judge.holds(moved > 10 * within.bound(old), "the toy hardly moved: nothing to see")
    judge.tensors(
        ranks,
        new,
        quantity="output with the weights of now",
        within=within,
        hints=[
            Hint("the output of the weights before the update: a copy was kept", _old(toy, size))
        ],
        given=given,
    )


def _old(toy, size):
    plain = TOYS[toy].build(7)
    return [{"output": plain(TOYS[toy].batch(7, rank=r, micro=9)).detach()} for r in range(size)]


def after_steps(ctx, subject, toy, seed, setting):
    """Output after two steps."""
    sharded = Sharded(ctx, subject, toy, seed, **SETTINGS.get(setting, SETTINGS["default"]))
    if setting == "kept-after-backward":
        sharded.keep(True)
    for step in range(2):
        sharded.optimizer.zero_grad()
        sharded.backward(step)
        if setting == "by-hand":
            sharded.unshard_all()
        sharded.optimizer.step()
    return _output(sharded)


@clause("fsdp.lifecycle.fresh-after-step", source=FRESH)
@pytest.mark.parametrize("setting", [*SETTINGS, "kept-after-backward", "by-hand"])
def test_a_forward_after_a_step_uses_the_new_weights(world, subject, setting):
    """The forward after a step MUST use the new weights, whatever was kept unsharded before it."""
    ranks = world.run(after_steps, subject, "even", 7, setting)

    _judge_fresh(ranks, "even", 2, f"weights {setting}")


def after_evaluation_and_step(ctx, subject, toy, seed, setting, records=False):
    """Output after a step that an evaluation came before, whose graph may be recorded."""
    sharded = Sharded(ctx, subject, toy, seed, **SETTINGS[setting])
    sharded.backward(0)
    with torch.set_grad_enabled(records):
        _output(sharded)
    sharded.optimizer.step()
    return _output(sharded)


@clause("fsdp.lifecycle.fresh-after-evaluation", source=FRESH, worlds=(2,))
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_evaluation_before_a_step_leaves_nothing_stale(world, subject, setting):
    """After backward, evaluation, step: the next forward MUST use the new weights."""
    ranks = world.run(after_evaluation_and_step, subject, "even", 7, setting)

    _judge_fresh(ranks, "even", 1, f"weights {setting}, evaluation before the step")


@clause(
    "fsdp.lifecycle.fresh-after-evaluation-of-a-whole-model",
    judges=("fsdp",),
    source=FRESH,
    worlds=(2,),
)
@pytest.mark.parametrize("records", [False, True], ids=["no-grad", "without-backward"])
def test_an_evaluation_of_a_whole_model_before_a_step_leaves_nothing_stale(world, subject, records):
    """The whole-model shape MUST use the new weights after backward, evaluation and step."""
    ranks = world.run(after_evaluation_and_step, subject, "even", 7, "default", records)

    _judge_fresh(ranks, "even", 1, "evaluation before the step")


class Ladder(nn.Module):
    """Four layers that are the identity at first; a forward may leave some of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]  # a Linear's
        self.without: tuple[int, ...] = ()
        self.fails_before: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.fails_before:
                raise programs.PlantedError
            if number not in self.without:
                x = layer(x)
        return x


def after_leaving_out(ctx, subject, raises=""):
    """Output after a step, before which a forward left two layers out, or raised in one."""
    ladder = Ladder().to(ctx.device)
    model = shard(ctx, subject, ladder, "layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    x = torch.ones(1, 12, device=ctx.device)
    model(x).sum().backward()
    finish(ctx, subject, model)
    if raises == "within a layer":
        with programs.failing(ladder.layers[1]):
            model(x)
    elif raises == "between layers":
        ladder.fails_before = 1
        with contextlib.suppress(programs.PlantedError):
            model(x)
        ladder.fails_before = None
    else:
        ladder.without = (1, 2)
        with torch.no_grad():
            model(x)
        ladder.without = ()
    optimizer.step()
    return {"output": model(x).detach()}


@clause("fsdp.lifecycle.fresh-after-layers-left-out", judges=BOTH, source=FRESH)
def test_layers_that_a_forward_left_out_are_not_stale_after_a_step(world, subject):
    """After a forward that skipped layers, and a step, a forward MUST use all layers' new weights.

    What was gathered ahead for a layer that did not run lies ready, and is old after the step.
    """
    ranks = world.run(after_leaving_out, subject)

    _judge_ladder(ranks)


@clause("fsdp.lifecycle.fresh-after-exception-in-a-whole-model", judges=("fsdp",), source=FRESH)
@pytest.mark.parametrize("where", ["within a layer", "between layers"], ids=["within", "between"])
def test_no_layer_of_a_whole_model_is_stale_after_an_exception(world, subject, where):
    """After an exception in forward and a step, a whole model's forward MUST use the new weights.

    What was gathered, or is on its way, has no end of forward that would free it.
    """
    usual = (gradients_after, subject, "even", SEED, "backward 0")
    ranks = refusal.answer_or_refusal(world, after_leaving_out, subject, where, ordinary=usual)

    if ranks is not None:
        _judge_ladder(ranks)


def _judge_ladder(ranks):
    # Each weight is the identity less 2**-4 everywhere, so each layer takes 12/16 of its input.
    judge.tensors(
        ranks,
        {"output": torch.full((1, 12), 0.25**4)},
        quantity="output with the weights of now",
        hints=[
            Hint(
                f"{old} of four layers computed with the weights before the update",
                {"output": torch.full((1, 12), 0.25 ** (4 - old))},
            )
            for old in (1, 2, 3, 4)
        ],
    )


def after_writing(ctx, subject, toy, seed, how, setting):
    """Output with zeros written over the weights while full ones may be alive."""
    sharded = Sharded(ctx, subject, toy, seed, **SETTINGS[setting])
    with torch.no_grad():
        _output(sharded)
        if how == "load-state-dict":
            state = sharded.wrapped.state_dict()
            zeros = {name: torch.zeros_like(value) for name, value in state.items()}
            sharded.wrapped.load_state_dict(zeros)
        else:
            for parameter in sharded.held:
                if how == "parameter":
                    parameter.mul_(0.0)
                else:
                    parameter.to_local().zero_()
    return _output(sharded)


@clause(
    "fsdp.lifecycle.fresh-after-load",
    source=f"{FRESH}; a load, or an operation under no_grad on the Parameter or its local tensor",
    worlds=(2,),
)
@pytest.mark.parametrize(
    "how",
    ["load-state-dict", "parameter", "local-tensor"],
    ids=["loaded", "written-parameter", "written-local-tensor"],
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_forward_after_a_load_uses_the_loaded_weights(world, subject, setting, how):
    """The forward after weights were loaded or written in place MUST use them."""
    ranks = world.run(after_writing, subject, "even", 7, how, setting)

    zeros = {"output": torch.zeros_like(_old("even", 1)[0]["output"])}
    judge.tensors(
        ranks,
        zeros,
        quantity="output of weights that are all zero",
        hints=[Hint("the output of the weights before: a copy was kept", _old("even", world.size))],
        given=f"weights {setting}, written by {how}",
    )
