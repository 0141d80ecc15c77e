"""Parameter groups: options belong to groups, schedulers change them, and both must be obeyed.

A sharded optimizer holds an inner optimizer for the parameters of its rank. Users and schedulers
write into the outer groups, so options that are copied only once go stale without an error: the
warm-up never warms up. The second half is about process groups, which are not the world.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.chapters.zero1.runs import (
    SEED,
    Run,
    all_in_one,
    alone,
    fitting,
    in_ranks,
    like_unsharded,
    plain,
    same_as_unsharded,
    sharded,
    two_parameters,
    with_closure,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS

clause = clauses(needs=("sharded_optimizer",), level="correct")
GROUPS = "torch.optim: per-parameter options; pytorch issue 60284"


def one_and_the_rest(parameters):
    """Three groups with options of their own; the first has a single parameter."""
    every = list(parameters.values())
    return [
        {"params": every[:1], "lr": 0.5},
        {"params": every[1:4], "weight_decay": 0.0},
        {"params": every[4:], "betas": (0.5, 0.75)},
    ]


def three_steps(run):
    """Weights after each of three steps."""
    return run.steps(1, 2, 3)


def all_with_a_rate(parameters):
    """One group of all parameters, with a rate of its own."""
    return [{"params": list(parameters.values()), "lr": 0.5}]


@clause(
    "zero1.groups.own-options",
    level="course",
    source="contract: same-values; " + GROUPS,
    worlds=(2, 3),
)
@pytest.mark.parametrize("groups", [one_and_the_rest, all_with_a_rate], ids=["several", "one"])
def test_every_group_is_updated_with_its_own_options(world, groups):
    """Every parameter group MUST be updated with its own options, also where a rank has none of it.

    The first of several has one parameter: on all ranks but one it is empty.
    """
    toy = fitting(world)
    dropped = Hint(
        "the group's own options were dropped: those of the constructor are used for all",
        lambda: alone(three_steps, toy=toy),
    )
    same_as_unsharded(world, three_steps, groups=groups, hints=[dropped], toy=toy)


def options_that_change(run):
    """Rate, decay and betas are written into the groups between steps."""
    for number in range(1, 4):
        run.step(number)
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = number / 4
            group["betas"] = (0.5, 0.875)
    return run.seen


@clause("zero1.groups.live", source="contract: live-groups; " + GROUPS)
def test_what_is_written_into_a_group_acts_at_the_next_step(world):
    """A value written into `param_groups` MUST take effect at the next step, on all ranks."""
    same_as_unsharded(world, options_that_change, hints=[not_followed(world, three_steps)])


def not_followed(world, script):
    """What the weights are if nothing changes the options: those of `script`."""
    toy = fitting(world)
    return Hint(
        "a change of `param_groups` is not followed: the inner optimizer has its own options",
        lambda: alone(script, toy=toy),
    )


def four_steps(run):
    """Weights after each of four steps."""
    return run.steps(1, 2, 3, 4)


def scheduled(run):
    """A warm-up, driven by PyTorch's own scheduler."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: (step + 1) / 4)
    for number in range(1, 5):
        run.step(number)
        scheduler.step()
        rate = torch.tensor([scheduler.get_last_lr()[0]], dtype=torch.float64)
        run.seen[f"gain (the rate) after step {number}"] = rate
    return run.seen


@clause(
    "zero1.groups.schedulers",
    source="contract: live-groups; "
    "torch.optim.lr_scheduler; upstream's own test zeroes the gradients before its step",
)
def test_schedulers_drive_it(world):
    """A torch.optim scheduler MUST drive the sharded optimizer as it drives the unsharded one."""
    same_as_unsharded(world, scheduled, hints=[not_followed(world, four_steps)])


def first_two(parameters):
    """What the optimizer begins with on two ranks."""
    return list(parameters.values())[:2]


def first_three(parameters):
    """The same on three: a rank without any is the matter of another clause."""
    return list(parameters.values())[:3]


def grows(run, begun, **options):
    """A group is added after the first step, with its options, another one after the second."""
    every = list(run.parameters.values())
    last = min(begun, (len(every) - begun) // 2)
    run.step(1)
    run.optimizer.add_param_group({"params": every[begun:-last], **options})
    run.step(2)
    run.optimizer.add_param_group({"params": every[-last:]})
    return run.steps(3, 4)


def grows_with_a_rate(run, begun):
    """The same, and the added group has a rate of its own."""
    return grows(run, begun, lr=0.5)


@clause(
    "zero1.groups.added-later",
    level="course",
    source="contract: added-groups; CS336 assignment 2: add_param_group during training",
    worlds=(2, 3),
)
def test_a_group_that_is_added_later_trains_from_then_on(world):
    """A group added during training MUST be updated from the next step on, with its options."""
    toy = fitting(world)
    groups = {2: first_two, 3: first_three}[world.size]
    dropped = Hint(
        "the options of the added group were dropped: those of the constructor are used",
        lambda: alone(grows, world.size, groups=groups, toy=toy),
    )
    script = (grows_with_a_rate, world.size)
    same_as_unsharded(world, *script, groups=groups, hints=[dropped], toy=toy)


def gets_one_more(run):
    """Weights of a run to which a group of one parameter is added after the first step."""
    run.step(1)
    run.optimizer.add_param_group({"params": list(run.parameters.values())[2:3], "lr": 0.5})
    return run.steps(2, 3)


@clause(
    "zero1.groups.added-to-an-idle-rank",
    source="contract: added-groups, any-parameters; "
    "an inner optimizer is built where there is something to own, and never later",
    worlds=(3, 4),
)
def test_a_rank_that_owned_nothing_updates_what_it_owns_later(world):
    """A rank that owned nothing MUST update what it owns of a group that is added later."""
    same_as_unsharded(world, gets_one_more, groups=two_parameters)


@clause("zero1.groups.rate-set-by-closure", source="contract: closure-options; torch.optim")
def test_a_rate_that_a_closure_sets_counts_in_its_step(world):
    """A rate that the closure of a step sets MUST count in that step, and stay."""
    options: dict[str, Any] = {"groups": all_in_one, "toy": fitting(world)}
    ranks = world.run(in_ranks, with_closure, 0.5, **options)

    late = Hint("with the rate from before the closure", alone(with_closure, **options)[0])
    weights = [seen for seen, *_ in ranks]
    like_unsharded(weights, lambda run: with_closure(run, 0.5)[0], hints=[late], **options)


def halves(parameters):
    """Two groups with options of their own."""
    every = list(parameters.values())
    middle = len(every) // 2
    return [
        {"params": every[:middle], "lr": 0.5},
        {"params": every[middle:], "betas": (0.5, 0.75)},
    ]


GIVEN = (("lr",), ("lr", "betas"))
"""What the caller has given of the options of those groups, there or to the constructor."""


def frozen_halves(parameters):
    """The same, some of them frozen."""
    return halves(
        {name: p.requires_grad_(i % 3 < 2) for i, (name, p) in enumerate(parameters.items())}
    )


def what_groups_say(ctx, toy, groups):
    """Groups by names of parameters, and what the optimizer is."""
    return _described(Run(sharded(ctx), toy=toy, groups=groups))


def _described(run):
    names = {id(p): name for name, p in run.parameters.items()}
    groups = run.optimizer.param_groups
    return {
        "parameters of the groups": [
            [names.get(id(p), "?") for p in group["params"]] for group in groups
        ],
        "options of the groups": [
            {key: group.get(key) for key in given}
            for group, given in zip(groups, GIVEN, strict=False)
        ],
        "type of the returned object": (
            "a torch.optim.Optimizer"
            if isinstance(run.optimizer, torch.optim.Optimizer)
            else type(run.optimizer).__name__
        ),
    }


@clause(
    "zero1.groups.complete",
    source="contract: whole-groups; schedulers and clipping read its groups",
)
@pytest.mark.parametrize("groups", [halves, frozen_halves], ids=["trained", "some-frozen"])
def test_groups_show_all_parameters_with_their_options(world, groups):
    """`param_groups` MUST hold all parameters, in the caller's groups, order and options.

    Frozen ones too: they may train later, and a scheduler or a checkpoint counts them.
    """
    toy = fitting(world)
    ranks = world.run(what_groups_say, toy, groups)

    expected = _described(Run(plain, toy=toy, groups=groups))
    for key, value in expected.items():
        judge.equal([rank[key] for rank in ranks], value, quantity=key)


def rates(ctx, toy, added):
    """The rates that the groups show: the caller gives none, but to groups that are added."""
    first, *others = TOYS[toy].build(SEED).parameters()
    made = ctx.impl.sharded_optimizer(others, torch.optim.AdamW)
    for rate in added:
        made.add_param_group({"params": [first], "lr": rate})
    return [group.get("lr") for group in made.param_groups]


@clause(
    "zero1.groups.rate-by-default",
    source="contract: rates; "
    "torch.optim.Optimizer: a group has every option; schedulers begin with its rate",
)
def test_groups_show_the_rate_that_nobody_gave(world):
    """Where the caller gives no rate, `param_groups` MUST show the default of `optimizer_cls`."""
    shown = world.run(rates, fitting(world), [])
    judge.equal(shown, [DEFAULT_RATE], quantity="rates of the groups")


# From the signature: an instance would import torch's compiler, two seconds in every run.
DEFAULT_RATE = inspect.signature(torch.optim.AdamW).parameters["lr"].default


@clause("zero1.groups.added-rate", source="contract: added-groups, rates; schedulers read them")
def test_an_added_group_shows_its_rate(world):
    """`param_groups` MUST show the rate of a group that is added."""
    shown = world.run(rates, fitting(world), [0.5])
    judge.equal([groups[1:] for groups in shown], [0.5], quantity="rates of the added groups")


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple-of-groups": tuple,
    "generator-of-groups": iter,
    "generators-of-parameters": lambda groups: [{**g, "params": iter(g["params"])} for g in groups],
}


def bare_halves(parameters):
    """Two groups that say nothing but their parameters."""
    return [{"params": group["params"]} for group in halves(parameters)]


def in_form(ctx, form, toy):
    """Groups and weights of an optimizer whose groups are given in that form."""
    run = Run(sharded(ctx), toy=toy, groups=lambda named: FORMS[form](bare_halves(named)))
    return {"groups": _described(run)["parameters of the groups"], "weights": run.steps(1, 2)}


@clause(
    "zero1.groups.any-iterable",
    source="contract: whole-groups; "
    "torch.optim.Optimizer: an iterable of tensors or of dicts, whose params are iterables",
)
@pytest.mark.parametrize("form", FORMS)
def test_groups_are_taken_from_any_iterable(world, form):
    """Groups, and the parameters of a group, MUST be taken from any iterable, each one once."""
    toy = fitting(world)
    ranks = world.run(in_form, form, toy)

    usual = _described(Run(plain, toy=toy, groups=bare_halves))["parameters of the groups"]
    judge.equal([rank["groups"] for rank in ranks], usual, quantity="parameters of the groups")
    like_unsharded([rank["weights"] for rank in ranks], two_steps, groups=bare_halves, toy=toy)


def two_steps(run):
    """Weights after each of two steps."""
    return run.steps(1, 2)


def callers_groups(ctx, toy):
    """Names of the parameters in the groups that were given, once an optimizer is built."""
    given = []

    def groups(parameters):
        given.extend(halves(parameters))
        return given

    run = Run(sharded(ctx), toy=toy, groups=groups)
    names = {id(p): name for name, p in run.parameters.items()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in given]


@clause(
    "zero1.groups.caller-keeps-theirs",
    source="contract: whole-groups; torch.optim.Optimizer; the groups are used again",
)
def test_the_callers_groups_stay_whole(world):
    """The caller's group dicts MUST still name all parameters after construction."""
    toy = fitting(world)
    expected = _described(Run(plain, toy=toy, groups=halves))["parameters of the groups"]
    judge.equal(world.run(callers_groups, toy), expected, quantity="parameters of the given groups")


def after_zero_grad(ctx, toy):
    """Names of the gradients that are left."""
    run = Run(sharded(ctx), toy=toy)
    run.step(1)
    run.deal(2)
    run.optimizer.zero_grad()
    return [name for name, p in run.parameters.items() if p.grad is not None and bool(p.grad.any())]


@clause("zero1.groups.zero-grad", source="contract: zero-grad")
def test_zero_grad_clears_what_others_own(world):
    """`zero_grad` MUST clear the gradients of all parameters, also of those that others own.

    Otherwise backward adds to what is left, and the mean over ranks carries it to the owner.
    """
    judge.equal(
        world.run(after_zero_grad, fitting(world)), [], quantity="gradients left after zero_grad"
    )


def in_two_groups(ctx, groups, toy):
    """Each process group trains on different gradients."""
    group = ctx.split(groups)
    run = Run(sharded(ctx, group), optimizer="sgd", toy=toy)
    own = next(i for i, ranks in enumerate(groups) if ctx.rank in ranks)
    if own == 1:  # the groups need not even take as many steps
        return run.steps(11)
    return run.steps(1, 2)


@clause(
    "zero1.group.keeps-to-itself",
    source="contract: equal-ranks; ZeroRedundancyOptimizer, process_group",
    worlds=(3, 4),
)
def test_process_groups_train_apart(world):
    """In a sub-group the ranks MUST update and exchange among themselves alone."""
    groups = {3: ((0, 2), (1,)), 4: ((0, 2), (1, 3))}[world.size]
    toy = fitting(world)
    ranks = world.run(in_two_groups, groups, toy)

    for number, members in enumerate(groups):
        seen = [ranks[rank] for rank in members]
        steps = (11,) if number == 1 else (1, 2)
        like_unsharded(seen, Run.steps, *steps, optimizer="sgd", toy=toy)
