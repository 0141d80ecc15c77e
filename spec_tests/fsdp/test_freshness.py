"""Freshness: whatever happened before, a forward computes with the weights of now.

Full weights are copies, and a copy that is kept for speed can outlive what it was made of. The
loss still falls, only later and less: that is why nobody notices.
"""

from __future__ import annotations

import contextlib
from functools import partial
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
KEPT = "kept-after-backward"
FLAVOURS: dict[str, Any] = {
    f"{KEPT}-foreach": partial(torch.optim.SGD, lr=RATE, foreach=True),
    # The step of SGD: without moments, beside an eps that no gradient reaches. (DTensors take no
    # fused SGD.)
    f"{KEPT}-fused": partial(
        torch.optim.Adam, lr=RATE * 2.0**40, betas=(0.0, 0.0), eps=2.0**40, fused=True
    ),
}
"""Optimizers that move no version counter; the first parameter is in a group of its own."""


class Two:
    """Two optimizers, of weights and of biases, between whose steps something is done."""

    def __init__(self, params, between):
        foreach = partial(torch.optim.SGD, lr=RATE, foreach=True)
        self.both = [foreach([p for p in params if (p.dim() > 1) is of]) for of in (True, False)]
        self.between = between

    def zero_grad(self):
        """Of both."""
        for each in self.both:
            each.zero_grad()

    def step(self):
        """One, what is between, the other."""
        self.both[0].step()
        self.between()
        self.both[1].step()


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


def _old(toy, size, ones=()):
    plain = TOYS[toy].build(7)
    for name in ones:
        nn.init.ones_(plain.get_parameter(name))
    return [{"output": plain(TOYS[toy].batch(7, rank=r, micro=9)).detach()} for r in range(size)]


def after_steps(ctx, subject, toy, seed, setting):
    """Output after two steps."""
    sharded = Sharded(ctx, subject, toy, seed, **SETTINGS.get(setting, SETTINGS["default"]))
    sharded.keep(setting.startswith(KEPT))
    if setting in FLAVOURS:
        groups = [{"params": part} for part in (sharded.held[:1], sharded.held[1:])]
        sharded.optimizer = FLAVOURS[setting](groups)
    optimizer: Any = sharded.optimizer
    if setting == "by-hand-between-two":
        sharded.keep(True)
        optimizer = Two(sharded.held, sharded.unshard_all)
    for step in range(2):
        optimizer.zero_grad()
        sharded.backward(step)
        if setting == "by-hand":
            sharded.unshard_all()
        if setting == "in-flight":
            sharded.unshard_all(async_op=True)
        optimizer.step()
    return _output(sharded)


@clause("fsdp.lifecycle.fresh-after-step", source=FRESH)
@pytest.mark.parametrize("setting", [*SETTINGS, KEPT, *FLAVOURS, "by-hand", "by-hand-between-two"])
def test_a_forward_after_a_step_uses_the_new_weights(world, subject, setting):
    """The forward after a step MUST use the new weights, whatever was kept unsharded before it.

    Whoever reads version counters misses the foreach and fused updates, which move none.
    """
    ranks = world.run(after_steps, subject, "even", 7, setting)

    _judge_fresh(ranks, "even", 2, f"weights {setting}")


def after_anothers_step(ctx, subject):
    """Output of kept weights after one rank alone has updated a model of its own."""
    sharded = Sharded(ctx, subject, "even", reshard_after_forward=False)
    sharded.keep(True)
    sharded.backward(0)
    if ctx.rank == 0:
        probe = nn.Linear(2, 2)
        probe(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(probe.parameters(), lr=RATE).step()
    return _output(sharded)


@clause(
    "fsdp.lifecycle.anothers-step",
    source="contract: another model disturbs nothing; a probe that one rank trains for its log",
    worlds=(2,),
)
def test_a_step_of_another_model_makes_nothing_stale(world, subject):
    """An update of another model on one rank MUST change nothing, and leave no rank waiting."""
    ranks = world.run(after_anothers_step, subject)

    judge.tensors(ranks, _old("even", world.size), quantity="output")


@clause(
    "fsdp.lifecycle.fresh-after-gather-in-flight",
    level="production",
    source=FRESH + "; FSDPModule.unshard(async_op=True)",
    worlds=(2,),
)
def test_a_gather_that_began_before_a_step_is_not_used_after_it(world, subject):
    """What was gathered before a step MUST NOT be computed with after it, waited for or not."""
    ranks = world.run(after_steps, subject, "even", 7, "in-flight")

    _judge_fresh(ranks, "even", 2, "gathers in flight during the step")


def after_evaluation_and_step(ctx, subject, toy, seed, setting, records=False):
    """Output after a step that an evaluation came before, whose graph may be recorded."""
    options = {"reshard_after_forward": 2} if setting == "kept-in-part" else SETTINGS[setting]
    sharded = Sharded(ctx, subject, toy, seed, **options)
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
    "fsdp.lifecycle.fresh-after-evaluation-in-part",
    source=FRESH + "; fully_shard, reshard_after_forward as an int",
    worlds=(4,),
)
def test_a_part_that_a_forward_alone_kept_is_not_stale_after_a_step(world, subject):
    """What an int kept in a forward alone MUST NOT be used after a step, or it be refused."""
    body, ordinary = after_evaluation_and_step, (subject, "even", 7, "default")
    kept = (subject, "even", 7, "kept-in-part", True)
    ranks = refusal.answer_or_refusal(world, body, *kept, ordinary=(body, *ordinary))

    if ranks is not None:
        _judge_fresh(ranks, "even", 1, "half kept in a forward without backward")


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
    Layers that are not used may be refused.
    """
    usual = (gradients_after, subject, "even", SEED, "backward 0")
    ranks = refusal.answer_or_refusal(world, after_leaving_out, subject, ordinary=usual)

    if ranks is not None:
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
                f"{old} of four layers computed with older weights, or were not updated",
                {"output": torch.full((1, 12), 0.25 ** (4 - old))},
            )
            for old in (1, 2, 3, 4)
        ],
    )


UNSHARDED = "load-while-unsharded"
SECOND = "up.bias"  # of the two parameters of its unit
LOADS = ("load-state-dict", "load-state-dict-assign", "assign-in-parts", UNSHARDED)


def after_writing(ctx, subject, toy, seed, how, setting):
    """Output with ones written over the weights while full ones may be alive."""
    sharded = Sharded(ctx, subject, toy, seed, **SETTINGS.get(setting, {}))
    with torch.no_grad():
        if setting == KEPT:
            sharded.keep(True)
            with torch.enable_grad():
                sharded.backward()
        else:
            _output(sharded)
        if how in LOADS:
            state = sharded.wrapped.state_dict()
            ones = {name: torch.ones_like(value) for name, value in state.items()}
            if how == UNSHARDED:
                sharded.unshard_all()
            for part in [ones] if how != "assign-in-parts" else [{n: ones[n]} for n in ones]:
                sharded.wrapped.load_state_dict(part, assign="assign" in how, strict=part is ones)
            if how == "assign-in-parts":
                sharded.wrapped.state_dict()  # shows the shards: those that were loaded
        else:
            for name, parameter in zip(sharded.names, sharded.held, strict=True):
                if how == "local-tensor":
                    parameter.to_local().fill_(1.0)
                elif how == "parameter" or name == SECOND:
                    parameter.fill_(1.0)
    return _output(sharded)


@clause(
    "fsdp.lifecycle.fresh-after-load",
    source=f"{FRESH}; a load, or an operation under no_grad on the Parameter or its local tensor",
    worlds=(2,),
)
@pytest.mark.parametrize(
    "how",
    [*LOADS, "parameter", "local-tensor", SECOND],
    ids=[
        *("loaded", "assigned", "assigned-in-parts", "loaded-while-unsharded"),
        *("written-parameter", "written-local-tensor", "written-second-of-a-unit"),
    ],
)
@pytest.mark.parametrize("setting", [*SETTINGS, KEPT])
def test_a_forward_after_a_load_uses_the_loaded_weights(world, subject, setting, how):
    """The forward after weights were loaded or written in place MUST use them."""
    ranks = world.run(after_writing, subject, "even", 7, how, setting)

    written = [SECOND] if how == SECOND else None
    _judge_ones(ranks, f"weights {setting}, written by {how}", written)


def whole_after_writing(ctx, subject, toy, seed, moment):
    """Output of a whole model with ones written over its parameters after a call."""
    sharded = Sharded(ctx, subject, toy, seed)
    sharded.follow(moment)
    with torch.no_grad():
        for parameter in sharded.held:
            parameter.fill_(1.0)
    return _output(sharded)


@clause(
    "fsdp.lifecycle.fresh-after-writing-in-a-whole-model",
    judges=("fsdp",),
    source="contract: a forward computes with current weights; moving averages, initialisations",
    worlds=(2,),
)
@pytest.mark.parametrize("moment", ["evaluate 0", "backward 0"], ids=["evaluated", "trained"])
def test_a_forward_of_a_whole_model_uses_weights_that_were_written(world, subject, moment):
    """After its `parameters()` were written in place, a whole model's forward MUST use them."""
    _judge_ones(world.run(whole_after_writing, subject, "even", 7, moment), moment)


def _judge_ones(ranks, given, written=None):
    """The output is that of a model of which the parameters `written`, or all, are ones."""
    names = [name for name, _ in TOYS["even"].build(7).named_parameters()]
    old = _old("even", len(ranks))
    judge.tensors(
        ranks,
        _old("even", len(ranks), ones=names if written is None else written),
        quantity="output of weights that are one",
        hints=[Hint("the output of the weights before: a copy was kept", old)],
        given=given,
    )


def full_of_unsharded(ctx, subject, is_stepped):
    """Full parameters of what was unsharded by hand and then updated, and the shards' values."""
    sharded = Sharded(ctx, subject, "stack")
    before = sharded.full()
    sharded.backward(0)
    sharded.unshard_all()
    if is_stepped:
        sharded.optimizer.step()
    else:
        with torch.no_grad():
            for shard in sharded.held:
                shard.to_local().neg_()
    return sharded.full(), sharded.weights(), before


@clause(
    "fsdp.lifecycle.full-parameters-of-what-is-unsharded",
    level="production",
    source="contract: full_parameters; a copy that is registered is that of before the update",
    worlds=(2,),
)
@pytest.mark.parametrize("is_stepped", [True, False], ids=["step", "write"])
def test_full_parameters_of_what_is_unsharded_are_the_current_ones(world, subject, is_stepped):
    """After an update of what was unsharded by hand, full parameters MUST be the new ones."""
    found, shards, before = zip(*world.run(full_of_unsharded, subject, is_stepped), strict=True)

    stale = Hint("the value before the update: what was unsharded is returned", list(before))
    moved = any(not torch.equal(before[0][name], value) for name, value in shards[0].items())
    judge.holds(moved, "expected the update to change the shards, got the values from before")
    judge.tensors(found, shards[0], quantity="full parameter", hints=[stale])
