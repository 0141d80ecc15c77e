"""Clipping, and rates: the global norm of the mean gradient, once per step, for every strategy.

Source of the numbers: torch.nn.utils.clip_grad_norm_ on the whole gradient in one process.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.programs.scene import TRAINERS, Scene
from spec_tests.programs.trained import OnRank, follow, one_process
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=TRAINERS, level="correct", worlds=(2,))
holds = rows(clause, same_as_alone)
THREE = "train 1, train 2, train 3"
NORM = "torchtitan issue 2318; torch.nn.utils.clip_grad_norm_"

test_global_norm = holds(
    "trainer.clip.global-norm",
    "With `max_norm` a step MUST be that of the mean gradient, clipped by its global norm.",
    # The norm of a rank's own shards, or of its own gradients, gives another length.
    {toy: f"{toy} clipped: {THREE}" for toy in ("mlp", "ragged")},
    source="contract: clips-once; " + NORM,
    worlds=(2, 3),
)

test_once_per_step = holds(
    "trainer.clip.once-per-step",
    "With accumulation the sum MUST be clipped once, and not each micro-batch's part.",
    # Clipping each part changes the direction: small micro-batches weigh more than they should.
    f"mlp clipped of-three: {THREE}",
    source="contract: clips-once; " + NORM,
)

test_none_is_none = holds(
    "trainer.clip.none-is-none",
    "Without `max_norm` nothing MUST be clipped, however large a gradient is.",
    f"stack slow of-three: {THREE}",
    source="contract: no-clipping; DeepSpeed's gradient_clipping defaults to 1.0",
)


class Cracked(nn.Linear):
    """A layer; where it is broken its output is the same, and its last weight's gradient NaN."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + (0.0 * self.weight[-1, -1]).sqrt() if self.is_broken else out


def with_a_nan(ctx, subject, clipping, is_in_one_row):
    """Weights before and after a step in which rank 1 has a NaN, and the error if that raised."""

    def cracked():
        torch.manual_seed(7)
        return nn.Sequential(Cracked(6, 8), nn.Linear(8, 4))

    run = OnRank(ctx, subject, f"mlp {clipping}", module=cracked if is_in_one_row else None)
    before, batches = run.train("1"), run.batches(2)
    for layer in run.module.modules():
        if isinstance(layer, Cracked):
            layer.is_broken = ctx.rank == 1
    if ctx.rank == 1 and not is_in_one_row:
        batches[0]["x"][0, 0] = torch.nan
    with refusal.caught() as caught:
        run.trainer.step(batches)
    return before, before if caught["error"] else run.weights(), caught["error"]


def weights_with_a_nan(world, subject, clipping, is_in_one_row, given):
    """Weights before and after the step; None where all ranks raised."""
    __tracebackhide__ = True
    ranks = world.run(with_a_nan, subject, clipping, is_in_one_row)
    befores, afters, errors = zip(*ranks, strict=True)
    if any(errors):
        refusal.on_all_ranks(errors, given=given)
        return None
    return befores, afters


CLIPPING = pytest.mark.parametrize("clipping", ["unclipped", "clipped"])


@clause(
    "trainer.clip.not-finite-alike",
    source="contract: equal-ranks, not-finite; torchtitan pull request 2318; GradScaler",
)
@CLIPPING
def test_ranks_deal_alike_with_what_is_not_finite(world, subject, clipping):
    """Where one rank's gradient is NaN, all ranks MUST end with equal bits, or all raise."""
    found = weights_with_a_nan(world, subject, clipping, False, given="a NaN on rank 1")
    if found is not None:
        # A NaN equals nothing: its place is what is compared.
        finite = [{n: t.nan_to_num(nan=12345.0) for n, t in rank.items()} for rank in found[1]]
        judge.same_on_all_ranks(finite, quantity="weight", given="a NaN on rank 1")


@clause(
    "trainer.clip.not-finite-in-one-shard",
    level="production",
    source="contract: equal-ranks; each rank looks at its own shards: one skips the update",
)
@CLIPPING
def test_what_is_not_finite_in_one_shard_counts_for_all(world, subject, clipping):
    """Where one row of the gradient is NaN, all weights MUST be updated, or none, or all raise."""
    given = "a NaN in the gradient of one row, which one rank has"
    found = weights_with_a_nan(world, subject, clipping, True, given)
    for rank, (before, after) in enumerate(zip(*found, strict=True) if found else ()):
        changed = [int((after[name] != before[name]).sum()) for name in before]
        sizes = [weight.numel() for weight in before.values()]
        judge.holds(
            not any(changed) or changed == sizes,
            f"rank {rank}: expected all of {sum(sizes)} weights to change, or none, got "
            f"{sum(changed)} that did",
            likely="ranks decide by their own shards whether to skip the update",
            given=given,
        )


test_rate_takes_effect = holds(
    "trainer.rate.takes-effect",
    "After `set_lr` the next step MUST use the factor times the initial rate.",
    {
        optimizer: f"mlp {optimizer}: rate 0.5, train 1, rate 2, train 2, rate 0.5, train 3"
        for optimizer in ("sgd", "adamw")
    },
    source="contract: Trainer.set_lr/next-step; torch.optim.lr_scheduler.LambdaLR",
)

test_rate_every_group = holds(
    "trainer.rate.every-group",
    "`set_lr` MUST scale every group's own initial rate, also after a load.",
    {
        "steps": "mlp momentum two-groups: rate 0.5, train 1, rate 2, train 2, rate 0.5, train 3",
        # A saved rate has the factor of its time in it. The world model sets 1 after a load.
        "load": "mlp momentum two-groups: rate 0.5, train 1, save, load copied, train 2",
    },
    source="contract: Trainer.set_lr/every-group; torch.optim.lr_scheduler.LambdaLR",
)


def in_bfloat16(world, subject, words, program):
    """What calls show on each rank in bfloat16, and what they show in one process in float32."""
    scene = Scene.of(words)
    ranks = world.run(follow, subject, scene, program, dtype=torch.bfloat16)
    expected = one_process(scene, world.size, 0, ranks[0]["declares"]).follow(program)
    return [[found for _, found in each] for each in (*(r["seen"] for r in ranks), expected)]


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
    words = {"plain": "", "accumulated": " of-three", "clipped": " clipped"}[how]
    program = f"read, {THREE}"
    *ranks, expected = in_bfloat16(world, subject, f"shifted momentum{words}", program)
    bound = 16 * torch.finfo(torch.bfloat16).eps / 2
    for rank, seen in enumerate(ranks):
        for number, name in itertools.product((1, 2, 3), expected[0]):
            # From its own start, which may have been rounded.
            moved, wanted = (each[number][name] - each[0][name] for each in (seen, expected))
            error = float((moved - wanted).norm() / wanted.norm())
            judge.holds(
                error <= bound,
                f"rank {rank}, {name!r} after step {number}: expected a weight that moved as in "
                f"float32 within {bound:.2%} of the movement, got one that is {error:.2%} of it "
                "away",
                given=f"shifted momentum{words}: {program}",
            )


@clause(
    "trainer.precision.evaluates-current-weights",
    source="contract: Trainer.evaluate/current, bfloat16; torch.autocast keeps casts of weights",
)
def test_an_evaluation_in_bfloat16_has_the_current_weights(world, subject):
    """With bfloat16 an evaluation MUST compute with the current weights.

    Each step takes a third of the loss away: what was cast before it is easily told.
    """
    program = "train 1, evaluate 50, train 2, evaluate 50"
    *ranks, expected = in_bfloat16(world, subject, "mlp momentum", program)
    for number in (1, 3):
        found, wanted = (float(each[number]["loss"]) for each in (ranks[0], expected))
        judge.holds(
            abs(found - wanted) <= 0.2 * wanted,
            f"rank 0: expected a loss near {wanted:.2f}, as in float32, got {found:.2f}",
            likely="weights that were cast to bfloat16 before the last update are used again",
            given=f"mlp momentum: {program}",
        )


def loss_in_bfloat16(ctx, subject):
    """The loss of a step of a model that returns its input, 1 + 2**-10, if nothing is rounded."""

    def first_input():
        module = nn.Linear(6, 1, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.eye(1, 6))
        return module

    run = OnRank(ctx, subject, "mlp", module=first_input, dtype=torch.bfloat16)
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
    program = ", ".join(["read", *(f"train {number}" for number in range(24))])
    *ranks, expected = in_bfloat16(world, subject, "mlp slow", program)

    for rank, found in enumerate(ranks):
        kinds = {str(t.dtype) for t in found[-1].values()}
        judge.equal([kinds], {"torch.float32"}, quantity="dtypes of the full parameters")
        for name in expected[0]:
            seen, distance = (float((e[-1][name] - e[0][name]).norm()) for e in (found, expected))
            judge.holds(
                seen > 0.7 * distance,
                f"rank {rank}, {name!r}: expected a weight that moved by {distance:.2e} in 24 "
                f"steps, as in float32, got one that moved by {seen:.2e}",
                likely="weights are kept and updated in bfloat16, which rounds small updates off",
            )


LASTING = Scene.of("shifted lasting")


def coasted(run, steps):
    """How far the last step, without a gradient, moves each weight, if the first moves it by 1."""
    seen = [run.weights()]
    for number in range(steps):
        run.trainer.step([b | {"factor": 0.0 if number else 1.0} for b in run.batches(1)])
        if number in (0, steps - 2, steps - 1):
            seen.append(run.weights())
    _, first, before, last = seen
    return {n: float((last[n] - before[n]).norm() / (first[n] - seen[0][n]).norm()) for n in last}


def coasts(ctx, subject, steps):
    """The same on a rank, and what the trainer declares."""
    run = OnRank(ctx, subject, LASTING, dtype=torch.bfloat16)
    return coasted(run, steps), run.declares


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
    seen, declares = zip(*world.run(coasts, subject, steps), strict=True)
    expected = coasted(one_process(LASTING, world.size, 0, declares[0]), steps)
    undecayed = 0.999 ** (1 - steps)
    for rank, kept in enumerate(seen):
        for name, found in kept.items():
            wanted = expected[name]
            judge.holds(
                abs(found - wanted) < (undecayed - 1) / 2 * wanted,
                f"rank {rank}, {name!r}: expected that step {steps} moves it by {wanted:.4f} of "
                f"what step 1 did, as a momentum of 0.999 does in float32, got {found:.4f}",
                likely="the optimizer's state is kept in bfloat16, or cast to it on its way",
            )
