"""Construction: every rank takes what the first rank has.

A replica that starts from other weights than its peers never recovers: gradients are averaged,
weights are not. The loss falls all the same. See Li et al. 2020, "PyTorch Distributed", section
3.1, and the constructor of torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

import pytest

from spec_tests.programs.alone import SEED
from spec_tests.programs.law import same_as_alone
from spec_tests.programs.ways import Replicas, replicated
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS

clause = clauses(judges=("ddp", "ddp_bucketed"), level="correct")
holds = rows(clause, same_as_alone)
PAPER = "Li et al. 2020, section 3.1; DistributedDataParallel, constructor"

test_parameters_from_first_rank = holds(
    "ddp.construction.parameters-from-first-rank",
    "After construction every rank MUST hold the first rank's parameters, frozen ones too.",
    # Ranks are seeded differently on purpose: seeding all alike would hide a missing broadcast.
    {
        "mlp": "mlp seed-by-rank: step",
        "frozen": "mlp not-the-ends seed-by-rank: step",
        "tied": "tied seed-by-rank: step",
    },
    level="course",
    source="contract: first-weights; " + PAPER,
    worlds=(2, 3, 4),
)

test_parts_of_larger_tensors = holds(
    "ddp.construction.parts-of-larger-tensors",
    "A parameter that is a part of a larger tensor MUST start as the first rank's.",
    # A broadcast of the parameter itself sends what lies between its rows, and not the last rows.
    "gapped seed-by-rank: step",
    level="production",
    source="contract: larger-tensor; "
    "ProcessGroupGloo sends as many elements as there are, from where the first one lies",
    worlds=(2,),
    transports=("gloo", "cuda"),  # simulated ranks send the elements themselves
)


def buffers(ctx, subject, toy, groups=()):
    """Buffers after wrapping, with another seed per rank, in these groups or in the world."""
    module = TOYS[toy].build(SEED + ctx.rank).to(ctx.device)
    replicated(ctx, subject, module, process_group=ctx.split(groups) if groups else None)
    return dict(module.named_buffers())


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
    ranks = world.run(buffers, subject, toy)

    own = [oracle.buffers(toy, SEED + rank) for rank in range(world.size)]
    why = "; with persistent=False it is not in state_dict()" if toy == "transient" else ""
    judge.tensors(
        ranks,
        own[0],
        quantity="first rank's buffer",
        hints=[Hint(f"the rank kept its own buffer: the first rank's was not sent{why}", own)],
        given=f"toy {toy!r}, seed 7 + rank",
    )


def trained(ctx, subject, toy):
    """Whether each parameter requires gradients after wrapping."""
    module = TOYS[toy].build(SEED).to(ctx.device)
    replicated(ctx, subject, module)
    return {name: p.requires_grad for name, p in module.named_parameters()}


@clause("ddp.construction.keeps-requires-grad", source="contract: requires-grad; " + PAPER)
def test_wrapping_does_not_freeze_or_thaw(world, subject):
    """Wrapping MUST leave requires_grad of every parameter as it was."""
    ranks = world.run(trained, subject, "frozen")

    expected = {name: not name.startswith("frozen.") for name in oracle.parameters("frozen", SEED)}
    judge.equal(ranks, expected, quantity="requires_grad")


test_forward_is_unchanged = holds(
    "ddp.construction.forward-is-unchanged",
    "The wrapped module MUST be called like the original and return the same values.",
    {"mlp": "mlp: evaluate 0", "tied": "tied: evaluate 0"}
    | {"second-of-two": "mlp second-of-two: evaluate 0", "two": "branches-in-turn: evaluate 0"},
    level="course",
    source="contract: called-alike; DistributedDataParallel, forward",
)


def hooks_that_run(ctx, subject):
    """The hooks of the original that a forward of the wrapper runs, in order."""
    replica, found = Replicas(ctx, subject, "mlp"), []
    replica.module.register_forward_pre_hook(lambda *_: found.append("before"))
    replica.module.register_forward_hook(lambda *_: found.append("after"))
    replica.loss("0")
    return found


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


def as_module(ctx, subject):
    """Whether the wrapper passes on parameters and modes, as a user of modules relies on."""
    replica = Replicas(ctx, subject, "mlp")
    own, seen = replica.plain, list(replica.wrapped.parameters())
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
    ranks = world.run(as_module, subject)

    judge.equal(ranks, {"parameters": True, "eval": True, "train": True}, quantity="passing on")
