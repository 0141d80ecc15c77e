"""The norm: of the whole gradient, each element counted once, the same number on every rank.

A rank that takes the norm of what it holds gets another number than its peers, scales its part by
it, and the parts of one tensor no longer fit together. Where it sums over ranks without asking who
holds copies, replicated parameters count W times. The loss falls all the same. Expected values come
from the whole gradients in one process. See Pascanu et al. 2013; torchtitan issues 19 and 766.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spec_tests.chapters.clip import layouts
from spec_tests.chapters.clip.layouts import (
    COLUMNS,
    EMPTY_SHARDS,
    HYBRID,
    MIXED,
    PLAIN,
    SHARDED,
    TWO_MESHES,
    TWO_OF_ONE_SIZE,
    clip,
)
from spec_tests.programs.laws import refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(needs=("clip_grad_norm_",), level="correct", worlds=(2, 3))
largest_too = pytest.mark.parametrize("order", [2.0, math.inf])
ISSUES = "torchtitan issues 19 and 766; PyTorch's test_fully_shard_clip_grad_norm_"


def is_global(ranks, layout, order=2.0, given=""):
    """Every rank must have got the norm of the whole gradient."""
    __tracebackhide__ = True
    hints = [Hint(means, norms) for means, norms in layouts.mistakes(layout, len(ranks), order)]
    judge.tensors(
        [{"norm": rank["norm"]} for rank in ranks],
        {"norm": layouts.norm(layout, order)},
        quantity=f"norm of order {order:g}",
        within=layouts.within(),
        hints=hints,
        given=given or ", ".join(f"{name} {how}" for name, how in layout.items()),
    )


@clause("clip.norm.global", source="contract: counts-once, as-pytorch; " + ISSUES)
@pytest.mark.parametrize("case", ["all", "frozen-after-its-backward", "by-columns"])
def test_the_norm_is_that_of_the_whole_gradient(world, case):
    """With sharded gradients every rank MUST get the norm of the whole gradient."""
    layout = COLUMNS if case == "by-columns" else SHARDED
    frozen = "a" if case == "frozen-after-its-backward" else ""
    is_global(world.run(clip, layout, frozen=frozen), layout)


@clause(
    "clip.norm.orders",
    source="contract: as-pytorch; torch.nn.utils.clip_grad_norm_, norm_type; torchrec issue 3199",
)
@pytest.mark.parametrize("order", [1.0, 3.0, math.inf])
def test_every_order_is_combined_as_it_must_be(world, order):
    """For p = 1, 3 and infinity the ranks' parts MUST be combined by the formula of the p-norm."""
    is_global(world.run(clip, SHARDED, order=order), SHARDED, order)


@clause(
    "clip.norm.empty-shards",
    source="contract: counts-once; torchrec issues 3809 and 3891; pytorch pull request 173238",
)
@largest_too
def test_a_rank_with_an_empty_shard_takes_part(world, order):
    """A rank whose shard is empty MUST take part and get the global norm."""
    is_global(world.run(clip, {"d": "shard"}, order=order), {"d": "shard"}, order)


@clause(
    "clip.norm.replicated-once",
    source="contract: counts-once; "
    "torch.nn.utils.clip_grad_norm_ after DistributedDataParallel; pytorch issue 88955",
)
def test_replicated_gradients_count_once(world):
    """Gradients that all ranks hold MUST count once, not once per rank."""
    is_global(world.run(clip, PLAIN), PLAIN)


@clause(
    "clip.norm.replicated-axes-once",
    source="contract: counts-once; hyper-parallel issue 526, VeOmni issue 184: hybrid sharding",
    worlds=(4,),
)
@largest_too
def test_an_axis_of_replicas_counts_once(world, order):
    """On a mesh with an axis of replicas each element MUST count once, not once per replica."""
    ranks = world.run(clip, HYBRID, order=order)
    is_global(ranks, HYBRID, order, given="a mesh of 2 replicas of 2 shards")


@clause(
    "clip.norm.two-divided-axes",
    level="production",
    source="contract: counts-once; "
    "tensors that are divided over both axes of a mesh: FSDP beside tensor parallelism",
    worlds=(4,),
)
def test_each_of_two_axes_that_divide_is_summed_over(world):
    """On a mesh whose axes both divide a tensor, each element MUST count once."""
    layout = dict.fromkeys("ab", "both")
    is_global(world.run(clip, layout), layout, given="divided over both axes of a 2 x 2 mesh")


@clause(
    "clip.norm.two-meshes",
    level="production",
    source="contract: two-meshes; NVIDIA-NeMo/Automodel issue 3816, Megatron-LM issue 5916",
    worlds=(4,),
)
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("meshes", [TWO_MESHES, TWO_OF_ONE_SIZE], ids=["sizes", "one-size"])
def test_gradients_on_two_meshes_count_together_or_are_refused(world, meshes, first):
    """Gradients on meshes of different ranks MUST give the norm of all, or be refused."""
    layout = {first: meshes[first], **meshes}
    ranks = refusal.answer_or_refusal(world, clip, layout, ordinary=(clip, SHARDED))

    if ranks is not None:
        is_global(ranks, layout)


def listed_twice(ctx):
    """Norm and gradients where a tied weight is in the list twice."""
    made = layouts.parameters(ctx, PLAIN)
    norm = ctx.impl.clip_grad_norm_([*made.values(), made["a"]], 2.0)
    gradients = {name: layouts.gathered(parameter) for name, parameter in made.items()}
    return {"norm": norm.double().reshape(()), **gradients}


@clause(
    "clip.norm.tied-once",
    level="production",
    source="contract: listed-twice; [*encoder.parameters(), *decoder.parameters()]",
    worlds=(2,),
)
def test_a_tensor_that_is_listed_twice_counts_and_shrinks_once(world):
    """A tensor that is listed twice MUST be counted once and scaled once."""
    norm = layouts.norm(PLAIN)
    wanted = {name: layouts.whole(name).double() * 2.0 / norm for name in PLAIN}
    twice = (norm**2 + layouts.whole("a").double().square().sum()) ** 0.5
    judge.tensors(
        [{k: v.double() for k, v in seen.items()} for seen in world.run(listed_twice)],
        {"norm": norm, **wanted},
        quantity="norm, or gradient",
        hints=[Hint("a tensor that is listed twice counted twice", {"norm": twice})],
        within=layouts.within().plus(1e-6 / float(norm), "what keeps torch from dividing by zero"),
    )


DTYPES = {
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "two": (torch.float32, torch.bfloat16),
    "float64": (torch.float64,),
    "complex": (torch.complex64,),
}


def of_dtypes(case):
    """A gradient of each dtype, whose elements it can hold, and float16 not their norm."""
    element = {torch.complex64: 10_001 - 10_001j}
    return [torch.full((65,), element.get(dtype, 10_001.0), dtype=dtype) for dtype in DTYPES[case]]


def norm_of(ctx, make, *args):
    gradients = make(*args)
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return {"norm": ctx.impl.clip_grad_norm_(parameters, math.inf).double().reshape(())}


@clause(
    "clip.norm.dtypes",
    level="production",
    source="contract: norm-dtype, as-pytorch; float16 ends at 65504",
    worlds=(1,),
)
@pytest.mark.parametrize("case", DTYPES)
def test_the_norm_is_as_wide_as_float32_or_the_widest_gradient(world, case):
    """The norm MUST have the range and rounding of float32, or of float64 where one has that."""
    wanted = torch.cat([gradient.abs().double() for gradient in of_dtypes(case)]).norm()
    widest = torch.float64 if case == "float64" else torch.float32
    judge.tensors(
        world.run(norm_of, of_dtypes, case),
        {"norm": wanted},
        quantity="norm",
        within=rounding(widest, terms=64),
    )


def unreduced(ctx):
    """The norm of a gradient whose parts on the ranks are still to be added up."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    mesh = ctx.mesh((ctx.world_size,))
    parameter = nn.Parameter(
        distribute_tensor(torch.zeros(7, 3), mesh, [Replicate()], src_data_rank=None)
    )
    part = layouts.whole("a") * (1.0 if ctx.rank else 3.0)
    parameter.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return {"norm": ctx.impl.clip_grad_norm_([parameter], math.inf).double().reshape(())}


@clause(
    "clip.norm.unreduced",
    level="production",
    source="contract: unreduced; "
    "DTensor, Partial: ranks hold summands, whose norms say nothing about the sum's",
    worlds=(2,),
)
def test_what_is_not_reduced_is_reduced_or_refused(world):
    """Gradients that are not reduced yet MUST give the norm of their sum, or be refused."""
    ranks = refusal.answer_or_refusal(world, unreduced, ordinary=(clip, SHARDED))

    if ranks is not None:
        wanted = {"norm": 4 * layouts.norm({"a": "plain"})}
        judge.tensors(ranks, wanted, quantity="norm", within=layouts.within())


@clause("clip.norm.mixed", source="contract: mixed; PyTorch refuses tensors beside DTensors")
@largest_too
def test_plain_and_sharded_gradients_count_together_or_are_refused(world, order):
    """Plain gradients beside sharded ones MUST count once each, or be refused with an error."""
    ordinary = (clip, SHARDED)
    ranks = refusal.answer_or_refusal(world, clip, MIXED, order=order, ordinary=ordinary)

    if ranks is not None:
        is_global(ranks, MIXED, order)


@clause(
    "clip.norm.absent-gradients",
    source="contract: as-pytorch; torch.nn.utils.clip_grad_norm_: None is left out",
    worlds=(2,),
)
@pytest.mark.parametrize("layout", [{**SHARDED, "d": "none"}, {"d": "none"}], ids=["one", "all"])
def test_a_parameter_without_a_gradient_counts_nothing(world, layout):
    """A parameter whose gradient is None MUST count nothing and keep None."""
    ranks = world.run(clip, layout, max_norm=1.0)

    is_global(ranks, layout)
    judge.equal([rank["gradients"]["d"] for rank in ranks], None, quantity="gradient of 'd'")


def partly_absent(ctx, absent):
    """The norm where the last rank has no gradient of these sharded parameters."""
    made = layouts.parameters(ctx, SHARDED)
    for each in absent if ctx.rank == ctx.world_size - 1 else ():
        made[each].grad = None
    return {"norm": ctx.impl.clip_grad_norm_(made.values(), math.inf).double().reshape(())}


LACKING = {"one": ("a",), "all": tuple(SHARDED)}


@clause(
    "clip.norm.absent-on-one-rank",
    level="production",
    source="contract: absent-somewhere; a branch of the model that one rank takes",
    worlds=(2,),
)
@pytest.mark.parametrize("case", LACKING)
def test_a_gradient_that_is_absent_on_one_rank_counts_on_the_others(world, case):
    """Where one rank lacks a gradient, the parts of the others MUST count, or it be refused."""
    absent = LACKING[case]
    ranks = refusal.answer_or_refusal(world, partly_absent, absent, ordinary=(clip, SHARDED))
    if ranks is None:
        return
    first = {name: layouts.whole(name).chunk(2)[0] for name in SHARDED}
    parts = [first[n] if n in absent else layouts.whole(n) for n in SHARDED]
    judge.tensors(
        ranks,
        {"norm": torch.cat([part.reshape(-1) for part in parts]).double().norm()},
        quantity="norm of the gradients that are there",
        within=layouts.within(),
        given=f"rank 1 lacks gradients of {case} of the sharded parameters",
    )


def at_scales(ctx):
    """Kinds and values of the norms of gradients of several sizes: each rounds in its own way."""
    seen = {f"norm / {number}": clip(ctx, SHARDED, scale=1 / number) for number in range(5, 25)}
    norms = {name: found["norm"] for name, found in seen.items()}
    return {"kinds": sorted({found["kind"] for found in seen.values()}), "norms": norms}


@clause("clip.norm.plain-and-equal", source="contract: equal-ranks; miles_diffusion issue 35")
def test_all_ranks_get_the_same_bits_in_a_plain_tensor(world):
    """The norm MUST be a plain tensor with equal bits on all ranks.

    Ranks that scale by numbers that differ in the last bit drift apart, step by step. And a DTensor
    whose `.item()` is logged says what one rank holds.
    """
    ranks = world.run(at_scales)

    judge.equal([rank["kinds"] for rank in ranks], ["Tensor"], quantity="types of the norm")
    judge.same_on_all_ranks([rank["norms"] for rank in ranks], quantity="norm")


def any_iterable(ctx):
    """Norms for a single tensor, a list and a generator; the last call shrinks."""
    made = layouts.parameters(ctx, {"a": "shard"})
    calls = [(made["a"], 1e9), (list(made.values()), 1e9), ((p for p in made.values()), 2.0)]
    return {
        f"norm {number}": torch.as_tensor(ctx.impl.clip_grad_norm_(*call)).double()
        for number, call in enumerate(calls)
    } | {"gradient": layouts.gathered(made["a"])}


@clause(
    "clip.norm.any-iterable",
    source="contract: as-pytorch; "
    "torch.nn.utils.clip_grad_norm_: an iterable of tensors or a single tensor",
    worlds=(2,),
)
def test_it_takes_a_tensor_or_any_iterable(world):
    """A tensor, a generator and a list MUST be taken alike: `parameters()` is a generator."""
    norm = layouts.norm({"a": "shard"})
    expected = dict.fromkeys((f"norm {n}" for n in range(3)), norm)

    judge.tensors(
        world.run(any_iterable),
        {**expected, "gradient": layouts.whole("a") * 2.0 / float(norm)},
        quantity="norm or gradient",
        within=layouts.within().plus(1e-6 / float(norm), "what keeps torch from dividing by zero"),
    )


@clause(
    "clip.traffic.one-number",
    level="production",
    source="contract: one-collective; measured: PyTorch sends one scalar for all parameters",
)
def test_one_small_message_is_sent(world):
    """With sharded gradients one collective of a few numbers MUST be enough."""
    ranks = world.run(clip, EMPTY_SHARDS)

    for rank, seen in enumerate(ranks):
        sent = seen["log"].collectives()
        judge.holds(
            len(sent) == 1 and sent[0].numel <= 8 * world.size,
            f"rank {rank}: expected one collective of at most 8 elements of each rank, got "
            f"{len(sent)} of {[event.numel for event in sent]}",
            likely="one message for each parameter, or whole gradients are gathered",
        )


@clause(
    "clip.traffic.replicated-sends-nothing",
    level="production",
    source="contract: one-collective; after data parallelism every rank has the whole gradient",
    worlds=(2,),
)
def test_nothing_is_sent_for_replicated_gradients(world):
    """Where all gradients are plain nothing MUST be sent: every rank has them all."""
    ranks = world.run(clip, PLAIN)

    traffic.silent([rank["log"] for rank in ranks], when="for plain gradients")


MANY = 2**21 + 2**13  # whoever adds up pieces has a last one that is shorter


def of_many_elements():
    """One gradient with as many elements as a small embedding has."""
    return [torch.randn(MANY, generator=torch.Generator().manual_seed(7))]


@clause(
    "clip.norm.of-many-elements",
    level="production",
    source="contract: norm-dtype; "
    "torch.linalg.vector_norm on a CPU: 0.3 % are missing at 38 million elements",
    worlds=(1,),
    transports=("gloo", "sim"),
)
def test_the_norm_of_a_large_gradient_is_right_in_six_digits(world):
    """The norm of two million elements MUST be right to one in a million.

    Who adds up so many squares in one number of float32 loses those that come last. A sharded run
    adds up shorter rows, and gets another norm than the plain one.
    """
    right = of_many_elements()[0].double().norm().item()
    for rank, found in enumerate(world.run(norm_of, of_many_elements)):
        norm = found["norm"].item()
        off = norm / right - 1
        judge.holds(
            abs(off) <= 1e-6,
            f"rank {rank}: expected a norm of {right:.6f}, got {norm:.6f}, {off:.1e} of it off",
            likely="squares are added up in one float32",
            given=f"{MANY:,} normal numbers",
        )
