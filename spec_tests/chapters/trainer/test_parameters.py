"""Parameters: tied, reused, frozen, thawed and unused ones.

Whoever hooks gradients, flattens weights or divides them by owner has an opinion on when a
parameter is done. These are the models in which that opinion is wrong.
"""

from __future__ import annotations

import pytest

from spec_tests.programs.law import same_as_alone
from spec_tests.programs.one_trainer import module_of
from spec_tests.programs.scene import TRAINERS, Scene
from spec_tests.programs.trained import OnRank
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=TRAINERS, level="correct", worlds=(2,))
holds = rows(clause, same_as_alone)
THREE = "train 1, train 2, train 3"
REPLICAS = ("build_trainer", "build_zero1_trainer")
BRANCHES = "DeepSpeed issue 2343; DistributedDataParallel, find_unused_parameters"

test_tied = holds(
    "trainer.parameters.tied",
    "A weight with two names MUST be one weight: trained once, by the sum of both gradients.",
    f"tied adamw of-two: {THREE}",
    source="contract: tied; torchtitan issue 1524: tied weights were untied",
    worlds=(3,),
)

test_reused = holds(
    "trainer.parameters.reused",
    "A module that one forward calls twice MUST be trained by the sum of both gradients.",
    f"reused momentum of-two: {THREE}",
    source="contract: reused; DeepSpeed pull request 8224: a module used twice",
    worlds=(3,),
)

test_frozen = holds(
    "trainer.parameters.frozen",
    "A trainer MUST leave frozen parameters as they are, whatever the weight decay.",
    {optimizer: f"frozen {optimizer}: {THREE}" for optimizer in ("momentum", "adamw")},
    source="contract: frozen; torchtitan issue 3885: frozen parameters trained",
)

test_unused = holds(
    "trainer.parameters.unused",
    "An unused parameter MUST be skipped, or updated with zeros where that is declared.",
    f"unused adamw: {THREE}",
    source="contract: unused; torch.optim: a parameter without a gradient is skipped",
)

test_unused_on_some_ranks = holds(
    "trainer.parameters.unused-on-some-ranks",
    "A parameter that some ranks leave unused MUST train on all, by the mean, or be an error.",
    {
        "one-each": f"branches-one-each: {THREE}",
        "all-and-one": f"branches-by-rank: {THREE}",
    },
    judges=REPLICAS,
    source="contract: unused-somewhere; " + BRANCHES,
)

test_unused_in_a_micro_batch = holds(
    "trainer.parameters.unused-in-a-micro-batch",
    "A parameter that one micro-batch alone uses MUST be trained by its gradient, or be an error.",
    # Whoever reduces what the last backward touched loses what only an early one did.
    {"first": f"branches-in-turn of-two: {THREE}", "last": f"branches-later of-two: {THREE}"},
    source="contract: unused-early; " + BRANCHES + "; fairscale, ShardedDDP",
)

test_order_differs = holds(
    "trainer.parameters.order-differs",
    "Gradients that become ready in another order on each rank MUST NOT be mixed up.",
    f"branches-in-any-order: {THREE}",
    judges=REPLICAS,
    source="contract: Trainer.step/one-process; "
    "DeepSpeed issue 2343; Li et al. 2020, section 3.2.3",
)

test_thawed_later = holds(
    "trainer.parameters.thawed-later",
    "A parameter that is thawed between steps MUST train from then on, or be an error.",
    "mlp momentum not-the-second: train 1, thaw 2, thaw 3, train 2, train 3",
    source="contract: thawed-later; fine-tuning by stages",
)

test_frozen_later = holds(
    "trainer.parameters.frozen-later",
    "A parameter that is frozen between steps MUST stay as it is from then on, or be an error.",
    "mlp adamw: train 1, freeze 2, freeze 3, train 2, train 3",
    source="contract: frozen-later; fine-tuning by stages",
)


def described(ctx, subject, toy):
    """Names, shapes and dtypes of the full parameters, before and after a step."""
    run = OnRank(ctx, subject, toy)
    found = []
    for number in (1, 2):
        whole = run.trainer.full_parameters()
        found.append({n: (tuple(t.shape), str(t.dtype)) for n, t in whole.items()})
        run.trainer.step(run.batches(number))
    return found


@clause(
    "trainer.parameters.whole-by-plain-names",
    source="contract: Trainer.full_parameters/plain-names",
)
@pytest.mark.parametrize("toy", ["mlp", "ragged"])
def test_full_parameters_have_the_plain_models_names(world, subject, toy):
    """Full parameters MUST have the plain model's names and shapes, and be float32."""
    ranks = world.run(described, subject, toy)

    plain = module_of(Scene.of(toy)).named_parameters()
    wanted = {name: (tuple(p.shape), "torch.float32") for name, p in plain}
    judge.equal(ranks, [wanted, wanted], quantity="names, shapes and dtypes", given=f"toy {toy!r}")


test_reading_changes_nothing = holds(
    "trainer.parameters.reading-changes-nothing",
    "Reading full parameters between steps, several times, MUST NOT change later training.",
    "mlp momentum of-two: train 1, read, read, train 2, train 3",
    source="contract: Trainer.full_parameters/inert",
    worlds=(3,),
)
