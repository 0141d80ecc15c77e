"""Backward: each rank gets its rows of the mean gradient, whatever the graph looks like.

Reduction hangs on hooks, and hooks fire where autograd takes them: not for an embedding, whose
input has no gradient; twice for a module that is used twice; never for a branch that was not taken,
for what is frozen in this step, or for what other ranks use.
Arithmetic is exact throughout, so that every right implementation is bit-equal to one process with
the whole batch. See Zhao et al. 2023, section 3.2.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.programs.law import same_as_alone
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.toys import with_smallest_gradient

clause = clauses(judges=sharded.FULLY_SHARD, level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)

PAPER = "Zhao et al. 2023, section 3.2"
TRAINING = "test_fully_shard_training"

test_mean_gradient = holds(
    "fsdp.backward.mean-gradient",
    "A step MUST use the mean over ranks of the local gradients, in every row.",
    # Not the sum, not the local one, not the mean divided once more.
    "even: backward 0",
    level="course",
    judges=sharded.BOTH,
    source="contract: mean-gradient; " + PAPER,
    worlds=(2, 3, 4),
)

test_zero_grad_modes = holds(
    "fsdp.backward.zero-grad-modes",
    "After either way of `zero_grad` a step MUST use the mean gradient of the new batch alone.",
    # A gradient of zeros has the shape of the shard: autograd cannot add a full one to it. The
    # whole-model shape may be an error there.
    {f"to-{how}": f"even: backward 0, zero_grad {how}, backward 1" for how in ("none", "zero")}
    | {"to-zero-without-rows": "stack: backward 0, zero_grad zero, backward 1"},
    judges=sharded.BOTH,
    source="contract: mean-gradient, zeroed; torch.optim.Optimizer.zero_grad",
)

test_mean_gradient_of_any_model = holds(
    "fsdp.backward.mean-gradient-of-any-model",
    "Odd sizes, ties, reuse, frozen or unused layers MUST get mean gradients, or be refused.",
    # Also in a world of one, where FSDP2 lost the gradient of a single row (pytorch issue 144045).
    {
        toy: f"{toy}: backward 0"
        for toy in ("ragged", "stack", "tied", "reused", "reordered", "two-dtypes", "unused")
    }
    | {"frozen": "ragged not-the-middle: backward 0"},
    judges=sharded.BOTH,
    source="contract: mean-gradient, mixed-dtypes, tied, reused, frozen, fsdp/unused; " + PAPER,
    worlds=(1, 2, 3),
)

test_frozen_for_a_step = holds(
    "fsdp.backward.frozen-for-a-step",
    "What is frozen after a step MUST keep `grad is None`, and get the mean again once thawed.",
    # Full parameters of the first step go on to require gradients, if nobody tells them.
    "stack nested: backward 0, freeze 1, freeze 2, zero_grad none, backward 1, thaw 1, thaw 2, "
    "zero_grad none, backward 2",
    source="contract: freezing, frozen-none; "
    "torch.Tensor.requires_grad_ on parameters: layers that are frozen or thawed in turn",
)


def layers(is_in_place):
    """Two layers with an activation after the first."""
    parts = nn.Linear(6, 12), nn.ReLU(inplace=is_in_place), nn.Linear(12, 12)
    return sharded.of_integers(nn.Sequential(*parts))


@clause(
    "fsdp.backward.inputs-keep-their-gradient",
    judges=sharded.BOTH,
    source="contract: mean-gradient; "
    f"{PAPER}: parameters are averaged, activations are this rank's own",
)
def test_gradients_of_inputs_are_not_averaged(world, subject):
    """The gradient of a rank's inputs MUST be its own, neither averaged nor divided."""
    own = sharded.Own(partial(layers, False), tracks_input=True)
    sharded.steps_as_alone(world, subject, own, shown=("input",))


test_unused_unit = holds(
    "fsdp.backward.unused-unit",
    "A unit left out on all ranks MUST keep None and disturb no gradient, then or used again.",
    # So must what is left out of a unit that is used.
    {
        f"{case}-{units}": f"branches-in-turn {units}: " + ", zero_grad none, ".join(steps)
        for units in ("layers", "root")
        for case, steps in {
            "later": ("backward 1", "backward 0", "backward 3"),
            "less": ("backward 0", "backward 1", "backward 2"),
        }.items()
    },
    source=f"contract: unused-none; {TRAINING}: unused modules",
    worlds=(2,),
)


@clause(
    "fsdp.backward.in-place-after-a-layer",
    judges=sharded.BOTH,
    source="contract: mean-gradient; "
    "torch.nn.ReLU, inplace=True; what a custom autograd function gives back is a view",
    worlds=(2,),
)
def test_the_output_of_a_sharded_layer_may_be_changed_in_place(world, subject):
    """Where outputs of sharded layers are changed in place, a step MUST use the mean gradient."""
    sharded.steps_as_alone(world, subject, sharded.Own(partial(layers, True)))


def entangled(ctx, subject, scene, *backwards):
    """Gradients after two forwards and their backwards, in this order."""
    rank = sharded.on_rank(ctx, subject, scene)
    losses = {micro: rank.loss(micro) for micro in ("0", "1")}
    for micro in backwards:
        losses[micro].backward()
    return rank.gradients()


@clause(
    "fsdp.backward.forwards-and-backwards-entangled",
    source=f"contract: as-pytorch; {TRAINING}: several forwards, 1F1B; retain_graph",
    worlds=(2,),
)
@pytest.mark.parametrize("how", ["one-backward", "in-order", "in-reverse", "retained"])
def test_several_forwards_may_wait_for_their_backward(world, subject, how):
    """Gradients MUST add up over forwards that precede a backward, and over repeated backwards."""
    if how in ("one-backward", "retained"):
        calls = "both 0 1" if how == "one-backward" else "twice 0"
        same_as_alone(world, subject, f"stack nested: {calls}")
        return
    one, other = ("0", "1") if how == "in-order" else ("1", "0")
    situation = f"stack nested: accumulate {one}, backward {other}"
    sharded.gradients_as_after(world, subject, situation, entangled, one, other)


test_activation_checkpointing = holds(
    "fsdp.backward.activation-checkpointing",
    "Units recomputed in backward MUST get the same gradients as without recomputation.",
    # A recomputation ends like a forward; freed there, weights are gone when backward needs them.
    {
        f"{how}-{case}": f"stack layers {word} {how}: backward 0"
        for how in ("called-again", "called-again-reentrant")
        for case, word in {"usual": "", "freed": "freed", "held": "held"}.items()
    },
    source=f"contract: as-pytorch; {TRAINING}: activation checkpointing",
    worlds=(2,),
)

test_gradients_are_shards = holds(
    "fsdp.backward.gradients-are-shards",
    "A gradient MUST have its parameter's placements, shape and dtype, also on ranks without rows.",
    # None where a rank has no rows, and its peers wait for it in the next clipping.
    {toy: f"{toy}: backward 0" for toy in ("ragged", "two-dtypes")},
    looks=("form",),
    source="contract: dtensors, MixedPrecisionPolicy/others-keep-dtype; "
    "test_fully_shard_init, check_sharded_parity; an optimizer steps over shards",
    worlds=(2, 4),
)

FREEZING = "freeze 1, freeze 2, zero_grad none, backward 1"
THAWING = "thaw 1, thaw 2, zero_grad none, backward 2"
KEPT = {
    # Nothing is updated, so that full weights from before stay current.
    "backward": f"keep True, backward 0, {FREEZING}, {THAWING}",
    "evaluation": f"evaluate 5, backward 0, evaluate 5, {FREEZING}, evaluate 5, {THAWING}",
}

test_frozen_while_kept = holds(
    "fsdp.backward.frozen-while-kept",
    "Freezing and thawing MUST count at the next forward, also where full weights are kept.",
    {how: f"stack nested: {program}" for how, program in KEPT.items()},
    source="contract: freezing; full weights that outlive their pass",
)


class Branches(nn.Module):
    """Layers of one shape in one unit; `used` says which of them a forward calls.

    A layer with a "-" before its name is not called: its parameters get a gradient of -0.0. With a
    "~" they get the smallest negative number, of which a mean over ranks is -0.0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, used: tuple[str, ...]) -> torch.Tensor:
        for name in used:
            layer = self.get_submodule(name.strip("-~"))
            if name.startswith("-"):
                x = x + sum(-0.0 * p.sum() for p in layer.parameters())
            elif name.startswith("~"):
                x = x + sum(0.0 * with_smallest_gradient(p).sum() for p in layer.parameters())
            else:
                x = layer(x)
        return 1 * x


def used_by(rank: int, case: str) -> tuple[str, ...]:
    """What a rank uses: a layer that others do not, one more than they, or none of all."""
    if case.endswith("negative-zero"):
        sign = "~" if case.startswith("underflow") else "-"
        return ("both",) if rank else ("both", f"{sign}first")
    if case == "one-each":
        return ("both", "second" if rank else "first")
    if case == "none":
        return () if rank else ("both", "first")
    return ("both",) if rank else ("both", "first")


def numbered(rank: int) -> torch.Tensor:
    """The inputs of a rank: integers, of which the first is its number."""
    return torch.arange(8.0).view(2, 4) % 3 + rank


def use_own(case, model, x):
    """The output where each rank uses its own layers."""
    return {"output": model(x, used_by(int(x[0, 0]), case) if case else ("both",))}


def branches():
    """The model, of integers."""
    return sharded.of_integers(Branches())


def branched(case):
    """A model of one unit, which every rank calls, each its own layers in it."""
    return sharded.Own(branches, partial(use_own, case), numbered, units="root", tracks_input=True)


@clause(
    "fsdp.backward.unused-on-some-ranks",
    level="production",
    source="contract: unused-somewhere; "
    "torch.distributed.fsdp, set_reduce_scatter_unused_params; a gate, an expert, a head",
)
@pytest.mark.parametrize(
    "case", ["one-each", "one-more", "none", "negative-zero", "underflow-to-negative-zero"]
)
def test_what_some_ranks_do_not_use_is_averaged_with_zero(world, subject, case):
    """In a unit that all ranks call, a parameter that some use MUST get the mean, or an error.

    The absent count as zero. Messages that hold what this rank used, and no more, meet others of
    another meaning, or of another size. A gradient of -0.0 is a gradient, also where only the
    division of the sum made it -0.0: an optimizer with weight decay updates what has one, and must
    do so on all ranks or on none.
    """
    sharded.steps_as_alone(world, subject, branched(case), usual=branched(""), given=case)
