"""Updates: after every step all ranks hold what the unsharded optimizer would have made.

Dividing the state is an arrangement of memory and must not be seen in any weight. Adam hides
factors and frozen or unused parameters hide decay, so the comparison is with the plain optimizer,
step by step, over several steps: moments begin to matter at the second. See Rajbhandari et al.
2020, section 5.1.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.chapters.zero1.runs import OPTIMIZERS, TOY, TWO, steps
from spec_tests.programs.law import judge_updates, same_as_alone, situations
from spec_tests.programs.laws import refusal
from spec_tests.programs.stepped import Divided, Stepped
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=("sharded_optimizer",), level="correct", worlds=(2, 3))
holds = rows(clause, same_as_alone)
FOUR = steps(1, 2, 3, 4)
PAPER = "Rajbhandari et al. 2020, section 5.1; CS336 assignment 2, sharded optimizer"

test_equals_unsharded = holds(
    "zero1.step.equals-unsharded",
    "After every step all ranks MUST hold the weights that the unsharded optimizer gives.",
    # On parameters of any size: other clauses are judged on such as all ranks divide.
    {kind: f"ragged {kind}: {FOUR}" for kind in ("sgd", "momentum", "adam", "adamw")},
    level="course",
    source="contract: same-values; " + PAPER,
)

test_tied_parameter = holds(
    "zero1.step.tied-parameter",
    "A parameter that is used under two names MUST be updated once.",
    f"tied adamw: {FOUR}",
    level="course",
    source="contract: same-values; CS336 assignment 2, the tied toy model of its optimizer tests",
    worlds=(2,),
)

test_layouts = holds(
    "zero1.step.layouts",
    "Parameters of any memory layout MUST have every element in its place after a step.",
    # A flat copy of a transposed or channels-last parameter has its elements in another order.
    {toy: f"{toy} adamw: {FOUR}" for toy in ("conv", "strided")},
    source="contract: any-parameters; "
    "ZeroRedundancyOptimizer broadcasts each parameter as it lies in memory",
    worlds=(2,),
)

test_parts_of_larger_tensors = holds(
    "zero1.step.parts-of-larger-tensors",
    "A parameter that is a part of a larger tensor MUST be updated, in all its elements.",
    # Between its rows lie other elements. A broadcast of it sends those, and not its last rows.
    f"gapped adamw: {FOUR}",
    level="production",
    source="contract: larger-tensor; "
    "ProcessGroupGloo sends as many elements as there are, from where the first one lies",
    worlds=(2,),
    transports=("gloo", "cuda"),  # simulated ranks send the elements themselves
)

test_dtypes = holds(
    "zero1.step.dtypes",
    "Parameters of unequal dtypes MUST be updated in their own, or be refused with an error.",
    {"mixed": f"mixed adamw: {FOUR}", "double": f"two-dtypes adamw: {FOUR}"},
    source="contract: unequal-dtypes; ZeroRedundancyOptimizer refuses unequal dtypes",
    worlds=(2,),
)

test_frozen_untouched = holds(
    "zero1.step.frozen-untouched",
    "Frozen parameters without a gradient MUST keep their values, whatever the weight decay.",
    f"{TOY} adamw not-the-middle: {FOUR}",
    source="contract: absent-gradients; torch.optim: a parameter without a gradient is skipped",
)

test_weights_of_others = holds(
    "zero1.step.weights-of-others",
    "A step MUST begin with the weights as they are, also where others have written them.",
    # A copy made at construction brings the old weights back without an error.
    {
        kind: f"{TOY} {kind}: {steps(1)}, write parameters, {steps(2, 3)}"
        for kind in ("sgd", "adamw")
    },
    source="contract: current-weights; model.load_state_dict",
)

test_skips_absent_gradients = holds(
    "zero1.step.skips-absent-gradients",
    "Where a gradient is None a step MUST NOT decay the weight, move its moments or count.",
    f"{TOY} adamw: deal 0 half, update, deal 1 all, update, deal 2 one, update, "
    "deal 3 half, update",
    source="contract: absent-gradients; Megatron-LM issues 5974, 5976; torch.optim skips None",
)

test_after_zero_grad = holds(
    "zero1.step.after-zero-grad",
    "`zero_grad` MUST leave None, or zeros with `set_to_none=False` where it takes that.",
    # Zeros in place of None move whatever is not used in the next step: momentum and decay do.
    {f"to-{how}": f"{TOY} adamw: {steps(1)}, zero_grad {how}, update" for how in ("none", "zero")},
    source="contract: zero-grad-zeros, zero-grad; torch.optim.Optimizer.zero_grad, set_to_none",
)

test_more_ranks_than_parameters = holds(
    "zero1.step.more-ranks-than-parameters",
    "With more ranks than parameters every rank MUST still hold the updated weights.",
    f"{TWO} adamw: {steps(1, 2)}",
    source="contract: any-parameters; "
    "ZeroRedundancyOptimizer's tests; an empty parameter list is an error in torch.optim",
    worlds=(3, 4),
)

test_thawed_later = holds(
    "zero1.step.thawed-later",
    "Parameters that were frozen at construction MUST be updated once they have gradients.",
    f"{TOY} adamw not-the-middle: {steps(1)}, thaw 1, thaw 2, {steps(2, 3)}",
    source="contract: whole-groups; fine-tuning by stages",
)


def alternating(ctx, scenes):
    """Weights of several optimizers, whose steps alternate."""
    runs = [Divided(ctx, scene) for scene in scenes]
    seen: list[list[Any]] = [[] for _ in runs]
    for number in range(1, 5):
        for found, run in zip(seen, runs, strict=True):
            found += run.follow(steps(number))
    return seen


@clause(
    "zero1.step.two-optimizers",
    source="contract: optimizers-apart; "
    "adversarial training; a dict in the class, not the instance, in a solution of CS336",
    worlds=(2,),
)
def test_two_optimizers_do_not_disturb_each_other(world, subject):
    """Two optimizers whose steps alternate MUST each update their own parameters."""
    scenes = f"{TOY} adamw", "tied momentum"
    ranks = world.run(alternating, scenes)

    for number, scene in enumerate(scenes):
        judge_updates([seen[number] for seen in ranks], f"{scene}: {FOUR}")


def with_closure(stepped):
    """Weights after steps with a closure, its losses, and how often it was evaluated."""
    seen: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    evaluations = 0

    def closure() -> Any:
        nonlocal evaluations
        evaluations += 1
        stepped.optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in stepped.parameters.values()]).sum()
        loss.backward()
        return loss.detach()

    for number in range(1, 4):
        step = stepped.optimizer.step
        losses[f"step {number}"] = step(closure=closure) if number == 2 else step(closure)
        seen |= {f"{name} after step {number}": w for name, w in stepped.weights().items()}
    return seen, losses, evaluations


def closure_in_ranks(ctx, scene):
    """The same; None where the optimizer's class is refused at construction, on any rank."""
    with refusal.caught() as error:
        stepped = Divided(ctx, scene)
    errors = [error["error"]] * ctx.world_size
    dist.all_gather_object(errors, error["error"])
    return None if any(errors) else with_closure(stepped)


@clause("zero1.step.closure", source="contract: closure; torch.optim.Optimizer")
@situations({"all": f"{TOY} adamw", "two": f"{TWO} adamw", "called-as-is": f"{TOY} as-is"})
def test_a_closure_is_evaluated_and_its_loss_returned(world, subject, situation):
    """`step(closure)` MUST evaluate the closure once, before updating, and return its loss.

    Evaluated twice, a forward with dropout or a fresh batch trains on something else; and a rank
    that owns nothing has a loss to return, too. Some optimizers enable gradients for the closure,
    others call it as it is: a `step` under `no_grad` around those breaks its backward.
    """
    ranks = world.run(closure_in_ranks, situation)
    if None in ranks:  # a class that it does not know, or fewer parameters than ranks
        judge.holds(situation != f"{TOY} adamw", "expected AdamW to be taken, got an error")
        return
    weights, losses, evaluations = zip(*ranks, strict=True)
    missing = [rank for rank, returned in enumerate(losses) if None in returned.values()]
    judge.holds(
        not missing,
        f"expected `step` to return the closure's loss, got None on ranks {missing}",
        likely=""
        if any(evaluations[rank] for rank in missing)
        else "the closure was not called there: a rank that owns no parameter has to call it, too",
    )

    expected, wanted, times = with_closure(Stepped(situation))
    within = rounding(torch.float32, terms=8, depth=4)
    quantity = "weight that the unsharded optimizer gives"
    judge.tensors(weights, expected, quantity=quantity, within=within)
    quantity = "loss of the closure, which `step` returns"
    judge.tensors(losses, wanted, quantity=quantity, within=within)
    judge.equal(evaluations, times, quantity="number of evaluations in three steps to be")


def left_gradients(ctx, scene):
    """The gradients of two steps, as they were dealt and as each step leaves them."""
    stepped = Divided(ctx, scene)
    dealt: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for number in (1, 2):
        stepped.deal(str(number), "all")
        named = [(f"{name} of step {number}", p) for name, p in stepped.parameters.items()]
        dealt |= {name: copy.deepcopy(p.grad) for name, p in named}
        stepped.update()
        left |= {name: p.grad for name, p in named}
    return dealt, left


@clause(
    "zero1.step.keeps-gradients",
    level="production",
    source="contract: gradients-stay; "
    "torch.optim: `zero_grad` clears, `step` does not; what logs norms reads them after it",
)
def test_a_step_leaves_gradients_as_they_are(world, subject):
    """A step MUST leave every gradient as it was, those of parameters of other ranks as well."""
    dealt, left = zip(*world.run(left_gradients, f"{TOY} adamw"), strict=True)

    judge.tensors(left, dealt, quantity="gradient after the step", given=f"toy {TOY}")


def own_gradients(ctx, scene):
    """Weights after steps with gradients that are another power on each rank, and then equal."""
    stepped = Divided(ctx, scene)
    start, end = stepped.weights(), []
    for number in (1, 2):
        # The second is equal: Adam does not feel a constant factor.
        own = 4.0**ctx.rank if number == 1 else 1.0
        for parameter in stepped.parameters.values():
            parameter.grad = torch.full_like(parameter, own)
        stepped.update()
        end.append(stepped.weights())
    return {"start": start, "after one": end[0], "after two": end[1]}


def own_weights(ctx, scene):
    """Weights after two steps that begin with other weights on each rank."""
    stepped = Divided(ctx, scene)
    with torch.no_grad():
        for parameter in stepped.parameters.values():
            parameter.add_(ctx.rank)
    for number in "12":
        stepped.deal(number, "all")
        stepped.update()
    return {"after two": stepped.weights()}


@clause("zero1.step.equal-on-all-ranks", source="contract: equal-ranks")
@pytest.mark.parametrize("body", [own_gradients, own_weights], ids=["gradients", "weights"])
def test_all_ranks_end_with_equal_bits(world, subject, body):
    """A step MUST leave all ranks with equal bits, even where gradients or weights differed.

    Replicas drift apart by rounding, by a kernel that sums in another order. With a sharded
    optimizer they cannot: what a rank does not own it receives.
    """
    ranks = world.run(body, f"{TOY} adamw")

    judge.same_on_all_ranks([rank["after two"] for rank in ranks], quantity="weight")


@clause(
    "zero1.step.one-owner-decides",
    level="production",
    source="contract: one-owner; "
    "pytorch pull request 54736; ZeroRedundancyOptimizer broadcasts from the owner",
)
def test_each_element_is_updated_by_one_rank(world, subject):
    """Each element MUST be updated by one rank, from that rank's gradient alone.

    Averaging weights after everyone has stepped, or reducing gradients once more, gives the right
    numbers for the price of what was to be saved.
    """
    ranks = world.run(own_gradients, f"{TOY} sgd")

    rate, own = OPTIMIZERS["sgd"][1]["lr"], [4.0**rank for rank in range(world.size)]
    for rank, seen in enumerate(ranks):
        for name, start in seen["start"].items():
            moved = (start - seen["after one"][name]) / rate
            for total in moved.unique().tolist():
                judge.holds(
                    total in own,
                    f"rank {rank}, {name!r}: expected an update from one rank's gradient, {own}, "
                    f"got one from {total:g}",
                    likely="several ranks' gradients or weights were summed or averaged in the "
                    "step",
                )


def late(ctx, scene):
    """Weights right after each step, where another rank is late in every step."""
    stepped, seen = Divided(ctx, scene), []
    for number in range(ctx.world_size):
        stepped.deal(str(number), "all")
        if ctx.rank == number:
            ctx.be_late(0.05)
        stepped.update()
        seen.append(("update", stepped.weights()))
    return seen


@clause(
    "zero1.step.waits-for-late-owners",
    source="contract: waits; DeepSpeed issues 5545, 6351, 8061: an exchange that overlaps too far",
)
def test_new_weights_are_there_when_step_returns(world, subject):
    """When `step` returns, the weights MUST be the new ones, however late their owner was."""
    ranks = world.run(late, f"{TOY} sgd")

    judge_updates(ranks, f"{TOY} sgd: {steps(*range(world.size))}")
