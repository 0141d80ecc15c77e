"""State: divided over the ranks while training, and whole where it is saved.

"Sharded" is the claim in the name, and the one that the best-known course tests do not look at: a
plain AdamW on every rank passes them. Saved, the state has to be what the plain optimizer would
have saved, so that a run goes on at another number of ranks, or on one. See Rajbhandari et al.
2020, sections 3.1 and 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from spec_tests.chapters.zero1.runs import DEPTH, TOY, state_bytes, steps, wide
from spec_tests.programs.law import judge_updates, same_as_alone
from spec_tests.programs.laws import footprint
from spec_tests.programs.stepped import FAULTS, Divided, Stepped
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(needs=("sharded_optimizer",), level="correct", worlds=(2, 3))
GROUPED = f"{TOY} adamw own-options"
BOTH = ("sharded_optimizer", "full_optimizer_state")
PAPER = "Rajbhandari et al. 2020, section 5.1; nanotron issue 37"
PORTABLE = "ZeroRedundancyOptimizer.consolidate_state_dict and load_state_dict"

MODEL_WIDTH = 96  # which two and three ranks divide
# For each parameter two moments and a counter, on cache lines of their own.
PADDING_BYTES = 3 * 64 * 2 * DEPTH


def bytes_of_state(ctx, load, adds=False):
    """Bytes of this rank's state for a model in which matrices and biases alternate."""
    return state_bytes(ctx, lambda: wide(MODEL_WIDTH), load=load, adds=adds)


def divided(parts, given):
    """The ranks' parts add up to the whole."""
    __tracebackhide__ = True
    whole = 2 * sum(p.nbytes for p in wide(MODEL_WIDTH).parameters())
    allowed = whole + len(parts) * PADDING_BYTES
    judge.holds(
        sum(parts) <= allowed,
        f"expected at most {allowed} bytes of state over all ranks (the unsharded optimizer's "
        f"{whole}, and counters and padding), got {' + '.join(map(str, parts))}, "
        f"{sum(parts) / whole:.2f} times the unsharded optimizer's",
        likely="nothing is divided: every rank keeps the state of all parameters"
        if all(part >= whole for part in parts)
        else "a rank keeps state of parameters that another one updates",
        given=given,
    )


@clause("zero1.state.divided", level="course", source="contract: state-divided; " + PAPER)
def test_the_parts_of_the_state_add_up_to_the_whole(world):
    """The ranks' state MUST add up to the unsharded optimizer's: every element on one rank."""
    divided(world.run(bytes_of_state, False), "adamw, after two steps")


def sizes_of_state():
    """Bytes of each parameter's state, the largest first."""
    return sorted((2 * p.nbytes for p in wide(MODEL_WIDTH).parameters()), reverse=True)


@clause(
    "zero1.state.balanced",
    source="contract: balanced; Rajbhandari et al. 2020, section 5.1",
    worlds=(3, 4),
)
@pytest.mark.parametrize("adds", [False, True], ids=["at-once", "by-groups"])
def test_no_rank_keeps_more_than_twice_what_is_possible(world, adds):
    """No rank's state MUST exceed twice the larger of its share and the largest parameter's state.

    With one rank for everything the memory that decides is the unsharded one. On two ranks that is
    twice the share, so it shows from three on. Groups may be added one by one.
    """
    sizes = sizes_of_state()
    footprint.at_most(
        world.run(bytes_of_state, False, adds),
        {
            "twice its share": 2 * max(sizes[0], sum(sizes) // world.size),
            "counters and padding": PADDING_BYTES,
        },
        quantity="state",
        likely="one rank owns most parameters",
    )


@clause(
    "zero1.state.evenly-balanced",
    source="contract: balanced; ZeroRedundancyOptimizer: greedy partition by size; Graham 1969",
)
def test_no_rank_keeps_much_more_than_its_share(world):
    """No rank's state SHOULD exceed its share by more than the state of the largest parameter.

    Dealing parameters by number in turn doubles the state of one rank: matrices and biases
    alternate.
    """
    sizes = sizes_of_state()
    footprint.at_most(
        world.run(bytes_of_state, False),
        {
            "its share": sum(sizes) // world.size,
            "the largest parameter's": sizes[0],
            "counters and padding": PADDING_BYTES,
        },
        quantity="state",
        likely="parameters are not dealt by size to all ranks, or nothing is divided",
    )


# A scheduler sets the rate after a step, and a checkpoint is taken before the next.
SCHEDULED = f"{steps(1, 2, 3)}, rate 0.5"


def state_alone(scene):
    """The state dict of the plain optimizer after three steps."""
    stepped = Stepped(scene)
    stepped.follow(SCHEDULED)
    return stepped.state()


def full_state(ctx, scene):
    """What `full_optimizer_state` gives after three steps, flat; and of which groups."""
    stepped = Divided(ctx, scene)
    stepped.follow(SCHEDULED)
    return described(stepped.state())


def described(state):
    """A state dict as tensors by name and the groups as plain data."""
    return {
        "tensors": {
            f"parameter {index}: {key}": torch.as_tensor(value).cpu()
            for index, entry in state["state"].items()
            for key, value in entry.items()
        },
        "groups": [
            {key: group.get(key) for key in ("params", "lr", "betas", "eps", "weight_decay")}
            for group in state["param_groups"]
        ],
    }


@clause("zero1.state.full-equals-unsharded", needs=BOTH, source="contract: unsharded; " + PORTABLE)
def test_the_full_state_is_the_unsharded_optimizers(world):
    """On every rank `full_optimizer_state` MUST be the state dict of the unsharded optimizer.

    Numbers of parameters count over all groups, as in torch.optim; values, counters and options
    are those of the plain optimizer after the same steps.
    """
    ranks = world.run(full_state, GROUPED)

    expected = described(state_alone(GROUPED))
    judge.equal([rank["groups"] for rank in ranks], expected["groups"], quantity="param_groups")
    judge.tensors(
        [rank["tensors"] for rank in ranks],
        expected["tensors"],
        quantity="state of the unsharded optimizer",
        within=rounding(torch.float32, terms=8, depth=4),
    )


@clause(
    "zero1.state.export-is-inert",
    judges=("sharded_optimizer",),
    needs=BOTH,
    source="contract: inert; "
    "pytorch issue 164929: an optimizer is stepped to learn what its state will be",
    worlds=(2,),
)
def test_taking_the_full_state_changes_nothing(world, subject):
    """Exporting the full state, also before the first step, MUST NOT change later training."""
    program = f"save, {steps(1)}, save, {steps(2)}, save, {steps(3)}, save"
    same_as_alone(world, subject, f"{TOY} adamw: {program}")


BEGUN, GO_ON = f"{steps(1, 2)}, save", f"load copied, {steps(3, 4, 6)}"
HELD = steps(5)


def goes_on(ctx, scene, saved):
    """Weights of a run that goes on from what was saved; what it held before must not matter."""
    stepped = Divided(ctx, scene)
    stepped.follow(HELD)
    stepped.saved = saved
    return stepped.follow(GO_ON)


def loaded_counters(ctx):
    """This rank's counters of steps, one step after a load that says 257: bfloat16 has only 256."""
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    alone = torch.optim.AdamW([weight], lr=0.01)
    alone.step()
    alone.state[weight]["step"].fill_(257)
    optimizer = ctx.impl.sharded_optimizer([weight], torch.optim.AdamW, lr=0.01)
    optimizer.load_state_dict(alone.state_dict())
    optimizer.step()
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, Mapping)]
    return [float(entry["step"]) for entry in entries if "step" in entry]


@clause("zero1.state.resumes-at-any-size", source="contract: load; " + PORTABLE, worlds=(1, 2, 3))
def test_it_goes_on_from_the_unsharded_optimizers_state(world):
    """Loaded from the unsharded state dict, training MUST go on as the unsharded optimizer does.

    That is what another world size saved, by the clause on the full state. Moments, counters and
    options take effect at the first step; what the optimizer held before is gone.
    """
    begun = f"rate 0.5, {BEGUN}"
    alone = Stepped(GROUPED)
    before = alone.follow(begun)
    ranks = world.run(goes_on, GROUPED, alone.saved)

    def forgotten():
        own = Stepped(GROUPED, "forgets")
        own.follow(HELD)
        own.saved = alone.saved
        return before + own.follow(GO_ON)

    wrong = {FAULTS["forgets"]: forgotten}
    judge_updates([before + seen for seen in ranks], f"{GROUPED}: {begun}, {GO_ON}", wrong)

    counters = {counter for seen in world.run(loaded_counters) for counter in seen}
    judge.holds(
        counters <= {258.0},
        f"expected the counter 258 a step after the load of 257, got {sorted(counters)}",
        likely="the counter of steps was cast to the dtype of its parameter",
        given="AdamW, a parameter in bfloat16",
    )


@clause("zero1.state.divided-after-load", source="contract: divided-after-load; " + PAPER)
def test_a_loaded_state_is_divided_as_well(world):
    """After `load_state_dict` the ranks' state MUST still add up to the unsharded optimizer's.

    torch.optim's own method keeps what it is given: a resumed run then needs W times the memory of
    the run that it resumes, on the machine where that one just fitted.
    """
    divided(world.run(bytes_of_state, True), "after load_state_dict")


def round_trip(ctx, scene):
    """Weights of a run that goes on in a new optimizer from the full state of the first."""
    first, second = (Divided(ctx, scene) for _ in range(2))
    before = first.follow(BEGUN)
    second.saved = first.saved
    return before + second.follow(GO_ON)


@clause("zero1.state.round-trip", needs=BOTH, source="contract: load, unsharded; " + PORTABLE)
def test_its_own_full_state_loads(world):
    """A run that goes on from its own full state MUST give the weights of an uninterrupted one."""
    scene = f"{TOY} adamw"
    judge_updates(world.run(round_trip, scene), f"{scene}: {BEGUN}, {GO_ON}")


def own_state_dict(ctx, scene):
    """`state_dict()` without any consolidation: tensors by name, or the error."""
    stepped = Divided(ctx, scene)
    stepped.follow(steps(1, 2, 3))
    state_dict = stepped.optimizer.state_dict
    try:
        state = state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    entries = state.get("state", {}) if isinstance(state, dict) else {}
    return described({"state": entries, "param_groups": []})["tensors"]


@clause(
    "zero1.state.no-partial-state-dict",
    source="contract: state-dict; ZeroRedundancyOptimizer.state_dict raises before consolidation",
    worlds=(2,),
)
def test_a_state_dict_is_whole_or_an_error(world):
    """`state_dict()` MUST be whole or raise: a partial state would load without an error."""
    scene = f"{TOY} adamw"
    ranks = world.run(own_state_dict, scene)

    expected = described(state_alone(scene))["tensors"]
    for rank, seen in enumerate(ranks):
        if not isinstance(seen, str):
            judge.holds(
                seen.keys() == expected.keys(),
                f"rank {rank}: expected state_dict() to have all {len(expected)} entries or to "
                f"raise, got {len(seen)}",
                likely="it is the state dict of the rank's own part; saved by rank 0, the rest is "
                "lost"
                if seen
                else "the state is in an inner optimizer, which `state_dict` does not look at",
            )
