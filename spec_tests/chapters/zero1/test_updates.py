"""Updates: after every step all ranks hold what the unsharded optimizer would have made.

Dividing the state is an arrangement of memory and must not be seen in any weight. Adam hides
factors and frozen or unused parameters hide decay, so the comparison is with the plain optimizer,
step by step, over several steps: moments begin to matter at the second. See Rajbhandari et al.
2020, section 5.1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.chapters.zero1.runs import (
    OPTIMIZERS,
    TOY,
    USUAL,
    Run,
    all_in_one,
    alone,
    as_unsharded_or_refused,
    fitting,
    gradient,
    in_ranks,
    like_unsharded,
    same_as_unsharded,
    sharded,
    tolerance,
    trains,
    two_parameters,
    with_closure,
)
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.fingerprint import contribution, digits
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(needs=("sharded_optimizer",), level="correct", worlds=(2, 3))
FOUR = (1, 2, 3, 4)
PAPER = "Rajbhandari et al. 2020, section 5.1; CS336 assignment 2, sharded optimizer"


@clause("zero1.step.equals-unsharded", level="course", source="contract: same-values; " + PAPER)
@pytest.mark.parametrize("optimizer", USUAL)
def test_every_step_gives_the_unsharded_optimizers_weights(world, optimizer):
    """After every step all ranks MUST hold the weights that the unsharded optimizer gives.

    On parameters of any size: other clauses are judged on such as all ranks divide, if need be.
    """
    same_as_unsharded(world, Run.steps, *FOUR, optimizer=optimizer, toy=TOY)


@clause(
    "zero1.step.tied-parameter",
    level="course",
    source="contract: same-values; CS336 assignment 2, the tied toy model of its optimizer tests",
    worlds=(2,),
)
def test_a_tied_parameter_is_updated_once(world):
    """A parameter that is used under two names MUST be updated once."""
    same_as_unsharded(world, Run.steps, *FOUR, toy="tied")


@clause(
    "zero1.step.layouts",
    source="contract: any-parameters; "
    "ZeroRedundancyOptimizer broadcasts each parameter as it lies in memory",
    worlds=(2,),
)
@pytest.mark.parametrize("toy", ["conv", "strided"])
def test_every_memory_layout_arrives_in_its_place(world, toy):
    """Parameters of any memory layout MUST have every element in its place after a step.

    A flat copy of a transposed or channels-last parameter has its elements in another order.
    """
    same_as_unsharded(world, Run.steps, *FOUR, toy=toy)


@clause(
    "zero1.step.parts-of-larger-tensors",
    level="production",
    source="contract: larger-tensor; "
    "ProcessGroupGloo sends as many elements as there are, from where the first one lies",
    worlds=(2,),
)
def test_a_part_of_a_larger_tensor_is_updated(world):
    """A parameter that is a part of a larger tensor MUST be updated, in all its elements.

    Between its rows lie other elements. A broadcast of it sends those, and not its last rows.
    """
    same_as_unsharded(world, Run.steps, *FOUR, toy="gapped")


@clause(
    "zero1.step.dtypes",
    source="contract: unequal-dtypes; ZeroRedundancyOptimizer refuses unequal dtypes",
    worlds=(2,),
)
@pytest.mark.parametrize("toy", ["mixed", "double"])
def test_unequal_dtypes_are_updated_or_refused(world, toy):
    """Parameters of unequal dtypes MUST be updated in their own, or be refused with an error."""
    as_unsharded_or_refused(world, Run.steps, *FOUR, toy=toy)


@clause(
    "zero1.step.frozen-untouched",
    source="contract: absent-gradients; torch.optim: a parameter without a gradient is skipped",
)
def test_frozen_parameters_stay(world):
    """Frozen parameters MUST keep their values, whatever the weight decay."""
    same_as_unsharded(world, Run.steps, *FOUR, groups=partly_frozen)


def partly_frozen(parameters):
    """All parameters, every third one frozen."""
    for parameter in list(parameters.values())[2::3]:
        parameter.requires_grad_(False)
    return all_in_one(parameters)


def changed_by_others(run):
    """Weights of a run in which they are written between two steps, as loading a model does."""
    run.step(1)
    with torch.no_grad():
        for parameter in run.parameters.values():
            parameter.add_(1.0)
    return run.steps(2, 3)


@clause("zero1.step.weights-of-others", source="contract: current-weights; model.load_state_dict")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_that_were_written_between_steps_are_updated(world, optimizer):
    """A step MUST begin with the weights as they are, also where others have written them.

    A copy made at construction brings the old weights back without an error.
    """
    same_as_unsharded(world, changed_by_others, optimizer=optimizer)


def now_and_then(run):
    """Three parameters have no gradient in steps 1 and 3, one of them never; all but one in 4."""
    names = list(run.parameters)
    for number in range(1, 5):
        run.step(number, absent={2: names[2:3], 4: names[1:]}.get(number, names[1:4]))
    return run.seen


@clause(
    "zero1.step.skips-absent-gradients",
    source="contract: absent-gradients; Megatron-LM issues 5974, 5976; torch.optim skips None",
)
def test_a_parameter_without_a_gradient_is_skipped(world):
    """Where a gradient is None a step MUST NOT decay the weight, move its moments or count."""
    same_as_unsharded(world, now_and_then)


def cleared(run, **mode):
    """Weights after a step for which every other gradient was cleared, and none came."""
    run.step(1)
    run.optimizer.zero_grad(**mode)
    for number, parameter in enumerate(run.parameters.values()):
        if number % 2:
            parameter.grad = gradient(parameter, 2000 + number)
    run.optimizer.step()
    run.note("after step 2")
    return run.seen


def cleared_to_zero(run):
    """The same with zeros."""
    return cleared(run, set_to_none=False)


@clause(
    "zero1.step.after-zero-grad",
    source="contract: zero-grad-zeros, zero-grad; torch.optim.Optimizer.zero_grad, set_to_none",
)
@pytest.mark.parametrize("script", [cleared, cleared_to_zero], ids=["to-none", "to-zero"])
def test_zero_grad_leaves_none_unless_zeros_are_asked_for(world, script):
    """`zero_grad` MUST leave None, or zeros with `set_to_none=False` where it takes that.

    Zeros in place of None move whatever is not used in the next step: momentum and decay do.
    """
    as_unsharded_or_refused(world, script)


@clause(
    "zero1.step.more-ranks-than-parameters",
    source="contract: any-parameters; "
    "ZeroRedundancyOptimizer's tests; an empty parameter list is an error in torch.optim",
    worlds=(3, 4),
)
def test_a_rank_that_owns_nothing_takes_part(world):
    """With more ranks than parameters every rank MUST still hold the updated weights."""
    same_as_unsharded(world, Run.steps, 1, 2, groups=two_parameters)


def thawed(run):
    """Weights of a run in which frozen parameters are trained from the second step on."""
    run.step(1)
    for parameter in run.parameters.values():
        parameter.requires_grad_(True)
    return run.steps(2, 3)


@clause("zero1.step.thawed-later", source="contract: whole-groups; fine-tuning by stages")
def test_what_was_frozen_at_first_is_updated_once_it_trains(world):
    """Parameters that were frozen at construction MUST be updated once they have gradients."""
    same_as_unsharded(world, thawed, groups=partly_frozen)


def two_at_once(ctx, toy):
    """Weights of two runs with separate optimizers, whose steps alternate."""
    runs = Run(sharded(ctx), toy=toy), Run(sharded(ctx), toy="tied", optimizer="momentum")
    for number in range(1, 5):
        for run in runs:
            run.step(number)
    return [run.seen for run in runs]


@clause(
    "zero1.step.two-optimizers",
    source="contract: optimizers-apart; "
    "adversarial training; a dict in the class, not the instance, in a solution of CS336",
    worlds=(2,),
)
def test_two_optimizers_do_not_disturb_each_other(world):
    """Two optimizers whose steps alternate MUST each update their own parameters."""
    toy = fitting(world)
    ranks = world.run(two_at_once, toy)

    like_unsharded([one for one, _ in ranks], Run.steps, *FOUR, toy=toy)
    like_unsharded([two for _, two in ranks], Run.steps, *FOUR, toy="tied", optimizer="momentum")


def closure_as_is(ctx, **options):
    """The same; None where the optimizer's class is refused at construction."""
    with refusal.caught() as error:
        run = Run(sharded(ctx), **options)
    return None if error["error"] else with_closure(run)


@clause("zero1.step.closure", source="contract: closure; torch.optim.Optimizer")
@pytest.mark.parametrize("parameters", ["all", "two", "called-as-is"])
def test_a_closure_is_evaluated_and_its_loss_returned(world, parameters):
    """`step(closure)` MUST evaluate the closure once, before updating, and return its loss.

    Evaluated twice, a forward with dropout or a fresh batch trains on something else; and a rank
    that owns nothing has a loss to return, too. Some optimizers enable gradients for the closure,
    others call it as it is: a `step` under `no_grad` around those breaks its backward.
    """
    groups = two_parameters if parameters == "two" else all_in_one
    options: dict[str, Any] = {"groups": groups, "toy": fitting(world)}
    if parameters == "two" and not trains(world, **options):
        return  # `zero1.step.more-ranks-than-parameters` says so
    if parameters == "called-as-is":
        options["optimizer"] = "as-is"
        ranks = world.run(closure_as_is, **options)
        if None in ranks:  # a class that it does not know
            return
    else:
        ranks = world.run(in_ranks, with_closure, **options)
    weights, losses, evaluations = zip(*ranks, strict=True)
    missing = [rank for rank, returned in enumerate(losses) if None in returned.values()]
    judge.holds(
        not missing, f"expected `step` to return the closure's loss, got None on ranks {missing}"
    )

    like_unsharded(weights, lambda run: with_closure(run)[0], **options)
    _, wanted, times = alone(with_closure, **options)
    judge.tensors(
        losses,
        wanted,
        quantity="loss of the closure, which `step` returns",
        within=tolerance("adamw", torch.float32, num_steps=4),
    )
    judge.equal(evaluations, times, quantity="number of evaluations in three steps to be")


def after_steps(run):
    """The gradients of two steps, as each leaves them."""
    left: dict[str, Any] = {}
    for number in (1, 2):
        run.deal(number)
        run.optimizer.step()
        left |= {f"{name} of step {number}": p.grad for name, p in run.parameters.items()}
    return left


@clause(
    "zero1.step.keeps-gradients",
    level="production",
    source="contract: gradients-stay; "
    "torch.optim: `zero_grad` clears, `step` does not; what logs norms reads them after it",
)
def test_a_step_leaves_gradients_as_they_are(world):
    """A step MUST leave every gradient as it was, those of parameters of other ranks as well."""
    toy = fitting(world)
    ranks = world.run(in_ranks, after_steps, toy=toy)

    wanted = alone(after_steps, toy=toy)
    judge.tensors(ranks, wanted, quantity="gradient after the step", given=f"toy {toy}")


def own_gradients(ctx, optimizer, toy):
    """Weights after steps with gradients that are another power on each rank, and then equal."""
    run = Run(sharded(ctx), optimizer=optimizer, toy=toy)
    start = {name: p.detach().clone() for name, p in run.parameters.items()}
    for number in (1, 2):
        # The second is equal: Adam does not feel a constant factor.
        own = contribution(ctx.rank) if number == 1 else 1.0
        for parameter in run.parameters.values():
            parameter.grad = torch.full_like(parameter, own)
        run.optimizer.step()
        run.note(f"after step {number}")
    return {"start": start, "end": run.seen}


def own_weights(ctx, optimizer, toy):
    """Weights after two steps that begin with other weights on each rank."""
    run = Run(sharded(ctx), optimizer=optimizer, toy=toy)
    with torch.no_grad():
        for parameter in run.parameters.values():
            parameter.add_(ctx.rank)
    return {"end": run.steps(1, 2)}


@clause("zero1.step.equal-on-all-ranks", source="contract: equal-ranks")
@pytest.mark.parametrize("body", [own_gradients, own_weights], ids=["gradients", "weights"])
def test_all_ranks_end_with_equal_bits(world, body):
    """A step MUST leave all ranks with equal bits, even where gradients or weights differed.

    Replicas drift apart by rounding, by a kernel that sums in another order. With a sharded
    optimizer they cannot: what a rank does not own it receives.
    """
    ranks = world.run(body, "adamw", fitting(world))

    judge.same_on_all_ranks([rank["end"] for rank in ranks], quantity="weight")


@clause(
    "zero1.step.one-owner-decides",
    level="production",
    source="contract: one-owner; "
    "pytorch pull request 54736; ZeroRedundancyOptimizer broadcasts from the owner",
)
def test_each_element_is_updated_by_one_rank(world):
    """Each element MUST be updated by one rank, from that rank's gradient alone.

    Averaging weights after everyone has stepped, or reducing gradients once more, gives the right
    numbers for the price of what was to be saved.
    """
    ranks = world.run(own_gradients, "sgd", fitting(world))

    rate = OPTIMIZERS["sgd"][1]["lr"]
    for rank, seen in enumerate(ranks):
        for name, start in seen["start"].items():
            moved = (start - seen["end"][f"{name} after step 1"]) / rate
            for total in moved.unique().tolist():
                counts = digits(total, contributors=world.size)
                judge.holds(
                    counts is not None and sum(counts) == 1,
                    f"rank {rank}, {name!r}: expected an update from one rank's gradient, "
                    f"{[contribution(r) for r in range(world.size)]}, got one from {total:g}",
                    likely="several ranks' gradients or weights were summed or averaged in the "
                    "step",
                )


def late(ctx, number_of_steps, toy):
    """Weights right after each step, where another rank is late in every step."""
    run = Run(sharded(ctx), optimizer="sgd", toy=toy)
    for number in range(number_of_steps):
        run.deal(number)
        if ctx.rank == number % ctx.world_size:
            ctx.be_late(0.05)
        run.optimizer.step()
        run.note(f"after step {number}")
    return run.seen


@clause(
    "zero1.step.waits-for-late-owners",
    source="contract: waits; DeepSpeed issues 5545, 6351, 8061: an exchange that overlaps too far",
)
def test_new_weights_are_there_when_step_returns(world):
    """When `step` returns, the weights MUST be the new ones, however late their owner was."""
    toy = fitting(world)
    ranks = world.run(late, world.size, toy)

    stale = [
        {
            f"{n.partition(' ')[0]} after step {i}": t
            for i in range(1, world.size)
            for n, t in seen.items()
            if n.endswith(f"step {i - 1}")
        }
        for seen in ranks
    ]
    like_unsharded(
        ranks,
        Run.steps,
        *range(world.size),
        optimizer="sgd",
        toy=toy,
        hints=[Hint("the weight of the step before: the exchange was not waited for", stale)],
    )
