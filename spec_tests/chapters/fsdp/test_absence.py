"""Absence: parameters that some steps do not train, and some ranks do not use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD, of_integers
from spec_tests.programs.law import same_as_alone, situations
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=FULLY_SHARD, level="correct", worlds=(2, 3))

FREEZING = "freeze 1, freeze 2, zero_grad none, backward 1"
THAWING = "thaw 1, thaw 2, zero_grad none, backward 2"
KEPT = {
    # Nothing is updated, so that full weights from before stay current.
    "backward": f"keep True, backward 0, {FREEZING}, {THAWING}",
    "evaluation": f"evaluate 5, backward 0, evaluate 5, {FREEZING}, evaluate 5, {THAWING}",
}


@clause(
    "fsdp.backward.frozen-while-kept",
    source="contract: freezing; full weights that outlive their pass",
)
@situations({how: f"stack nested: {program}" for how, program in KEPT.items()})
def test_parameters_whose_full_weights_are_kept_may_be_frozen_and_thawed(world, subject, situation):
    """Freezing and thawing MUST count at the next forward, also where full weights are kept."""
    same_as_alone(world, subject, situation)


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


def with_smallest_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy whose gradient is the negative number that is closest to zero."""
    copied = 1.0 * parameter
    copied.register_hook(lambda g: torch.nextafter(torch.zeros_like(g), -torch.ones_like(g)))
    return copied


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


def batch(rank: int) -> torch.Tensor:
    """The inputs of a rank: integers, whose sums are exact."""
    return torch.arange(8.0).view(2, 4) % 3 + rank


def branched(ctx, subject, case):
    """Whole gradients of a step; every rank calls the unit, each its own layers in it."""
    model = of_integers(Branches()).to(ctx.device)
    ctx.impl.fully_shard(model)
    used = used_by(ctx.rank, case) if case else ("both",)
    x = batch(ctx.rank).to(ctx.device).requires_grad_()
    (ctx.world_size * model(x, used).sum()).backward()
    named = dict(model.named_parameters())
    has_gradient = {name: p.grad is not None for name, p in named.items()}
    before = {name: p.full_tensor().detach().clone() for name, p in named.items()}
    torch.optim.SGD(named.values(), lr=1.0).step()
    after = {name: p.full_tensor().detach() for name, p in named.items()}
    return {name: before[name] - after[name] for name in named}, has_gradient


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
    ordinary = (branched, subject, "")
    ranks = refusal.answer_or_refusal(world, branched, subject, case, ordinary=ordinary)

    if ranks is None:
        return
    plain = of_integers(Branches())
    for rank in range(world.size):
        plain(batch(rank).requires_grad_(), used_by(rank, case)).sum().backward()
    wanted = {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.round()
        for name, p in plain.named_parameters()
    }
    judge.tensors(
        [gradients for gradients, _ in ranks], wanted, quantity="mean gradient", given=case
    )
    used = {name: p.grad is not None for name, p in plain.named_parameters()}
    judge.equal([present for _, present in ranks], used, quantity="whether there is a gradient")
