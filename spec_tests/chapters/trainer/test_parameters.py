"""Parameters: tied, reused, frozen, thawed and unused ones.

Whoever hooks gradients, flattens weights or divides them by owner has an opinion on when a
parameter is done. These are the models in which that opinion is wrong.
"""

from __future__ import annotations

import pytest

from spec_tests.programs.laws.task import (
    BUILDERS,
    Session,
    Setup,
    one_process_or_refusal,
    same_as_one_process,
    session,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=BUILDERS, level="correct", worlds=(2,))
THREE = (1, 2, 3)
REPLICAS = ("build_trainer", "build_zero1_trainer")
BRANCHES = "DeepSpeed issue 2343; DistributedDataParallel, find_unused_parameters"


@clause(
    "trainer.parameters.tied",
    source="contract: tied; torchtitan issue 1524: tied weights were untied",
    worlds=(3,),
)
def test_a_tied_parameter_stays_tied(world, subject):
    """A weight with two names MUST be one weight: trained once, by the sum of both gradients."""
    setup = Setup(toy="tied", optimizer="adamw", accumulation=2)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.reused",
    source="contract: reused; DeepSpeed pull request 8224: a module used twice",
    worlds=(3,),
)
def test_a_module_that_is_used_twice_counts_twice(world, subject):
    """A module that one forward calls twice MUST be trained by the sum of both gradients."""
    setup = Setup(toy="reused", optimizer="momentum", accumulation=2)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.frozen",
    source="contract: frozen; torchtitan issue 3885: frozen parameters trained",
)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_frozen_parameters_stay(world, subject, optimizer):
    """A trainer MUST leave frozen parameters as they are, whatever the weight decay."""
    setup = Setup(toy="frozen", optimizer=optimizer)
    same_as_one_process(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.unused",
    source="contract: unused; torch.optim: a parameter without a gradient is skipped",
)
def test_unused_parameters_are_as_declared(world, subject):
    """An unused parameter MUST be skipped, or updated with zeros where that is declared."""
    setup = Setup(toy="unused", optimizer="adamw")
    one_process_or_refusal(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.unused-on-some-ranks",
    judges=REPLICAS,
    source="contract: unused-somewhere; " + BRANCHES,
)
@pytest.mark.parametrize("uses", ["one-each", "all-and-one"])
def test_what_one_rank_uses_trains_on_all(world, subject, uses):
    """A parameter that some ranks leave unused MUST train on all, by the mean, or be an error."""
    each = (("ab",), ("ac",)) if uses == "one-each" else (("abc",), ("b",))
    setup = Setup(toy="branches", uses=each)
    one_process_or_refusal(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.unused-in-a-micro-batch",
    source="contract: unused-early; " + BRANCHES + "; fairscale, ShardedDDP",
)
@pytest.mark.parametrize("when", ["first", "last"])
def test_what_one_micro_batch_uses_is_trained(world, subject, when):
    """A parameter that one micro-batch alone uses MUST be trained by its gradient, or be an error.

    Whoever reduces what the last backward touched loses what only an early one did.
    """
    order = ("abc", "ab") if when == "first" else ("ab", "abc")
    setup = Setup(toy="branches", accumulation=2, uses=(order, order))
    one_process_or_refusal(world, subject, Session.steps, setup, *THREE)


@clause(
    "trainer.parameters.order-differs",
    judges=REPLICAS,
    source="contract: Trainer.step/one-process; "
    "DeepSpeed issue 2343; Li et al. 2020, section 3.2.3",
)
def test_ranks_may_compute_in_another_order(world, subject):
    """Gradients that become ready in another order on each rank MUST NOT be mixed up."""
    setup = Setup(toy="branches", uses=(("abc",), ("cba",)))
    one_process_or_refusal(world, subject, Session.steps, setup, *THREE)


def thaws(run, flag):
    """Weights of a run in which a layer is frozen, or thawed, after the first step."""
    run.step(1)
    named = run.module.named_parameters()
    chosen = [p for name, p in named if "frozen" in name or "second" in name]
    if not chosen:
        raise NotImplementedError("the module's parameters have other names: nothing to thaw")
    for parameter in chosen:
        parameter.requires_grad_(flag)
    run.steps(2, 3)


@clause("trainer.parameters.thawed-later", source="contract: thawed-later; fine-tuning by stages")
def test_what_is_thawed_later_trains(world, subject):
    """A parameter that is thawed between steps MUST train from then on, or be an error."""
    setup = Setup(toy="frozen", optimizer="momentum")
    one_process_or_refusal(world, subject, thaws, setup, True)


@clause("trainer.parameters.frozen-later", source="contract: frozen-later; fine-tuning by stages")
def test_what_is_frozen_later_stays(world, subject):
    """A parameter that is frozen between steps MUST stay as it is from then on, or be an error."""
    setup = Setup(toy="mlp", optimizer="adamw")
    one_process_or_refusal(world, subject, thaws, setup, False)


@clause(
    "trainer.parameters.fewer-elements-than-ranks",
    source="contract: Trainer.step/one-process",
    worlds=(3,),
)
def test_small_parameters_are_trained(world, subject):
    """Parameters with fewer rows than there are ranks MUST be trained as in one process.

    Toy "ragged" has layers with a single row, and a parameter of one element.
    """
    setup = Setup(toy="ragged", optimizer="momentum")
    same_as_one_process(world, subject, Session.steps, setup, 1, 2)


def described(ctx, subject, toy):
    """Names, shapes and dtypes of the full parameters, before and after a step."""
    run = session(ctx, subject, Setup(toy=toy))
    found = []
    for number in (1, 2):
        whole = run.trainer.full_parameters()
        found.append({n: (tuple(t.shape), str(t.dtype)) for n, t in whole.items()})
        run.trainer.step(run.micro_batches(number))
    return found


@clause(
    "trainer.parameters.whole-by-plain-names",
    source="contract: Trainer.full_parameters/plain-names",
)
@pytest.mark.parametrize("toy", ["mlp", "ragged"])
def test_full_parameters_have_the_plain_models_names(world, subject, toy):
    """Full parameters MUST have the plain model's names and shapes, and be float32."""
    ranks = world.run(described, subject, toy)

    plain = Setup(toy=toy).module().named_parameters()
    wanted = {name: (tuple(p.shape), "torch.float32") for name, p in plain}
    judge.equal(ranks, [wanted, wanted], quantity="names, shapes and dtypes", given=f"toy {toy!r}")


def reads_several_times(run):
    """Weights of a run that reads them several times between steps."""
    run.step(1)
    run.note("read again")
    run.note("read a third time")
    run.steps(2, 3)


@clause(
    "trainer.parameters.reading-changes-nothing",
    source="contract: Trainer.full_parameters/inert",
    worlds=(3,),
)
def test_reading_weights_changes_nothing(world, subject):
    """Reading full parameters between steps, several times, MUST NOT change later training."""
    setup = Setup(optimizer="momentum", accumulation=2)
    same_as_one_process(world, subject, reads_several_times, setup)
