"""Initialisation: what a model is once it has been sharded, and that nothing of it is lost.

Every rank keeps its rows and forgets the others, so whatever goes wrong here cannot be put right
later: a row that nobody kept, a name that a checkpoint will not find, a shape that is that of the
local part. See Zhao et al. 2023, section 4.1, and the page of `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import gc
import secrets
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests.chapters.fsdp.sharded import (
    BOTH,
    FULLY_SHARD,
    SEED,
    built,
    full_parameters,
    numel,
    of_integers,
    rows_of,
    shard,
    sharded_toy,
)
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="correct", worlds=(2, 3))

PAGE = "torch.distributed.fsdp.fully_shard"


def full_of(ctx, subject, build, *args):
    """The full parameters of a model right after sharding."""
    module = build(*args).to(ctx.device)
    names = [name for name, _ in module.named_parameters()]
    return full_parameters(ctx, shard(ctx, subject, module), names)


def judge_full(ranks, build, *args, given=""):
    """They must be those that the model was built with."""
    __tracebackhide__ = True
    whole = {name: p.detach() for name, p in build(*args).named_parameters()}
    judge.tensors(ranks, whole, quantity="parameter as built", given=given)


def loses_nothing(world, subject, build, *args, may_refuse=False):
    """The full parameters after sharding must be those built; or it is refused."""
    __tracebackhide__ = True
    asked = (full_of, subject, build, *args)
    if may_refuse:
        usual = (full_of, subject, built, "even")
        ranks = refusal.answer_or_refusal(world, *asked, ordinary=usual)
    else:
        ranks = world.run(*asked)
    if ranks is not None:
        judge_full(ranks, build, *args, given=", ".join(map(str, args)))


@clause(
    "fsdp.init.nothing-lost",
    level="course",
    judges=BOTH,
    source="contract: full_parameters/whole; "
    "CS336 assignment 2, fsdp_gather_full_params; Zhao et al. 2023, section 4.1",
    worlds=(2, 3, 4),
)
def test_sharding_loses_no_value(world, subject):
    """On all ranks the full parameters after sharding MUST be those that the model was built with.

    The sizes here divide by the number of ranks, which is all that the exercises ask.
    """
    loses_nothing(world, subject, built, "even")


@clause(
    "fsdp.init.nothing-lost-of-any-model",
    judges=BOTH,
    source="contract: full_parameters/whole, full_parameters/plain-names, any-rows, tied, frozen; "
    "Zhao et al. 2023, section 4.1; pytorch issue 176225 on tied parameters",
    worlds=(3,),
)
@pytest.mark.parametrize("name", ["ragged", "stack", "tied", "frozen"])
def test_sharding_loses_no_value_of_any_model(world, subject, name):
    """With odd sizes, ties or frozen layers, full parameters MUST be those built, or be refused."""
    loses_nothing(world, subject, built, name, may_refuse=True)


def of_rows(rows):
    """A layer of so many rows, and a vector of as many, in a model."""
    linear = nn.Linear(3, rows)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(3.0 * rows).view(rows, 3))
        linear.bias.copy_(torch.arange(float(rows)))
    return nn.Sequential(linear)


def local_rows(ctx, subject, rows):
    """Each rank's local part of a layer of so many rows."""
    module = of_rows(rows).to(ctx.device)
    shard(ctx, subject, module, "root")
    named: dict[str, Any] = dict(module.named_parameters())
    return {name: p.to_local().detach().clone() for name, p in named.items()}


@clause(
    "fsdp.init.rows-as-torch-chunk",
    level="production",
    source="contract: dtensors; torch.distributed.tensor.Shard: as torch.chunk deals the rows out",
    worlds=(3, 4),
)
@given(rows=st.integers(1, 9))
@example(rows=4)
@example(rows=1)
def test_each_rank_keeps_the_rows_that_chunk_would_give_it(world, subject, rows):
    """Rank r MUST keep piece r of `torch.chunk` along dim 0, and nothing where there is none.

    An evenly balanced cut gathers right, and breaks checkpoints and every other reader of DTensors.
    """
    ranks = world.run(local_rows, subject, rows)

    whole = {n: p.detach() for n, p in of_rows(rows).named_parameters()}
    places = range(world.size)
    expected = [{n: rows_of(p, r, world.size) for n, p in whole.items()} for r in places]
    balanced = [{n: p.tensor_split(world.size)[r] for n, p in whole.items()} for r in places]
    evenly = Hint("rows dealt out evenly, as tensor_split does", balanced)
    what = "piece of torch.chunk"
    judge.tensors(ranks, expected, quantity=what, hints=[evenly], given=f"{rows} rows")


@clause(
    "fsdp.init.any-number-of-rows",
    judges=BOTH,
    source="contract: any-rows; torchtitan issue 1136",
)
@given(rows=st.integers(1, 7))
@example(rows=1)
@example(rows=5)
def test_no_number_of_rows_loses_one(world, subject, rows):
    """Whatever its number of rows, a parameter MUST be gathered whole and in order.

    The whole-model shape may refuse rows that the ranks do not divide, and must not drop any.
    """
    loses_nothing(world, subject, of_rows, rows, may_refuse=subject == "fsdp")


class Outer(nn.Module):
    """A child whose name ends as a wrapper's prefix does."""

    def __init__(self) -> None:
        super().__init__()
        self.submodule = of_integers(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.submodule(x)
        return found


def named_like_a_prefix(ctx, subject):
    """Full parameters by the names under which they are given."""
    model = shard(ctx, subject, Outer().to(ctx.device), "root")
    return {n: t.detach().clone() for n, t in ctx.impl.full_parameters(model).items()}


@clause(
    "fsdp.init.names-like-a-prefix",
    level="production",
    judges=BOTH,
    needs=("full_parameters",),
    source="contract: plain-names; `name.replace('module.', '')`",
    worlds=(2,),
)
def test_a_name_that_holds_a_wrappers_prefix_stays_whole(world, subject):
    """`full_parameters` MUST give the plain names, also those in which `module.` occurs."""
    ranks = [
        {name.removeprefix("module."): value for name, value in rank.items()}
        for rank in world.run(named_like_a_prefix, subject)
    ]
    wanted = sorted(name for name, _ in Outer().named_parameters())
    judge.equal([sorted(rank) for rank in ranks], wanted, quantity="names")
    judge_full(ranks, Outer)


def about(tensor: torch.Tensor) -> dict[str, Any]:
    """What a parameter says about itself, as plain data."""
    found: dict[str, Any] = {
        "is a Parameter": isinstance(tensor, nn.Parameter),
        "is a DTensor": isinstance(tensor, DTensor),
        "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()),
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
    }
    if isinstance(tensor, DTensor):
        found["placements"] = str(tensor.placements)
        found["mesh"] = tensor.device_mesh.mesh.tolist()
    return found


def described(ctx, subject, toy):
    """What the parameters of a sharded model say about themselves, in order."""
    return {name: about(p) for name, p in sharded_toy(ctx, subject, toy).named_parameters()}


def judge_descriptions(world, subject, toy, keys):
    """Names, order and these keys must be the plain model's, sharded on dim 0; or it is refused."""
    __tracebackhide__ = True
    sharded = {
        "is a DTensor": True,
        "placements": "(Shard(dim=0),)",
        "mesh": list(range(world.size)),
    }
    wanted = {n: about(p) | sharded for n, p in TOYS[toy].build(SEED).named_parameters()}
    if toy in ("tied", "mixed"):
        ordinary = (described, subject, "stack")
        ranks = refusal.answer_or_refusal(world, described, subject, toy, ordinary=ordinary)
    else:
        ranks = world.run(described, subject, toy)
    if ranks is None:
        return
    for rank, seen in enumerate(ranks):
        judge.holds(
            [*seen] == [*wanted],
            f"rank {rank}: expected parameters {[*wanted]}, got {[*seen]}",
            likely="a tied weight became two: one Parameter for both names, as in the plain model"
            if {*seen} > {*wanted}
            else "wrapped or flattened: names and order must stay those of the plain model",
        )
    for name, right in wanted.items():
        said = [{key: seen[name].get(key) for key in keys} for seen in ranks]
        what = f"parameter {name!r} with"
        judge.equal(said, {key: right[key] for key in keys}, quantity=what, given=f"toy {toy!r}")


@clause("fsdp.init.parameters-are-dtensors", source="contract: dtensors, tied; " + PAGE)
@pytest.mark.parametrize("toy", ["stack", "tied", "frozen"])
def test_parameters_are_dtensors_sharded_on_dim_0(world, subject, toy):
    """Sharded parameters MUST be DTensor Parameters of the plain names, order and global shape."""
    keys = ("is a Parameter", "is a DTensor", "placements", "shape", "requires_grad")
    judge_descriptions(world, subject, toy, keys)


@clause(
    "fsdp.init.dtensor-metadata",
    level="production",
    source="contract: dtensors, mixed-dtypes; "
    "flashoptim issue 6: DTensor.from_local without shape and stride",
)
@pytest.mark.parametrize("toy", ["ragged", "mixed"])
def test_dtensors_carry_mesh_stride_and_dtype_of_the_whole(world, subject, toy):
    """A sharded parameter MUST carry mesh, shape, stride and dtype of the whole parameter.

    Rows that do not divide are where the global shape becomes W times the local one.
    """
    keys = ("placements", "mesh", "shape", "stride", "dtype", "requires_grad")
    judge_descriptions(world, subject, toy, keys)


def tied_across_units(ctx, subject, is_frozen, units):
    """Names of the parameters after a step where units of their own have the ends of a tie."""
    module: Any = TOYS["tied"].build(SEED).to(ctx.device)
    module.encode.weight.requires_grad_(not is_frozen)
    model = shard(ctx, subject, module, units)
    model(TOYS["tied"].batch(SEED, rank=ctx.rank).to(ctx.device)).sum().backward()
    return [name for name, _ in module.named_parameters()]


@clause("fsdp.init.ties-across-units", source="contract: tied; pytorch issue 176225", worlds=(2,))
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("units", [("encode",), ("encode", "decode")], ids=["one", "both"])
def test_a_tie_across_units_is_kept_or_refused(world, subject, is_frozen, units):
    """A weight that two units share MUST stay one parameter, or be refused by the first step.

    Two that were one begin with equal values; a step or a load then changes one of them.
    """
    ordinary = (described, subject, "stack")
    ranks = refusal.answer_or_refusal(
        world, tied_across_units, subject, is_frozen, units, ordinary=ordinary
    )
    if ranks is not None:
        names = [name for name, _ in TOYS["tied"].build(SEED).named_parameters()]
        judge.equal(ranks, names, quantity="names of the parameters")


def of_one_name(factor):
    """A layer of the class `Layer`, of which there is one per factor."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return factor * super().forward(x)

    torch.manual_seed(SEED)
    return of_integers(Layer(6, 4))


FACTORS = (1.0, 2.0)


def two_of_one_name(ctx, subject):
    """Outputs of two sharded models whose classes are two, with one name."""
    modules = [of_one_name(factor).to(ctx.device) for factor in FACTORS]
    models = [shard(ctx, subject, module, "root") for module in modules]
    x = torch.ones(2, 6, device=ctx.device)
    return {f"model {number}": model(x).detach() for number, model in enumerate(models)}


@clause(
    "fsdp.init.classes-of-one-name",
    source="contract: models-apart; torchtitan's simple_fsdp, a cache by class",
    worlds=(2,),
)
def test_two_classes_of_one_name_stay_two(world, subject):
    """Of two models whose classes have the same name each MUST have its own forward."""
    x = torch.ones(2, 6)
    right = {f"model {n}": of_one_name(f)(x).detach() for n, f in enumerate(FACTORS)}
    one, other = right.values()
    mixed = Hint("the forward of the other class", {"model 0": other, "model 1": one})
    judge.tensors(world.run(two_of_one_name, subject), right, quantity="output", hints=[mixed])


def surroundings(ctx, subject, toy):
    """Buffers, those that are DTensors, state-dict keys, and modules of another class."""
    from torch.distributed.tensor import DTensor

    module = sharded_toy(ctx, subject, toy)
    plain = TOYS[toy].build(SEED)
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    divided = [n for n, b in module.named_buffers() if isinstance(b, DTensor)]
    foreign = [
        name
        for name, part in module.named_modules()
        if not isinstance(part, type(plain.get_submodule(name)))
    ]
    return buffers, divided, list(module.state_dict()), foreign


@clause("fsdp.init.the-rest-stays", source="contract: as-pytorch; " + PAGE, worlds=(2,))
def test_buffers_modules_and_keys_stay_what_they_were(world, subject):
    """Buffers MUST stay plain and whole; modules and state-dict keys MUST stay as they were."""
    ranks = world.run(surroundings, subject, "buffers")
    buffers, divided, keys, foreign = zip(*ranks, strict=True)

    judge.tensors(buffers, oracle.buffers("buffers", SEED), quantity="buffer")
    judge.equal(divided, [], quantity="buffers that are DTensors")
    plain = TOYS["buffers"].build(SEED)
    judge.equal(keys, list(plain.state_dict()), quantity="state-dict keys")
    judge.equal(foreign, [], quantity="modules of another class")


def filled_by_a_load(ctx, subject):
    """Full parameters and output of a model on the meta device that was given another's shards."""
    with torch.device("meta"):
        module = TOYS["stack"].model()
    model = shard(ctx, subject, module)
    state = sharded_toy(ctx, subject, "stack").state_dict()
    module.load_state_dict(state, assign=True)
    with torch.no_grad():
        output = model(TOYS["stack"].batch(SEED, rank=0).to(ctx.device))
    return full_parameters(ctx, model, [*oracle.parameters("stack", SEED)]), {"output": output}


@clause(
    "fsdp.init.meta-device",
    level="production",
    source=f"contract: as-pytorch; {PAGE}, initialisation on the meta device",
)
@pytest.mark.parametrize("how", ["in-place", "assigned"])
def test_a_model_may_be_sharded_before_it_has_values(world, subject, how):
    """Sharded on the meta device and filled after `to_empty`, a model MUST use the filled values.

    Models that fit no single device are built so. A state dict of shards may be assigned, too.
    """
    if how == "in-place":
        same_as_alone(world, subject, "stack on-meta: unshard now, evaluate 0")
        return
    full, outputs = zip(*world.run(filled_by_a_load, subject), strict=True)

    judge_full(full, built, "stack")
    output = built("stack")(TOYS["stack"].batch(SEED, rank=0)).detach()
    judge.tensors(outputs, {"output": output}, quantity="output")


def in_default_groups(ctx, subject):
    """Of a model that all ranks shard, after each had a default group of its own.

    Its full weights, and how many elements this rank keeps.
    """
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name)
    gc.collect()
    dist.barrier()
    time.sleep(0.1)  # gloo aborts where a peer closes while a barrier's last message is under way
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded_toy(ctx, subject, "even")
    gc.collect()
    dist.destroy_process_group()
    store = dist.FileStore(str(ctx.scratch / name[0]), ctx.world_size)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    model = sharded_toy(ctx, subject, "even")
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return full_parameters(ctx, model, [*oracle.parameters("even", SEED)]), sum(
        part.numel() for part in own
    )


@clause(
    "fsdp.init.new-default-group",
    judges=BOTH,
    source="contract: models-apart; torch.distributed.destroy_process_group",
    worlds=(2,),
    transports=("gloo",),
)
def test_a_model_is_sharded_over_the_default_group_of_now(world, subject):
    """After another default group was made, a new model MUST be sharded over that one.

    In a notebook, a test suite, or a process that goes on with fewer ranks after a failure.
    """
    world.worlds.drop(world.target)  # DTensor's caches know the meshes of earlier cases
    try:
        ranks = world.run(in_default_groups, subject)
    finally:
        world.worlds.drop(world.target)  # who keeps the first group fails here, and nowhere else

    full, kept = zip(*ranks, strict=True)
    judge.tensors(full, oracle.parameters("even", SEED), quantity="parameter as built")
    judge.holds(
        max(kept) < numel("even"),
        f"expected a part of the model's {numel('even')} elements on each rank, got {kept}",
        likely="sharded over the default group of before, which had one rank",
    )
