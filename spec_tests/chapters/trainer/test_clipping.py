"""Clipping, and rates: the global norm of the mean gradient, once per step, for every strategy.

Source of the numbers: torch.nn.utils.clip_grad_norm_ on the whole gradient in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.programs.laws import refusal
from spec_tests.programs.laws.task import (
    BUILDERS,
    Session,
    Setup,
    alone,
    in_ranks,
    matches,
    method,
    same_as_one_process,
    session,
    start,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=BUILDERS, level="correct", worlds=(2,))
THREE = (1, 2, 3)
NORM = "torchtitan issue 2318; torch.nn.utils.clip_grad_norm_"


@clause("trainer.clip.global-norm", source="contract: clips-once; " + NORM, worlds=(2, 3))
@pytest.mark.parametrize("toy", ["mlp", "ragged"])
def test_gradients_are_clipped_by_their_global_norm(world, subject, toy):
    """With `max_norm` a step MUST be that of the mean gradient, clipped by its global norm.

    The norm of a rank's own shards, or of its own gradients, gives another length.
    """
    setup = Setup(toy=toy, max_norm=0.25)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause("trainer.clip.once-per-step", source="contract: clips-once; " + NORM)
def test_accumulated_gradients_are_clipped_once(world, subject):
    """With accumulation the sum MUST be clipped once, and not each micro-batch's part.

    Clipping each part changes the direction: small micro-batches weigh more than they should.
    """
    setup = Setup(max_norm=0.25, accumulation=3)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause("trainer.clip.leaves-small-gradients", source="contract: clips-once; " + NORM)
def test_gradients_below_the_limit_are_left(world, subject):
    """A gradient whose norm is below `max_norm` MUST be left as it is."""
    setup = Setup(max_norm=1e4, optimizer="momentum")
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.clip.none-is-none",
    source="contract: no-clipping; DeepSpeed's gradient_clipping defaults to 1.0",
)
def test_without_max_norm_nothing_is_clipped(world, subject):
    """Without `max_norm` nothing MUST be clipped, however large a gradient is."""
    setup = Setup(loss_factor=64.0, optimizer="slow")
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause("trainer.clip.tied-counts-once", source="contract: clips-once, tied; " + NORM)
@pytest.mark.parametrize("toy", ["tied", "frozen"])
def test_a_tied_gradient_counts_once_in_the_norm(world, subject, toy):
    """In the norm a tied parameter's gradient MUST count once, and a frozen one's not at all."""
    setup = Setup(toy=toy, max_norm=0.25)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


def poisoned(ctx, subject, setup):
    """Weights after a step in which one rank's gradient is NaN; the error, if that raised."""
    run = session(ctx, subject, setup)
    run.step(1)
    with refusal.caught() as error:
        run.trainer.step(run.micro_batches(2))
    found = {}
    if not error["error"]:
        run.note("after the step that was not finite")
        found = run.seen
    return {"seen": found, "error": error["error"]}


@clause(
    "trainer.clip.not-finite-alike",
    source="contract: equal-ranks, not-finite; torchtitan pull request 2318; GradScaler",
)
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["off", "clipped"])
def test_ranks_deal_alike_with_what_is_not_finite(world, subject, max_norm):
    """Where one rank's gradient is NaN, all ranks MUST end with equal bits, or all raise."""
    ranks = world.run(poisoned, subject, Setup(poisoned=2, max_norm=max_norm))

    errors = [rank["error"] for rank in ranks]
    if any(errors):
        refusal.on_all_ranks(errors, given="a NaN on rank 1")
        return
    # A NaN equals nothing: its place is what is compared.
    finite = [{n: t.nan_to_num(nan=12345.0) for n, t in rank["seen"].items()} for rank in ranks]
    judge.same_on_all_ranks(finite, quantity="weight", given="a NaN on rank 1")


class Cracked(nn.Linear):
    """A layer; where it is broken its output is the same, and its last weight's gradient NaN."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + (0.0 * self.weight[-1, -1]).sqrt() if self.is_broken else out


def cracked(setup: Setup) -> nn.Sequential:
    """Two layers, of which the first may break."""
    torch.manual_seed(setup.seed)
    return nn.Sequential(Cracked(6, 8), nn.Linear(8, 4))


def broken_in_one_row(ctx, subject, setup):
    """How many weights a step changed in which one row's gradient is NaN; the error, if any."""
    module = cracked(setup)
    layer = module[0]
    run = session(ctx, subject, setup, module=module)
    run.step(1)
    before = run.weights()
    layer.is_broken = ctx.rank == 1
    with refusal.caught() as error:
        run.trainer.step(run.micro_batches(2))
    after = before if error["error"] else run.weights()
    changed = {name: int((after[name] != before[name]).sum()) for name in before}
    return {"changed": changed, "error": error["error"]}


@clause(
    "trainer.clip.not-finite-in-one-shard",
    level="production",
    source="contract: equal-ranks; each rank looks at its own shards: one skips the update",
)
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["off", "clipped"])
def test_what_is_not_finite_in_one_shard_counts_for_all(world, subject, max_norm):
    """Where one row of the gradient is NaN, all weights MUST be updated, or none, or all raise."""
    setup = Setup(max_norm=max_norm)
    ranks = world.run(broken_in_one_row, subject, setup)

    errors = [rank["error"] for rank in ranks]
    if any(errors):
        refusal.on_all_ranks(errors, given="a NaN in one row of one weight")
        return
    sizes = {name: p.numel() for name, p in cracked(setup).named_parameters()}
    for rank, seen in enumerate(ranks):
        changed = [seen["changed"].get(name, 0) for name in sizes]
        judge.holds(
            not any(changed) or changed == [*sizes.values()],
            f"rank {rank}: expected all of {sum(sizes.values())} weights to change, or none, got "
            f"{sum(changed)} that did",
            likely="ranks decide by their own shards whether to skip the update",
            given="a NaN in the gradient of one row, which one rank has",
        )


def with_rates(run, factors):
    """Weights of a run whose rates change before every step."""
    set_lr = method(run.trainer, "set_lr")
    for number, factor in enumerate(factors, 1):
        set_lr(factor)
        run.step(number)


@clause(
    "trainer.rate.takes-effect",
    source="contract: Trainer.set_lr/next-step; torch.optim.lr_scheduler.LambdaLR",
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_new_rate_is_that_of_the_next_step(world, subject, optimizer):
    """After `set_lr` the next step MUST use the factor times the initial rate."""
    same_as_one_process(world, subject, with_rates, Setup(optimizer=optimizer), (0.5, 1.0, 0.125))


@clause(
    "trainer.rate.every-group",
    source="contract: Trainer.set_lr/every-group; torch.optim.lr_scheduler.LambdaLR",
)
def test_every_group_gets_its_rate(world, subject):
    """`set_lr` MUST scale every group's own initial rate."""
    setup = Setup(optimizer="momentum", splits=True)
    same_as_one_process(world, subject, with_rates, setup, (0.5, 2.0, 0.25))


@clause(
    "trainer.rate.zero-keeps-weights",
    source="contract: Trainer.set_lr/next-step; warm-up that begins at zero",
)
def test_a_rate_of_zero_keeps_weights(world, subject):
    """With a factor of zero a step MUST leave every weight as it was, and count its momentum."""
    setup = Setup(optimizer="momentum")
    ranks = world.run(in_ranks, subject, with_rates, setup, (0.0, 1.0, 0.0))

    seen = [rank["seen"] for rank in ranks]
    options = {"ranks": range(world.size), "declares": ranks[0]["declares"]}
    matches(seen, with_rates, setup, (0.0, 1.0, 0.0), **options)
    before = {**start(setup, seen[0]), **{n: t for n, t in seen[0].items() if "step 2" in n}}
    kept = {n: before[n.replace("step 3", "step 2")] for n in seen[0] if "step 2" not in n}
    judge.tensors(
        [{name: rank[name] for name in kept} for rank in seen],
        kept,
        quantity="weight of before a step with a rate of zero",
    )


def small_steps(run, number):
    """Weights after many steps, each below bfloat16's resolution."""
    for each in range(number):
        run.trainer.step(run.micro_batches(each))
    run.note(f"after {number} steps")


def moves(run, numbers):
    """Weights before the first step, and after each."""
    run.note("before")
    run.steps(*numbers)


def movements(seen):
    """How far each weight has moved since the beginning."""
    begun = {key.partition(" ")[0]: t for key, t in seen.items() if key.endswith(" before")}
    return {k: t - begun[k.partition(" ")[0]] for k, t in seen.items() if "after" in k}


@clause(
    "trainer.precision.near-float32",
    source="contract: bfloat16; DeepSpeed bf16, torch FSDP2 mp_policy",
)
@pytest.mark.parametrize("how", ["plain", "accumulated", "clipped"])
def test_bfloat16_trains_near_float32(world, subject, how):
    """With bfloat16 the weights MUST move as in float32, within a few of its roundings.

    Each step's gradient is off by some of bfloat16's roundings, 2**-8, and so is what a weight has
    moved by; a wrong factor of some per cent is more. The model is linear: no kink amplifies them.
    """
    options: dict[str, Any] = {"accumulated": {"accumulation": 3}, "clipped": {"max_norm": 0.25}}
    setup = Setup("shifted", "momentum", dtype=torch.bfloat16, **options.get(how, {}))
    ranks = world.run(in_ranks, subject, moves, setup, THREE)

    declares = ranks[0]["declares"]
    expected = movements(alone(moves, setup, THREE, ranks=range(world.size), declares=declares))
    bound = 16 * torch.finfo(torch.bfloat16).eps / 2
    for rank, found in enumerate(ranks):
        # From its own start, which may have been rounded.
        seen = movements(found["seen"])
        for name, wanted in expected.items():
            error = float((seen[name] - wanted).norm() / wanted.norm())
            judge.holds(
                error <= bound,
                f"rank {rank}, {name!r}: expected a weight that moved as in float32 within "
                f"{bound:.2%} of the movement, got one that is {error:.2%} of it away",
                given=str(setup),
            )


def loss_in_bfloat16(ctx, subject):
    """The loss of a step of a model that returns its input, 1 + 2**-10, if nothing is rounded."""
    module = nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(1, 6))
    run = session(ctx, subject, Setup(dtype=torch.bfloat16), module=module)
    batch = {**run.batch(ctx.rank, 1), "x": torch.full((4, 6), 1 + 2.0**-10, device=ctx.device)}
    found = run.trainer.step([batch])
    if found is None:
        raise NotImplementedError("step() returns no loss")
    return float(found)


@clause(
    "trainer.precision.computes-in-dtype",
    level="production",
    source="contract: products; torch.autocast",
)
def test_a_forward_computes_in_the_dtype_that_was_asked_for(world, subject):
    """With bfloat16 a forward MUST compute products of bfloat16's rounding.

    Float32 in its place is right, and costs twice the memory and time.
    """
    for rank, found in enumerate(world.run(loss_in_bfloat16, subject)):
        judge.holds(
            abs(found - 1.0) < 2.0**-11,
            f"rank {rank}: expected a loss of 1: bfloat16 rounds 1 + 2**-10 to 1; got {found}",
            likely="`dtype` is not passed on: the forward computes in float32",
        )


@clause(
    "trainer.precision.small-updates",
    source="contract: float32-state; Micikevicius et al. 2018, section 3.1",
)
def test_small_updates_are_not_lost(world, subject):
    """With bfloat16 updates below its resolution MUST add up: weights are kept in float32.

    bfloat16 has eight bits: a weight of 0.5 does not feel an update of less than 0.001.
    """
    ranks = world.run(moved, subject, Setup(dtype=torch.bfloat16, optimizer="slow"), 24)

    for rank, (before, after, kinds) in enumerate(ranks):
        wanted = moved_alone(24)
        judge.equal([kinds], ["torch.float32"], quantity="dtypes of the full parameters")
        for name, distance in wanted.items():
            seen = float((after[name] - before[name]).norm())
            judge.holds(
                seen > 0.7 * distance,
                f"rank {rank}, {name!r}: expected a weight that moved by {distance:.2e} in 24 "
                f"steps, as in float32, got one that moved by {seen:.2e}",
                likely="weights are kept and updated in bfloat16, which rounds small updates off",
            )


def moved(ctx, subject, setup, number):
    """Weights before and after many small steps, and their dtypes."""
    run = session(ctx, subject, setup)
    before = run.weights()
    small_steps(run, number)
    after = run.weights()
    return before, after, [*{str(t.dtype) for t in after.values()}]


def moved_alone(number):
    """How far float32 moves each weight."""
    setup = Setup(optimizer="slow")
    after = alone(small_steps, setup, number, ranks=range(2))
    start = dict(setup.module().named_parameters())
    return {
        key.partition(" ")[0]: float((tensor - start[key.partition(" ")[0]].detach()).norm())
        for key, tensor in after.items()
    }


def coasts(ctx, subject, steps):
    """How far a step with a gradient moves each weight, and the last of those without one."""
    run = session(ctx, subject, Setup("shifted", "lasting", dtype=torch.bfloat16))
    seen = [run.weights()]
    for number in range(steps):
        batch = {**run.batch(ctx.rank, 1), "factor": 0.0 if number else 1.0}
        run.trainer.step([batch])
        if number in (0, steps - 2, steps - 1):
            seen.append(run.weights())
    _, first, before, last = seen
    return {n: float((last[n] - before[n]).norm() / (first[n] - seen[0][n]).norm()) for n in last}


@clause(
    "trainer.precision.lasting-momentum",
    source="contract: float32-state; Micikevicius et al. 2018, section 3.1",
)
def test_a_momentum_that_decays_slowly_is_not_rounded(world, subject):
    """With bfloat16 the optimizer's state MUST be kept in float32.

    After one step with a gradient come 40 without: a momentum of 0.999 has decayed by 4 % then.
    bfloat16 cannot tell 0.999 of a number from the number: it would not decay at all.
    """
    steps = 41
    wanted = 0.999 ** (steps - 1)
    for rank, kept in enumerate(world.run(coasts, subject, steps)):
        for name, found in kept.items():
            judge.holds(
                abs(found - wanted) < (1 - wanted) / 2,
                f"rank {rank}, {name!r}: expected that step {steps} moves it by {wanted:.3f} of "
                f"what step 1 did, as a momentum of 0.999 does in float32, got {found:.3f}",
                likely="the optimizer's state is kept in bfloat16, or cast to it on its way",
            )
