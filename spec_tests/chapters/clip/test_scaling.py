"""The scaling: by one factor for all, never above one, and on all ranks alike if it is no number.

See Pascanu et al. 2013, section 3.2, and torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import math

import pytest
import torch

from spec_tests.chapters.clip import layouts
from spec_tests.chapters.clip.layouts import EMPTY_SHARDS, PLAIN, SHARDED, clip
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(needs=("clip_grad_norm_",), level="correct", worlds=(2, 3))
TORCH = "torch.nn.utils.clip_grad_norm_"


def gradients_are(ranks, layout, factor, within, hints=()):
    """Every whole gradient is the original times `factor`."""
    __tracebackhide__ = True
    judge.tensors(
        [rank["gradients"] for rank in ranks],
        {name: layouts.whole(name) * factor for name in layout},
        quantity=f"gradient times {factor:g}",
        within=within,
        hints=hints,
        given=", ".join(f"{name} {how}" for name, how in layout.items()),
    )


@clause("clip.scaling.factor", source="contract: as-pytorch; " + TORCH)
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("layout", [SHARDED, PLAIN], ids=["sharded", "replicated"])
def test_all_gradients_shrink_by_the_same_factor(world, layout, order):
    """Gradients of a larger norm MUST be scaled by max_norm / norm, all by the same factor."""
    ranks = world.run(clip, layout, max_norm=2.0, order=order)

    norm = layouts.norm(layout, order)
    within = layouts.within().plus(1e-6 / float(norm), "what keeps torch from dividing by zero")
    own = layouts.local_norms(layout, world.size, order)
    locally = [
        {name: layouts.whole(name) * 2.0 / float(each["norm"]) for name in layout} for each in own
    ]
    twice = {name: layouts.whole(name) * (2.0 / float(norm)) ** 2 for name in layout}
    hints = [
        Hint("scaled by the rank's own norm", locally),
        Hint("scaled twice", twice),
        Hint("not scaled, or only a copy was", {name: layouts.whole(name) for name in layout}),
    ]
    gradients_are(ranks, layout, 2.0 / float(norm), within, hints)


@clause("clip.scaling.untouched-below", source="contract: as-pytorch; " + TORCH, worlds=(2,))
@pytest.mark.parametrize("layout", [EMPTY_SHARDS, PLAIN], ids=["sharded", "replicated"])
def test_small_gradients_stay_as_they_are(world, layout):
    """Gradients of a smaller norm MUST keep their bits: nothing is scaled up to `max_norm`."""
    gradients_are(world.run(clip, layout, max_norm=1e9), layout, 1.0, None)


def replaced(ctx, layout):
    """Names of the parameters whose gradient lies elsewhere after clipping."""
    made = layouts.parameters(ctx, layout)
    before = {name: layouts.local_part(parameter).data_ptr() for name, parameter in made.items()}
    ctx.impl.clip_grad_norm_(made.values(), 2.0)
    return [n for n, p in made.items() if layouts.local_part(p).data_ptr() != before[n]]


@clause(
    "clip.scaling.in-place",
    level="production",
    source="contract: in-place; "
    + TORCH
    + ": in place; gradients may be views of the buckets of a reducer",
    worlds=(2,),
)
@pytest.mark.parametrize("layout", [SHARDED, PLAIN], ids=["sharded", "replicated"])
def test_gradients_are_scaled_in_place(world, layout):
    """Gradients MUST be scaled in place, in the memory that they had."""
    judge.equal(world.run(replaced, layout), [], quantity="names whose gradient lies elsewhere")


@clause(
    "clip.scaling.zeros",
    level="production",
    source="contract: max-norm-zero; " + TORCH + ": max_norm / (norm + 1e-6)",
    worlds=(2,),
)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_limit_of_zero_leaves_zeros(world, scale):
    """With a `max_norm` of zero gradients MUST become zeros, and zeros stay zeros: never 0 / 0."""
    ranks = world.run(clip, PLAIN, max_norm=0.0, scale=scale)

    zeros = {name: torch.zeros(layouts.SHAPES[name]) for name in PLAIN}
    judge.tensors([rank["gradients"] for rank in ranks], zeros, quantity="gradient")


TURNS = {
    "wide": (torch.float32, torch.float64) * 2,
    "narrow-first": (torch.bfloat16, torch.float32) * 2,
    "narrow-last": (torch.float32, torch.bfloat16) * 2,
}
FACTOR = 0.3  # no dtype holds it


def of_dtypes_in_turn(ctx, turns):
    """Gradients of 4, whose norm is 16, after they are clipped; by number."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=d, device=ctx.device)) for d in turns]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 4.0)
    ctx.impl.clip_grad_norm_(parameters, 16 * FACTOR)
    return {str(n): p.grad.double() for n, p in enumerate(parameters) if p.grad is not None}


@clause(
    "clip.scaling.dtypes-in-turn",
    level="production",
    source="contract: as-pytorch; "
    "torch.utils._foreach_utils groups tensors by dtype; itertools.groupby, runs of one",
    worlds=(1,),
)
@pytest.mark.parametrize("turns", TURNS)
def test_gradients_of_dtypes_in_turn_shrink_alike(world, turns):
    """Gradients whose dtypes come in turn MUST all shrink by the factor, once."""
    dtypes = TURNS[turns]
    ranks = world.run(of_dtypes_in_turn, dtypes)
    whole = {str(n): torch.full((4,), 4.0, dtype=torch.float64) for n in range(len(dtypes))}
    for dtype in dict.fromkeys(dtypes):
        names = [str(n) for n, each in enumerate(dtypes) if each is dtype]
        judge.tensors(
            [{name: rank.get(name) for name in names} for rank in ranks],
            {name: whole[name] * FACTOR for name in names},
            quantity=f"{dtype} gradient times {FACTOR}",
            within=rounding(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32, terms=16),
            hints=[
                Hint("not scaled", {name: whole[name] for name in names}),
                Hint(
                    "times the factor in bfloat16, the dtype of another gradient",
                    {name: whole[name] * float(torch.tensor(FACTOR).bfloat16()) for name in names},
                ),
            ],
        )


def norm_is(world, number, **asked):
    """On all ranks the norm is this number, which is none."""
    __tracebackhide__ = True
    norms = [repr(rank["norm"].item()) for rank in world.run(clip, SHARDED, **asked)]
    given = f"{number} on rank {asked['poisoned']}"
    judge.equal(norms, repr(number), quantity="norm", given=given)


@clause(
    "clip.nonfinite.agreed", source="contract: nan; Megatron-LM issue 5529; pytorch issue 73405"
)
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_norm_that_is_no_number_is_none_on_all_ranks(world, poison):
    """Where one rank's part is NaN or infinite, the norm MUST be so on all ranks.

    Otherwise one rank skips the step and the others take it.
    """
    norm_is(world, poison, max_norm=1.0, poisoned=1, poison=poison)


@clause(
    "clip.nonfinite.largest-of-nan",
    source="contract: nan; a maximum over ranks may lose a NaN, a sum does not",
)
@pytest.mark.parametrize("poisoned", [0, 1])
def test_the_largest_of_nan_is_nan(world, poisoned):
    """For p = infinity too a NaN on one rank MUST be a NaN on all."""
    norm_is(world, math.nan, order=math.inf, poisoned=poisoned)


@clause(
    "clip.nonfinite.error-on-all-ranks",
    source="contract: as-pytorch; " + TORCH + ", error_if_nonfinite",
)
@pytest.mark.parametrize("case", ["nan", "inf", "nan-by-the-largest", "inf-by-the-largest"])
def test_asked_to_raise_it_raises_on_all_ranks(world, case):
    """With `error_if_nonfinite` all ranks MUST raise, whichever has the NaN or the infinity.

    By the 2-norm, and by the largest element.
    """
    poison, order = float(case[:3]), math.inf if case.endswith("largest") else 2.0
    asked = {"max_norm": 1.0, "order": order, "error_if_nonfinite": True}
    ranks = world.run(clip, SHARDED, poisoned=1, poison=poison, **asked)

    raised = [rank for rank, seen in enumerate(ranks) if seen["error"]]
    judge.holds(
        len(raised) == len(ranks),
        f"expected an error on all {len(ranks)} ranks, got one on ranks {raised}",
        likely="each rank looks at its own part, or the flag is ignored",
        given=f"{poison} on rank 1, norm of order {order}",
    )


@clause(
    "clip.nonfinite.error-scales-nothing",
    source="contract: as-pytorch; " + TORCH + ", error_if_nonfinite",
    worlds=(2,),
)
def test_where_it_raises_nothing_is_scaled(world):
    """Where clipping raises, gradients MUST be unchanged: a caller may inspect them, or skip."""
    ranks = world.run(clip, SHARDED, max_norm=1.0, poisoned=1, error_if_nonfinite=True)

    names = [name for name in SHARDED if name != "a"]
    judge.tensors(
        [{name: rank["gradients"][name] for name in names} for rank in ranks],
        {name: layouts.whole(name) for name in names},
        quantity="gradient from before",
    )


@clause(
    "clip.nonfinite.finite-is-no-error",
    source="contract: as-pytorch; " + TORCH + ", error_if_nonfinite",
    worlds=(2,),
)
def test_a_finite_norm_is_no_error(world):
    """With `error_if_nonfinite` and a finite norm, clipping MUST be the same as without it."""
    ranks = world.run(clip, PLAIN, max_norm=1e9, error_if_nonfinite=True)

    judge.equal([rank["error"] for rank in ranks], "", quantity="error")
    gradients_are(ranks, PLAIN, 1.0, None)
