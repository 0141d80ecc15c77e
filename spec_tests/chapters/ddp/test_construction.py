"""Construction: every rank takes what the first rank has.

A replica that starts from other weights than its peers never recovers: gradients are averaged,
weights are not. The loss falls all the same. See Li et al. 2020, "PyTorch Distributed", section
3.1, and the constructor of torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.ddp.replica import Replica
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=("ddp", "ddp_bucketed"), level="correct")
PAPER = "Li et al. 2020, section 3.1; DistributedDataParallel, constructor"


def construct(ctx, subject, toy, seed):
    """Weights, buffers and their places before and after wrapping, with another seed per rank."""
    replica = Replica(ctx, subject, toy, seed, weights_differ=True)
    return {
        "weights": replica.weights(),
        "buffers": {name: b.clone() for name, b in replica.module.named_buffers()},
        "requires_grad": {name: p.requires_grad for name, p in replica.parameters.items()},
    }


@clause(
    "ddp.construction.parameters-from-first-rank",
    level="course",
    source="contract: first-weights; " + PAPER,
    worlds=(2, 3, 4),
)
@pytest.mark.parametrize("toy", ["mlp", "frozen", "tied"])
def test_every_rank_starts_from_the_first_ranks_parameters(world, subject, toy):
    """After construction every rank MUST hold the first rank's parameters, frozen ones too.

    Ranks are seeded differently on purpose: seeding all alike would hide a missing broadcast.
    """
    judged(world, subject, toy)


@clause(
    "ddp.construction.parameters-of-any-layout",
    source="contract: any-layout, first-weights; " + PAPER,
)
@pytest.mark.parametrize("toy", ["strided", "mixed"])
def test_parameters_of_any_layout_start_from_the_first_ranks(world, subject, toy):
    """After construction parameters of any dtype and memory layout MUST be the first rank's.

    A collective takes contiguous tensors: what is made contiguous for it is a copy.
    """
    judged(world, subject, toy)


@clause(
    "ddp.construction.parts-of-larger-tensors",
    level="production",
    source="contract: larger-tensor; "
    "ProcessGroupGloo sends as many elements as there are, from where the first one lies",
    worlds=(2,),
)
def test_parts_of_larger_tensors_start_from_the_first_ranks(world, subject):
    """A parameter that is a part of a larger tensor MUST start as the first rank's.

    A broadcast of the parameter itself sends what lies between its rows, and not the last rows.
    """
    judged(world, subject, "gapped")


def judged(world, subject, toy):
    """Every rank holds what the first one had."""
    __tracebackhide__ = True
    ranks = world.run(construct, subject, toy, 7)

    own = [oracle.parameters(toy, 7 + rank) for rank in range(world.size)]
    mean = {name: sum(rank[name] for rank in own) / world.size for name in own[0]}
    judge.tensors(
        [rank["weights"] for rank in ranks],
        own[0],
        quantity="first rank's parameter",
        hints=[
            Hint("the rank kept its own weights: nothing was broadcast at construction", own),
            Hint("the ranks' weights were averaged, so the first rank's own were lost", mean),
            Hint("the last rank's weights were taken", own[-1]),
        ],
        given=f"toy {toy!r}, seed 7 + rank",
    )


@clause(
    "ddp.construction.buffers-from-first-rank",
    source="contract: first-buffers; " + PAPER,
    worlds=(2, 3),
)
@pytest.mark.parametrize("toy", ["buffers", "transient"])
def test_every_rank_starts_from_the_first_ranks_buffers(world, subject, toy):
    """After construction every rank MUST hold the first rank's buffers, integers and booleans too.

    Running statistics that differ between ranks make evaluation depend on the rank that does it.
    """
    ranks = world.run(construct, subject, toy, 7)

    own = [oracle.buffers(toy, 7 + rank) for rank in range(world.size)]
    why = "; with persistent=False it is not in state_dict()" if toy == "transient" else ""
    judge.tensors(
        [rank["buffers"] for rank in ranks],
        own[0],
        quantity="first rank's buffer",
        hints=[Hint(f"the rank kept its own buffer: the first rank's was not sent{why}", own)],
        given=f"toy {toy!r}, seed 7 + rank",
    )


@clause("ddp.construction.keeps-requires-grad", source="contract: requires-grad; " + PAPER)
def test_wrapping_does_not_freeze_or_thaw(world, subject):
    """Wrapping MUST leave requires_grad of every parameter as it was."""
    ranks = world.run(construct, subject, "frozen", 7)

    expected = {name: not name.startswith("frozen.") for name in oracle.parameters("frozen", 7)}
    judge.equal([rank["requires_grad"] for rank in ranks], expected, quantity="requires_grad")


def forward(ctx, subject, toy, seed):
    """The wrapped module's output, and the bare one's on the same input."""
    replica = Replica(ctx, subject, toy, seed)
    bare = replica.toy.build(seed).to(ctx.device)
    return {"output": replica.wrapped(replica.batch())}, {"output": bare(replica.batch())}


@clause(
    "ddp.construction.forward-is-unchanged",
    level="course",
    source="contract: called-alike; DistributedDataParallel, forward",
)
@pytest.mark.parametrize("toy", ["mlp", "tied", "buffers"])
def test_the_wrapped_module_computes_what_the_bare_one_does(world, subject, toy):
    """The wrapped module MUST be called like the original and return the same values."""
    wrapped, bare = zip(*world.run(forward, subject, toy, 3), strict=True)

    judge.tensors(
        wrapped,
        bare,
        quantity="bare module's output",
        # Normalisation divides by a root, which is no integer arithmetic; a compiled forward may
        # round it in another order.
        within=rounding(torch.float32, terms=8, depth=2) if toy == "buffers" else None,
        given=f"toy {toy!r}, seed 3",
    )


def hooks_that_run(ctx, subject):
    """The hooks of the original that a forward of the wrapper runs, in order."""
    return Replica(ctx, subject, "mlp").forward_hooks()


@clause(
    "ddp.construction.runs-the-modules-hooks",
    source="contract: runs-hooks; "
    "torch.nn.Module: call the module, not its forward, which ignores hooks",
)
def test_a_forward_runs_the_hooks_of_the_module(world, subject):
    """A forward of the wrapper MUST run the forward hooks of the original module, each once.

    `self.module.forward(...)` computes the same and skips them: activations that are recorded,
    weights that are normalised before each forward, another wrapper's preparations.
    """
    ranks = world.run(hooks_that_run, subject)

    judge.equal(ranks, ["before", "after"], quantity="hooks of the module that ran")


def as_module(ctx, subject, seed):
    """Whether the wrapper passes on parameters and modes, as a user of modules relies on."""
    replica = Replica(ctx, subject, "buffers", seed)
    own, seen = list(replica.parameters.values()), list(replica.wrapped.parameters())
    replica.wrapped.eval()
    was_training = replica.module.training
    replica.wrapped.train()
    return {
        "parameters": len(own) == len(seen) and all(map(lambda a, b: a is b, own, seen)),
        "eval": not was_training,
        "train": replica.module.training,
    }


@clause(
    "ddp.construction.is-a-module",
    source="contract: is-a-module; torch.nn.Module: parameters(), train(), eval()",
)
def test_the_wrapper_passes_on_parameters_and_modes(world, subject):
    """The wrapper's `parameters()` MUST be the original ones; `train` and `eval` MUST reach it.

    An optimizer built over a wrapper that hides its module trains nothing.
    """
    ranks = world.run(as_module, subject, 7)

    judge.equal(ranks, {"parameters": True, "eval": True, "train": True}, quantity="passing on")
