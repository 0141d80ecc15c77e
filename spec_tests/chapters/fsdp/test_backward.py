"""Backward: each rank gets its rows of the mean gradient, whatever the graph looks like.

Reduction hangs on hooks, and hooks fire where autograd takes them: not for an embedding, whose
input has no gradient; twice for a module that is used twice; never for a branch that was not taken.
Arithmetic is exact throughout, so that every right implementation is bit-equal to one process with
the whole batch. See Zhao et al. 2023, section 3.2.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    Sharded,
    about,
    divisible,
    finish,
    full_parameters,
    gradients_after,
    mean_gradients,
    of_integers,
    says_the_same,
    shard,
)
from spec_tests.programs.laws import equivalence, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.toys import TOYS, sum_of_squares

clause = clauses(judges=FULLY_SHARD, level="correct", worlds=(2, 3))

PAPER = "Zhao et al. 2023, section 3.2"
TRAINING = "test_fully_shard_training"


@clause(
    "fsdp.backward.mean-gradient",
    level="course",
    judges=BOTH,
    source="contract: mean-gradient; " + PAPER,
    worlds=(2, 3, 4),
)
def test_a_step_uses_the_mean_gradient(world, subject):
    """A step MUST use the mean over ranks of the local gradients, in every row.

    Not the sum, not the local one, not the mean divided once more.
    """
    mean_gradients(world, subject, "even", "backward 0")


@clause(
    "fsdp.backward.zero-grad-modes",
    judges=BOTH,
    source="contract: mean-gradient, zeroed; torch.optim.Optimizer.zero_grad",
)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
def test_either_way_of_zero_grad_clears_what_was_reduced(world, subject, set_to_none):
    """After either way of `zero_grad` a step MUST use the mean gradient of the new batch alone.

    A gradient of zeros has the shape of the shard: autograd cannot add a full one to it. The
    whole-model shape may be an error there.
    """
    calls = f"backward 0, zero_grad {set_to_none}, backward 1"
    may_refuse = subject == "fsdp" and not set_to_none
    toy = divisible(subject, "stack")
    mean_gradients(world, subject, toy, calls, may_refuse=may_refuse, ordinary="backward 0")


@clause(
    "fsdp.backward.mean-gradient-of-any-model",
    judges=BOTH,
    source="contract: mean-gradient, mixed-dtypes, tied, reused, frozen; " + PAPER,
    worlds=(1, 2, 3),
)
@pytest.mark.parametrize(
    "toy", ["ragged", "stack", "tied", "reused", "reordered", "frozen", "mixed", "unused"]
)
def test_a_step_uses_the_mean_gradient_of_any_model(world, subject, toy):
    """Odd sizes, ties, reuse, frozen or unused layers MUST get mean gradients, or be refused.

    In a world of one as well: there FSDP2 once lost the gradient of a single row (pytorch issue
    144045).
    """
    usual = (gradients_after, subject, "even", SEED, "backward 0")
    ranks = refusal.answer_or_refusal(
        world, gradients_after, subject, toy, SEED, "backward 0", ordinary=usual
    )

    if ranks is not None:
        if subject == "fsdp":  # whose optimizer may see float32, whatever the weights were
            built = oracle.parameters(toy, SEED)
            for rank in ranks:
                rank |= {name: g.to(built[name].dtype) for name, g in rank.items()}
        equivalence.mean_gradients(ranks, toy, SEED, absent_is_zero=True)


@clause(
    "fsdp.backward.any-granularity",
    source="contract: mean-gradient; "
    "torch.distributed.fsdp.fully_shard: called bottom-up on any modules",
)
@pytest.mark.parametrize("units", ["root", "layers", "nested"])
def test_what_is_gathered_together_changes_no_gradient(world, subject, units):
    """However a model is cut into units, gradients MUST be the mean of the local ones."""
    mean_gradients(world, subject, "stack", "backward 0", units=units)


@clause(
    "fsdp.backward.two-dtypes-in-a-unit",
    source="contract: mixed-dtypes; test_fully_shard_mixed_precision",
)
def test_a_unit_of_two_dtypes_has_mean_gradients_or_is_refused(world, subject):
    """A unit whose parameters have two dtypes MUST get mean gradients of each, or be refused.

    One flat buffer takes the dtype of whatever comes first in it, on each rank perhaps another.
    """
    calls = "backward 0, zero_grad, backward 1"
    usual = "backward 0"
    mean_gradients(world, subject, "mixed", calls, may_refuse=True, ordinary=usual, units="root")


def frozen_subset(ctx, subject, frozen):
    """Names of the parameters without gradient where those of a unit are frozen, and gradients."""
    sharded = Sharded(ctx, subject, "stack", units="root")
    for name, parameter in sharded.shards().items():
        parameter.requires_grad_(name not in frozen)
    sharded.backward()
    absent = [name for name, g in sharded.local_gradients().items() if g is None]
    return sorted(absent), sharded.gradients()


@clause(
    "fsdp.backward.frozen-subset",
    source="contract: frozen-none; test_fully_shard_frozen, which freezes whole modules only",
    worlds=(3,),
)
@pytest.mark.parametrize(
    "frozen",
    [("gain",), ("blocks.1.down.weight", "blocks.1.up.bias"), ("embed.weight", "head.weight")],
    ids=["last", "inside", "ends"],
)
def test_any_subset_of_a_unit_may_be_frozen(world, subject, frozen):
    """Frozen parameters MUST keep `grad is None`, and the others of their unit get the mean."""
    absent, gradients = zip(*world.run(frozen_subset, subject, frozen), strict=True)

    expected = equivalence.full_batch_gradients("stack", SEED, ranks=range(world.size))
    for name in frozen:
        expected[name] = torch.zeros_like(oracle.parameters("stack", SEED)[name])
    judge.equal(absent, list(frozen), quantity="parameters without gradient")
    judge.tensors(gradients, expected, quantity="mean gradient", given=f"frozen {frozen}")


def frozen_for_a_step(ctx, subject, frozen):
    """Gradients of a step in which these parameters are frozen, and of the next, in which none is.

    A step comes before, in which full parameters are made.
    """
    sharded = Sharded(ctx, subject, "stack", units="nested")
    found = []
    for micro, trains in enumerate((True, False, True)):
        for name in frozen:
            sharded.shards()[name].requires_grad_(trains)
        sharded.follow(f"zero_grad, backward {micro}")
        found.append(sharded.whole_gradients())
    return found


@clause(
    "fsdp.backward.frozen-for-a-step",
    source="contract: freezing, frozen-none; "
    "torch.Tensor.requires_grad_ on parameters: layers that are frozen or thawed in turn",
)
def test_parameters_may_be_frozen_and_thawed_between_steps(world, subject):
    """What is frozen after a step MUST keep `grad is None`, and get the mean again once thawed.

    Full parameters of the first step go on to require gradients, if nobody tells them.
    """
    frozen = ("blocks.1.up.weight", "head.bias")
    ranks = world.run(frozen_for_a_step, subject, frozen)

    for micro, steps in enumerate(zip(*ranks, strict=True)):
        wanted = equivalence.full_batch_gradients(
            "stack", SEED, ranks=range(world.size), micros=(micro,)
        )
        wanted |= dict.fromkeys(frozen if micro == 1 else ())
        judge.tensors(steps, wanted, quantity="mean gradient", given=f"step {micro}, {frozen}")


def gradient_of_input(ctx, subject, toy, seed):
    """The gradient that arrives at this rank's own inputs."""
    sharded = Sharded(ctx, subject, toy, seed)
    batch = sharded.batch().requires_grad_()
    (ctx.world_size * sum_of_squares(sharded.wrapped(batch))).backward()
    sharded.finish()
    return {"input": batch.grad}


@clause(
    "fsdp.backward.inputs-keep-their-gradient",
    judges=BOTH,
    source="contract: mean-gradient; "
    f"{PAPER}: parameters are averaged, activations are this rank's own",
)
def test_gradients_of_inputs_are_not_averaged(world, subject):
    """The gradient of a rank's inputs MUST be its own, neither averaged nor divided."""
    toy = divisible(subject, "mlp")
    ranks = world.run(gradient_of_input, subject, toy, 7)

    expected = []
    for rank in range(world.size):
        batch = TOYS[toy].batch(7, rank=rank).requires_grad_()
        (world.size * sum_of_squares(TOYS[toy].build(7)(batch))).backward()
        expected.append({"input": batch.grad})
    judge.tensors(ranks, expected, quantity="gradient of the input")


def branches_in_turn(ctx, subject, uses, units):
    """Gradients of a step per entry of `uses`, which branches it takes."""
    sharded = Sharded(ctx, subject, "branches", units=units)
    found = []
    for micro, use in enumerate(uses):
        sharded.follow(f"zero_grad, backward {micro} use={use}")
        found.append(sharded.whole_gradients())
    return found


@clause(
    "fsdp.backward.unused-unit",
    source=f"contract: unused-none; {TRAINING}: unused modules",
    worlds=(2,),
)
@pytest.mark.parametrize("units", ["layers", "root"])
@pytest.mark.parametrize("uses", [("ab", "abc", "c"), ("abc", "ba", "cba")], ids=["later", "less"])
def test_a_unit_may_be_left_out_and_come_back(world, subject, uses, units):
    """A unit left out on all ranks MUST keep None and disturb no gradient, then or used again.

    So must what is left out of a unit that is used.
    """
    ranks = world.run(branches_in_turn, subject, uses, units)

    for micro, use in enumerate(uses):
        equivalence.mean_gradients(
            [rank[micro] for rank in ranks],
            "branches",
            SEED,
            micros=(micro,),
            flags=lambda rank, micro: {"use": uses[micro]},
            given=f"step {micro} uses branches {use!r} of {uses}",
        )


def in_place_after_layers(ctx, subject):
    """Weights after a step of a model that changes the outputs of its layers in place."""
    module = in_place().to(ctx.device)
    names = [name for name, _ in module.named_parameters()]
    model = shard(ctx, subject, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = TOYS["mlp"].batch(SEED, rank=ctx.rank).to(ctx.device)
    (ctx.world_size * model(x).sum()).backward()
    finish(ctx, subject, model)
    optimizer.step()
    return full_parameters(ctx, model, names)


def in_place() -> Any:
    """Layers with activations that write over what they are given."""
    layers = [nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 12), nn.ReLU(inplace=True)]
    return of_integers(nn.Sequential(*layers, nn.Linear(12, 12)))


@clause(
    "fsdp.backward.in-place-after-a-layer",
    judges=BOTH,
    source="contract: mean-gradient; "
    "torch.nn.ReLU, inplace=True; what a custom autograd function gives back is a view",
    worlds=(2,),
)
def test_the_output_of_a_sharded_layer_may_be_changed_in_place(world, subject):
    """Where outputs of sharded layers are changed in place, a step MUST use the mean gradient."""
    ranks = world.run(in_place_after_layers, subject)

    plain = in_place()
    for rank in range(world.size):
        plain(TOYS["mlp"].batch(SEED, rank=rank)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    judge.tensors(ranks, wanted, quantity="weight after one step")


def entangled(ctx, subject, how):
    """Gradients where forwards and backwards do not simply alternate."""
    sharded = Sharded(ctx, subject, "stack", units="nested")
    losses = [sharded.loss(micro) for micro in range(1 if how == "retained" else 2)]
    if how == "retained":
        losses[0].backward(retain_graph=True)
    elif how == "one-backward":
        losses = [losses[0] + losses[1]]
    for loss in losses[::-1] if how == "in-reverse" else losses:
        loss.backward()
    return sharded.gradients()


@clause(
    "fsdp.backward.forwards-and-backwards-entangled",
    source=f"contract: as-pytorch; {TRAINING}: several forwards, 1F1B; retain_graph",
    worlds=(2,),
)
@pytest.mark.parametrize("how", ["one-backward", "in-order", "in-reverse", "retained"])
def test_several_forwards_may_wait_for_their_backward(world, subject, how):
    """Gradients MUST add up over forwards that precede a backward, and over repeated backwards."""
    ranks = world.run(entangled, subject, how)

    micros = (0, 0) if how == "retained" else (0, 1)
    equivalence.mean_gradients(
        ranks, "stack", 7, micros=micros, absent_is_zero=True, given=f"two micro-batches {how}"
    )


def recomputed(ctx, subject, seed, reentrant, reshard_after_forward):
    """Gradients with each block recomputed in backward."""
    sharded = Sharded(
        ctx, subject, "stack", seed, units="children", reshard_after_forward=reshard_after_forward
    )
    stack: Any = sharded.module
    blocks = list(stack.blocks)
    stack.blocks = nn.ModuleList(_Recompute(block, reentrant) for block in blocks)
    sharded.backward()
    stack.blocks = nn.ModuleList(blocks)  # the names of the plain model, for reading
    return sharded.gradients()


class _Recompute(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]  # untyped


@clause(
    "fsdp.backward.activation-checkpointing",
    source=f"contract: as-pytorch; {TRAINING}: activation checkpointing",
    worlds=(2,),
)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_recomputing_a_unit_changes_no_gradient(world, subject, reentrant, reshard_after_forward):
    """Units recomputed in backward MUST get the same gradients as without recomputation.

    A recomputation ends like a forward; freed there, the weights are gone when backward needs them.
    """
    ranks = world.run(recomputed, subject, 7, reentrant, reshard_after_forward)

    equivalence.mean_gradients(ranks, "stack", 7, absent_is_zero=True)


def recomputed_layers(ctx, subject, reentrant):
    """Gradients of a whole model two of whose layers are computed again in backward."""
    sharded = Sharded(ctx, subject, "even")
    module: Any = sharded.module
    again = partial(checkpoint, use_reentrant=reentrant)

    def forward(x):  # as that of `Even`; another module in a layer's place would change names
        h = module.embed(x[:, 0].abs().long()) + x
        return again(module.down, again(module.up, h).abs()) * module.gain

    module.forward = forward
    return sharded.gradients_after("backward 0")


@clause(
    "fsdp.backward.activation-checkpointing-in-a-whole-model",
    judges=("fsdp",),
    source="contract: reused; torch.utils.checkpoint",
    worlds=(2,),
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_recomputing_a_layer_of_a_whole_model_changes_no_gradient(world, subject, reentrant):
    """Layers of a whole model recomputed in backward MUST get the mean gradient, or be refused."""
    usual = (gradients_after, subject, "even", SEED, "backward 0")
    ranks = refusal.answer_or_refusal(world, recomputed_layers, subject, reentrant, ordinary=usual)

    if ranks is not None:
        equivalence.mean_gradients(ranks, "even", SEED)


def described_gradients(ctx, subject, toy):
    """What the gradients say about themselves, beside what the parameters say."""
    sharded = Sharded(ctx, subject, toy)
    sharded.backward()
    return {name: (about(p), about(p.grad)) for name, p in sharded.shards().items()}


@clause(
    "fsdp.backward.gradients-are-shards",
    source="contract: dtensors, MixedPrecisionPolicy/others-keep-dtype; "
    "test_fully_shard_init, check_sharded_parity; an optimizer steps over shards",
    worlds=(2, 4),
)
@pytest.mark.parametrize("toy", ["ragged", "mixed"])
def test_gradients_are_sharded_as_their_parameters_are(world, subject, toy):
    """A gradient MUST have its parameter's placements, shape and dtype, also on ranks without rows.

    None where a rank has no rows, and its peers wait for it in the next clipping.
    """
    ranks = world.run(described_gradients, subject, toy)

    keys = ("is a DTensor", "placements", "mesh", "shape", "local shape", "dtype")
    for (rank, seen), name in itertools.product(enumerate(ranks), TOYS[toy].build(7).state_dict()):
        parameter, gradient = seen[name]
        what = f"rank {rank}, gradient of {name!r}"
        says_the_same(gradient, parameter, keys, what, given=f"toy {toy!r}")
