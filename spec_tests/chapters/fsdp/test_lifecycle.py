"""Life cycle: after an exception, beside another model, on a part of the world, by hand.

Surroundings: models that have names, hooks and layers of their own.

Sharding comes last to a model that others have written. It adds attributes to it, takes over what
autograd would do to a leaf, and finds layers that are never called.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    divisible,
    gradients_as_after,
    judge_gradients,
    kinds_of,
    on_rank,
    rows_of,
    second_step,
    shard,
)
from spec_tests.programs.law import same_as_alone, situations
from spec_tests.programs.laws import refusal, traffic
from spec_tests.programs.on_ranks import copy_of
from spec_tests.programs.planted import failing
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="correct")
holds = rows(clause, same_as_alone)


def after_reset(ctx, subject, scene, call):
    """Gradients of a clean step after a pass that raised, and what PyTorch asks for then."""
    rank = on_rank(ctx, subject, scene)
    rank.follow(call)
    reset: Any = getattr(rank.module, "reset_iter_state", None)
    if reset is not None:  # others need not
        reset()
    rank.zero_grad("none")
    return rank.backward("0")


RAISING = {"forward": "fails 3 middle", "backward": "fails_backward 3 middle"}


@clause(
    "fsdp.lifecycle.after-exception",
    source="contract: after-exception; test_fully_shard_training: a caught exception",
)
@pytest.mark.parametrize("where", ["forward", "backward", "forward-reset", "backward-reset"])
def test_a_step_after_a_caught_exception_is_right(world, subject, where):
    """After a caught exception in forward or backward the next step MUST be right, or an error."""
    call = RAISING[where.removesuffix("-reset")]
    if where in RAISING:
        same_as_alone(world, subject, f"stack nested: {call}, zero_grad none, backward 0")
    else:
        situation = "stack nested: backward 0"
        gradients_as_after(world, subject, situation, after_reset, call, may_refuse=True)


def kinds_after_failure(ctx, subject, where):
    """Kinds of the parameters after an evaluation that a caught exception came before."""
    rank = on_rank(ctx, subject, "stack nested freed")
    rank.backward("0")
    with torch.set_grad_enabled(where != "evaluation"):
        # Outermost, the hook that fails comes before those that gather.
        part = rank.module.get_submodule("" if where == "hook" else "blocks.1.down")
        with failing(part, prepend=where == "hook"):
            rank.loss("3")
    rank.evaluate("1")
    return kinds_of(rank.module)


@clause(
    "fsdp.lifecycle.shards-after-exception",
    source="contract: after-exception; a state dict takes shards",
)
@pytest.mark.parametrize("where", ["training", "evaluation", "hook"])
def test_an_exception_leaves_no_full_parameter_behind(world, subject, where):
    """After a caught exception and an evaluation, parameters MUST be DTensors again.

    A post-forward hook that is not called after an exception registers no shards.
    """
    ranks = world.run(kinds_after_failure, subject, where)

    judge.equal(ranks, ["DTensor"], quantity="kinds of parameters after the evaluation")


def interleaved(ctx, subject, toy):
    """Gradients of two models whose passes interleave; the second has other micro-batches."""
    one, two = on_rank(ctx, subject, toy), on_rank(ctx, subject, "even")
    for micro in (0, 1):
        for model, number in ((one, micro), (two, micro + 2)):
            model.zero_grad("none")
            model.forward(str(number))
        found = one.pending(), two.pending()
    return found


@clause(
    "fsdp.lifecycle.two-models",
    judges=BOTH,
    source="contract: models-apart; "
    "adversarial training, teachers, moving averages: two sharded models at once",
)
def test_two_models_do_not_disturb_each_other(world, subject):
    """Two sharded models whose passes interleave MUST each have their own mean gradients."""
    toy = divisible(subject, "mlp")
    one, two = zip(*world.run(interleaved, subject, toy), strict=True)

    judge_gradients(one, subject, f"{toy}: backward 1")
    judge_gradients(two, subject, "even: backward 3")


PARTS = {"rows": "rows", "not-neighbours": "every-second", "not-from-zero": "not-from-zero"}

test_part_of_the_world = holds(
    "fsdp.lifecycle.part-of-the-world",
    "On a mesh of a part of the ranks, gradients MUST be the mean over that part alone.",
    # A rank's number in the world is not its place in the mesh.
    {case: f"stack {word}: backward 1, backward 0" for case, word in PARTS.items()},
    source="contract: mean-gradient; torch.distributed.fsdp.fully_shard, mesh; verl issue 7493",
    worlds=(4,),
)

test_hybrid = holds(
    "fsdp.lifecycle.hybrid",
    "On a mesh replicate x shard, gradients MUST be the mean over all ranks, or it be refused.",
    "stack 2x2: backward 1, backward 0",
    source="contract: two-dims; fully_shard, mesh of two dimensions; pytorch issue 125484",
    worlds=(4,),
)


def rows_here(ctx, subject, scene):
    """Number of rows of each parameter on this rank."""
    return {name: len(p.to_local()) for name, p in on_rank(ctx, subject, scene).named()}


@clause(
    "fsdp.lifecycle.hybrid-of-one",
    source="contract: two-dims; fully_shard, mesh of two dimensions: (replicate, shard)",
    worlds=(2, 4),
)
@situations({f"{n}-alone": f"stack {n}: backward 1, backward 0" for n in ("replicas", "shards")})
def test_the_first_dimension_of_a_mesh_replicates_and_the_second_shards(world, subject, situation):
    """On meshes (W, 1) and (1, W) the second MUST divide rows, alone, or they be refused.

    On a square mesh the two can be swapped, and every gradient is right.
    """
    same_as_alone(world, subject, situation, looks=("form",))
    scene = situation.partition(":")[0]
    ordinary = (rows_here, subject, "stack")
    ranks = refusal.answer_or_refusal(world, rows_here, subject, scene, ordinary=ordinary)
    parts = 1 if "replicas" in scene else world.size
    built = oracle.parameters("stack", SEED)
    for rank, found in enumerate(ranks or ()):
        wanted = {name: len(rows_of(p, rank % parts, parts)) for name, p in built.items()}
        judge.equal([found], wanted, quantity=f"rows of each parameter on rank {rank}")


test_world_of_one = holds(
    "fsdp.lifecycle.world-of-one",
    "In a world of one, gradients MUST be those of the plain model.",
    {toy: f"{toy}: backward 0" for toy in ("even", "stack")},
    judges=BOTH,
    source="contract: mean-gradient; a job that is tried on one device",
    worlds=(1,),
)


@clause(
    "fsdp.traffic.world-of-one",
    level="production",
    judges=BOTH,
    source="a job that is tried on one device: there is nobody to talk to",
    worlds=(1,),
)
def test_one_rank_alone_sends_nothing(world, subject):
    """In a world of one, forward and backward SHOULD send nothing: each message is a copy."""
    logs = world.run(second_step, subject, "stack")

    traffic.silent(logs, when="in a step, where there is one rank")


def collected_in_a_step(ctx, subject, toy):
    """Errors of steps in whose middle another model goes: among the hooks before, and after."""
    said = []
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        dropped: list[Any] = []

        def drop(*args, dropped=dropped):
            dropped.clear()
            gc.collect()

        handle = register(drop)  # before the models' own: theirs are still to be called
        try:
            rank = on_rank(ctx, subject, toy)
            dropped.append(on_rank(ctx, subject, toy))
            rank.backward("0")
            try:
                rank.optimizers[0].step()
            except RuntimeError as error:
                said.append(str(error))
        finally:
            handle.remove()
    return said


@clause(
    "fsdp.lifecycle.collected-in-a-step",
    judges=BOTH,
    source="contract: models-apart; "
    "ours, once: OrderedDict mutated during iteration, when the collector came in a step",
)
def test_a_model_may_be_collected_in_the_middle_of_a_step(world, subject):
    """A sharded model that is garbage-collected during a step MUST NOT disturb that step.

    When the collector comes is chance: a hook that leaves with its model fails once in a thousand
    steps, and on one rank only.
    """
    ranks = world.run(collected_in_a_step, subject, divisible(subject, "mlp"))

    judge.equal(ranks, [], quantity="errors of steps")


def by_hand(ctx, subject):
    """What the parameters of a unit are when it is unsharded and resharded by hand."""
    rank = on_rank(ctx, subject, "mlp")
    unit: Any = rank.module.get_submodule("first")
    unit.unshard()
    whole = {n: p.detach().clone() for n, p in unit.named_parameters()}
    unit.reshard()
    kinds = kinds_of(unit)
    unit.unshard()
    unit.unshard()
    return whole, kinds, {"output": rank.output("0").detach()}


@clause(
    "fsdp.lifecycle.by-hand",
    source="contract: by-hand; FSDPModule.unshard, FSDPModule.reshard",
    worlds=(2, 3),
)
def test_a_unit_may_be_unsharded_and_resharded_by_hand(world, subject):
    """After `unshard` a module MUST have full plain parameters, after `reshard` its shards."""
    whole, kinds, outputs = zip(*world.run(by_hand, subject), strict=True)

    plain = TOYS["mlp"].build(SEED)
    first = {n: p.detach() for n, p in plain.get_submodule("first").named_parameters()}
    judge.tensors(whole, first, quantity="full parameter")
    judge.equal(kinds, ["DTensor"], quantity="kind after reshard")
    batches = [TOYS["mlp"].batch(SEED, rank=r) for r in range(world.size)]
    judge.tensors(outputs, [{"output": plain(x).detach()} for x in batches], quantity="output")


NAMES = ("_schedule", "_unit", "_units", "_state", "_group", "_mesh", "_params", "_handles")
"""What a model may call its own, and a wrapper might."""


class Named(nn.Module):
    """A model with such names, as values or as modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in NAMES:
            setattr(self, name, nn.Identity() if kind == "modules" else f"the model's {name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def names_afterwards(ctx, subject, kind):
    """Which of the model's own names mean something else after sharding and a step."""
    model = Named(kind).to(ctx.device)
    before = {name: getattr(model, name) for name in NAMES}
    sharded = shard(ctx, subject, model, ["layer"])
    sharded(torch.ones(2, 4, device=ctx.device)).sum().backward()
    return [name for name in NAMES if getattr(model, name) is not before[name]]


@clause(
    "fsdp.init.names-of-the-model",
    source="contract: as-pytorch; ours, once: a noise schedule called _schedule was overwritten",
    level="production",
)
@pytest.mark.parametrize("kind", ["values", "modules"])
def test_attributes_of_the_model_stay_its_own(world, subject, kind):
    """Sharding MUST NOT take a name that the model uses: `_schedule`, `_state`, `_group`, ..."""
    ranks = world.run(names_afterwards, subject, kind)

    judge.equal(ranks, [], quantity="names that mean something else afterwards")


def told(ctx, subject, first):
    """How often each parameter's hook was called by the end of a window, and what it then saw."""
    rank = on_rank(ctx, subject, "stack")
    calls: dict[str, int] = {}
    gradients: dict[str, Any] = dict.fromkeys(rank.names)

    def hook_of(name):
        def hook(parameter):
            calls[name] = calls.get(name, 0) + 1
            gradients[name] = copy_of(parameter.grad)

        return hook

    for name, parameter in rank.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(name))
    rank.follow(f"{first} 0")
    early = sorted(calls) if first == "accumulate" else []
    rank.follow("backward 1, backward 2")
    return {"early": early, "calls": calls, "gradients": gradients}


@clause(
    "fsdp.backward.post-accumulate-hooks",
    source="contract: as-pytorch; register_post_accumulate_grad_hook; test_fully_shard_autograd",
    level="production",
)
@pytest.mark.parametrize("first", ["accumulate", "backward"], ids=["unreduced", "reduced"])
def test_a_hook_that_waits_for_a_gradient_is_called_with_it(world, subject, first):
    """A post-accumulate hook MUST be called once per reduction, when `.grad` is the mean.

    An optimizer that steps in such hooks trains nothing otherwise, and nobody tells.
    """
    ranks = world.run(told, subject, first)

    judge.equal(
        [rank["early"] for rank in ranks],
        [],
        quantity="hooks that were called before the reduction",
    )
    right = dict.fromkeys(oracle.parameters("stack", SEED), 2 if first == "accumulate" else 3)
    what = "calls of the hook of each parameter, which is no leaf of the graph:"
    judge.equal([rank["calls"] for rank in ranks], right, quantity=what)
    gradients = [rank["gradients"] for rank in ranks]
    judge_gradients(gradients, subject, "stack: accumulate 0, accumulate 1, backward 2")


def attending(ctx):
    """A layer whose attention reads weights of a layer inside of it, and an input."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(ctx.device)
    return layer, torch.randn(2, 3, 8, device=ctx.device)


def attended(ctx, subject):
    """Output of the sharded layer, and of the plain one in the same process."""
    plain, x = attending(ctx)
    sharded = ctx.impl.fsdp(attending(ctx)[0])
    return {"got": {"output": sharded(x).detach()}, "right": {"output": plain(x).detach()}}


@clause(
    "fsdp.forward.layers-that-are-not-called",
    judges=("fsdp",),
    source="contract: plain-bits; MultiheadAttention reads the weight of out_proj, a Linear",
    level="production",
)
def test_a_layer_whose_weight_is_read_from_outside_is_whole_then(world, subject):
    """A model with an `nn.MultiheadAttention`, sharded in one call, MUST compute the same."""
    ranks = world.run(attended, subject)

    judge.tensors([r["got"] for r in ranks], [r["right"] for r in ranks], quantity="output")
