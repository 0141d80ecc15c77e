"""Parameter groups: options belong to groups, schedulers change them, and both must be obeyed.

A sharded optimizer holds an inner optimizer for the parameters of its rank. Users and schedulers
write into the outer groups, so options that are copied only once go stale without an error: the
warm-up never warms up. The second half is about process groups, which are not the world.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_tests.chapters.zero1.runs import TOY, named, same_as_unsharded, steps
from spec_tests.programs.law import judge_updates, same_as_alone
from spec_tests.programs.stepped import Divided
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle

clause = clauses(judges=("sharded_optimizer",), level="correct")
holds = rows(clause, same_as_alone)
GROUPS = "torch.optim: per-parameter options; pytorch issue 60284"

test_own_options = holds(
    "zero1.groups.own-options",
    "Every parameter group MUST be updated with its own options, also where a rank has none of it.",
    # The first of several has one parameter: on all ranks but one it is empty.
    {case: f"{TOY} adamw {case}: {steps(1, 2, 3)}" for case in ("own-options", "one-rate")},
    level="course",
    source="contract: same-values; " + GROUPS,
    worlds=(2, 3),
)

LIVE = f"{TOY} adamw: {steps(1)}, rate 0.5, {steps(2)}, decay, {steps(3)}, rate 0.5, {steps(4)}"

test_live = holds(
    "zero1.groups.live",
    "A value written into `param_groups` MUST take effect at the next step, on all ranks.",
    LIVE,
    source="contract: live-groups; " + GROUPS,
)


def scheduled(stepped):
    """A warm-up, driven by PyTorch's own scheduler."""
    heard = copy.deepcopy(stepped.optimizer) if stepped.fault else stepped.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(heard, lambda step: (step + 1) / 4)
    seen: oracle.Named = {}
    for number in range(1, 5):
        stepped.deal(str(number), "all")
        stepped.update()
        if stepped.fault:
            heard.step()  # or the scheduler warns
        scheduler.step()
        seen |= {f"{name} after step {number}": w for name, w in stepped.weights().items()}
        seen[f"the rate after step {number}"] = torch.tensor(scheduler.get_last_lr())
    return seen


@clause(
    "zero1.groups.schedulers",
    source="contract: live-groups; "
    "torch.optim.lr_scheduler; upstream's own test zeroes the gradients before its step",
)
def test_schedulers_drive_it(world, subject):
    """A torch.optim scheduler MUST drive the sharded optimizer as it drives the unsharded one."""
    same_as_unsharded(world, scheduled, f"{TOY} adamw")


test_added_later = holds(
    "zero1.groups.added-later",
    "A group added during training MUST be updated from the next step on, with its options.",
    f"{TOY} adamw: {steps(1)}, add_group, {steps(2, 3)}",
    level="course",
    source="contract: added-groups; CS336 assignment 2: add_param_group during training",
    worlds=(2, 3),
)

test_rate_set_by_closure = holds(
    "zero1.groups.rate-set-by-closure",
    "A rate that the closure of a step sets MUST count in that step, and stay.",
    f"{TOY} adamw: closure 1 sets-the-rate, closure 2 sets-the-rate, {steps(3)}",
    source="contract: closure-options; torch.optim",
)


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


def what_groups_say(ctx, groups):
    """Groups by names of parameters, and what the optimizer is."""
    parameters = named()
    made = ctx.impl.sharded_optimizer(groups(parameters), torch.optim.AdamW, lr=0.01)
    return _described(made, parameters)


def _names(groups, parameters):
    names = {id(p): name for name, p in parameters.items()}
    return [[names.get(id(p), "?") for p in group["params"]] for group in groups]


def _described(optimizer, parameters):
    groups = optimizer.param_groups
    return {
        "parameters of the groups": _names(groups, parameters),
        "options of the groups": [
            {key: group.get(key) for key in given}
            for group, given in zip(groups, GIVEN, strict=False)
        ],
        "type of the returned object": (
            "a torch.optim.Optimizer"
            if isinstance(optimizer, torch.optim.Optimizer)
            else type(optimizer).__name__
        ),
    }


def _alone(groups):
    parameters = named()
    return _described(torch.optim.AdamW(groups(parameters), lr=0.01), parameters)


@clause(
    "zero1.groups.complete",
    source="contract: whole-groups; schedulers and clipping read its groups",
)
@pytest.mark.parametrize("groups", [halves, frozen_halves], ids=["trained", "some-frozen"])
def test_groups_show_all_parameters_with_their_options(world, subject, groups):
    """`param_groups` MUST hold all parameters, in the caller's groups, order and options.

    Frozen ones too: they may train later, and a scheduler or a checkpoint counts them.
    """
    ranks = world.run(what_groups_say, groups)

    for key, value in _alone(groups).items():
        judge.equal([rank[key] for rank in ranks], value, quantity=key)


def rates(ctx, added):
    """The rates that the groups show: the caller gives none, but to groups that are added."""
    first, *others = named().values()
    made = ctx.impl.sharded_optimizer(others, torch.optim.AdamW)
    for rate in added:
        made.add_param_group({"params": [first], "lr": rate})
    return [group.get("lr") for group in made.param_groups]


@clause(
    "zero1.groups.rate-by-default",
    source="contract: rates; "
    "torch.optim.Optimizer: a group has every option; schedulers begin with its rate",
)
def test_groups_show_the_rate_that_nobody_gave(world, subject):
    """Where the caller gives no rate, `param_groups` MUST show the default of `optimizer_cls`."""
    shown = world.run(rates, [])
    judge.equal(shown, [DEFAULT_RATE], quantity="rates of the groups")


# From the signature: an instance would import torch's compiler, two seconds in every run.
DEFAULT_RATE = inspect.signature(torch.optim.AdamW).parameters["lr"].default


@clause("zero1.groups.added-rate", source="contract: added-groups, rates; schedulers read them")
def test_an_added_group_shows_its_rate(world, subject):
    """`param_groups` MUST show the rate of a group that is added."""
    shown = world.run(rates, [0.5])
    judge.equal([groups[1:] for groups in shown], [0.5], quantity="rates of the added groups")


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple-of-groups": tuple,
    "generator-of-groups": iter,
    "generators-of-parameters": lambda groups: [{**g, "params": iter(g["params"])} for g in groups],
}


def bare_halves(parameters):
    """Two groups that say nothing but their parameters."""
    return [{"params": group["params"]} for group in halves(parameters)]


def in_form(ctx, form):
    """Groups by names of parameters, where they are given in that form."""
    return what_groups_say(ctx, lambda named: FORMS[form](bare_halves(named)))


@clause(
    "zero1.groups.any-iterable",
    source="contract: whole-groups; "
    "torch.optim.Optimizer: an iterable of tensors or of dicts, whose params are iterables",
)
@pytest.mark.parametrize("form", FORMS)
def test_groups_are_taken_from_any_iterable(world, subject, form):
    """Groups, and the parameters of a group, MUST be taken from any iterable, each one once."""
    ranks = world.run(in_form, form)

    key = "parameters of the groups"
    judge.equal([rank[key] for rank in ranks], _alone(bare_halves)[key], quantity=key)


def callers_groups(ctx):
    """Names of the parameters in the groups that were given, once an optimizer is built."""
    parameters = named()
    given = halves(parameters)
    ctx.impl.sharded_optimizer(given, torch.optim.AdamW, lr=0.01)
    return _names(given, parameters)


@clause(
    "zero1.groups.caller-keeps-theirs",
    source="contract: whole-groups; torch.optim.Optimizer; the groups are used again",
)
def test_the_callers_groups_stay_whole(world, subject):
    """The caller's group dicts MUST still name all parameters after construction."""
    expected = _alone(halves)["parameters of the groups"]
    judge.equal(world.run(callers_groups), expected, quantity="parameters of the given groups")


def after_zero_grad(ctx, scene):
    """Names of the gradients that are left."""
    stepped = Divided(ctx, scene)
    stepped.follow(f"{steps(1)}, deal 2 all, zero_grad none")
    gradients = {name: p.grad for name, p in stepped.parameters.items()}
    return [name for name, gradient in gradients.items() if gradient is not None and gradient.any()]


@clause("zero1.groups.zero-grad", source="contract: zero-grad")
def test_zero_grad_clears_what_others_own(world, subject):
    """`zero_grad` MUST clear the gradients of all parameters, also of those that others own.

    Otherwise backward adds to what is left, and the mean over ranks carries it to the owner.
    """
    left = world.run(after_zero_grad, f"{TOY} adamw")
    judge.equal(left, [], quantity="gradients left after zero_grad")


IN_GROUPS = {3: ("apart", ((0, 2), (1,))), 4: ("every-second", ((0, 2), (1, 3)))}
APART = steps(1, 2), steps(11)  # the groups need not even take as many steps


def in_two_groups(ctx, scene, first):
    """Each process group trains on different gradients."""
    return Divided(ctx, scene).follow(APART[ctx.rank not in first])


@clause(
    "zero1.group.keeps-to-itself",
    source="contract: equal-ranks; ZeroRedundancyOptimizer, process_group",
    worlds=(3, 4),
)
def test_process_groups_train_apart(world, subject):
    """In a sub-group the ranks MUST update and exchange among themselves alone."""
    word, groups = IN_GROUPS[world.size]
    scene = f"{TOY} sgd {word}"
    ranks = world.run(in_two_groups, scene, groups[0])

    for members, program in zip(groups, APART, strict=True):
        judge_updates([ranks[rank] for rank in members], f"{scene}: {program}")
