"""Terms of memory that follow from the tensors alone: parameters, gradients, AdamW's moments."""

from __future__ import annotations

import pytest

from spec_tests.clause import clauses
from spec_tests.measure.models import CASES, CONTRACT, ESTIMATE, estimated, static_bytes
from spec_tests.rig import judge

clause = clauses(judges=ESTIMATE, worlds=(1,))

SOURCE = CONTRACT + "; Rajbhandari et al. 2020, section 3.1"
COUNTER_BYTES = 8  # AdamW counts its steps, in a scalar per parameter; some count in one for all


@clause("measure.memory.static-terms", level="course", source=SOURCE)
@pytest.mark.parametrize("model", ["deep", "tied"])
def test_parameters_gradients_and_moments_are_those_of_the_tensors(world, subject, model):
    """Bytes of parameters, gradients and AdamW's moments MUST be those of the model's tensors."""
    judged(world, model, "a shared tensor counted twice, or 8 bytes for 4")


@clause("measure.memory.static-terms-of-any-model", level="correct", source=SOURCE)
@pytest.mark.parametrize("model", ["frozen", "bfloat16"])
def test_terms_follow_from_what_trains_and_from_dtypes(world, subject, model):
    """Frozen parameters MUST have no gradients and moments, and tensors count in their dtype."""
    likely = {"frozen": "gradients for all", "bfloat16": "4 bytes for each element"}
    judged(world, model, likely[model])


def judged(world, model, likely):
    """Each term is the sum over the tensors."""
    __tracebackhide__ = True
    ranks = world.run(estimated, model)

    expected = static_bytes(CASES[model])
    counters = COUNTER_BYTES * expected.pop("num_trained")
    for rank, [said] in enumerate(ranks):
        for term, size in expected.items():
            most = size + (counters if term == "optimizer_bytes" else 0)
            judge.holds(
                size <= said[term] <= most,
                f"rank {rank}: expected {term} {size}, got {said[term]}, "
                f"{said[term] / size:.2f} times that",
                likely=likely,
                given=str(CASES[model]),
            )
