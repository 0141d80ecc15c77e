"""Collectives of a trace, by kind and bytes, and the memory that it saw.

One collective leaves three traces of itself (an operator of c10d, perhaps one of
_c10d_functional, an annotation or a kernel) and two sizes. What was asked for counts, once, with
the larger size: gloo runs a reduce-scatter as an all-reduce, and says so.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.measure.timeline import DEVICES, TRACE, Timeline, judged, observed
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


STEP = "step 0 0-1000"


@clause(
    "measure.trace.collectives",
    source="contract: collectives, fallbacks; FSDP: gathers and reductions per step",
)
@pytest.mark.parametrize("device", DEVICES)
def test_collectives_are_counted_by_kind(world, subject, device):
    """Collectives MUST be counted by the kind that was asked for, each once."""
    gathers = "all_gather 100-150 10>20, all_gather 200-250 10>20, all_gather 300-350 10>20"
    script = f"{STEP}, {gathers}, reduce_scatter 400-450 20>10, all_reduce 500-550 6>6"
    expected = {"all_gather": (3, 3 * 80), "reduce_scatter": (1, 80), "all_reduce": (1, 24)}
    judged(world, Timeline.of(script, device), collectives=expected)


@clause("measure.trace.collective-bytes", source="contract: bytes, kernel-bytes, operator-bytes")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float", "c10::BFloat16", "long int"])
def test_bytes_are_elements_times_their_size(world, subject, dtype, device):
    """Bytes MUST be elements times the size of their dtype."""
    line = Timeline.of(STEP, device)
    line.play("all_gather 100-200 50>100, broadcast 300-400 7>7", dtype=dtype)
    size = {"float": 4, "c10::BFloat16": 2, "long int": 8}[dtype]
    judged(world, line, collectives={"all_gather": (1, 100 * size), "broadcast": (1, 7 * size)})


@clause(
    "measure.trace.lists-of-tensors",
    source="contract: list-bytes; coalesced collectives; a list bears no dtype in a trace",
)
def test_all_tensors_of_a_list_count(world, subject):
    """Bytes of a collective over a list of tensors MUST be those of all of them."""
    line = Timeline.of(STEP)
    of_list = {"Input Dims": [[[10], [3, 4]], []], "Input type": ["TensorList", ""]}
    line.add("cpu_op", "c10d::allreduce_coalesced_", 100, 110, **of_list)
    noted = {"Input Dims": [[10], [3, 4]], "Input type": ["double", "float"]}
    line.add("user_annotation", "gloo:all_reduce", 120, 300, thread=100, **noted)

    judged(world, line, collectives={"all_reduce": (1, 80 + 48)})


@clause(
    "measure.trace.functional-collectives",
    source="contract: collective-ops; DTensor calls _c10d_functional, which calls c10d",
)
def test_a_functional_collective_is_one(world, subject):
    """A collective that an operator of _c10d_functional has asked for MUST count once."""
    line = Timeline.of(STEP)
    line.add("cpu_op", "_c10d_functional::all_reduce", 90, 120)
    line.play("all_reduce 100-300 8>8")
    line.add("cpu_op", "_c10d_functional::wait_tensor", 200, 300)

    judged(world, line, collectives={"all_reduce": (1, 32)})


@clause("measure.trace.collectives-outside", source="contract: collectives")
@pytest.mark.parametrize("device", DEVICES)
def test_collectives_outside_of_steps_do_not_count(world, subject, device):
    """Collectives before the first step and after the last MUST NOT count."""
    sent = (f"all_reduce {begin}-{begin + 20} 8>8" for begin in (50, 300, 450, 700))
    line = Timeline.of(", ".join(("step 0 200-400, step 1 400-500", *sent)), device)
    judged(world, line, collectives={"all_reduce": (2, 64)})


@clause("measure.trace.unknown-bytes", source="contract: no-bytes; record_shapes=False")
def test_bytes_that_the_trace_does_not_say_are_unknown(world, subject):
    """Where a trace has no sizes, bytes MUST be None: zero would be a measurement."""
    line = Timeline.of(STEP)
    line.add("cpu_op", "c10d::allreduce_", 100, 110)
    line.add("user_annotation", "gloo:all_reduce", 120, 300, thread=100)
    line.play("all_gather 400-500 2>4")

    judged(world, line, collectives={"all_reduce": (1, None), "all_gather": (1, 16)})


@clause("measure.trace.no-collectives", source="contract: collectives")
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_of_one_rank_has_no_collectives(world, subject, device):
    """Without a collective there MUST be none: an empty dict."""
    judged(world, Timeline.of(f"{STEP}, work 100-200", device), collectives={})


@clause(
    "measure.trace.peak-memory",
    source="contract: peak-memory; "
    "profile_memory=True; a course prints what is allocated at the end",
)
@pytest.mark.parametrize("device", DEVICES)
def test_peak_memory_is_the_largest_total(world, subject, device):
    """Peak memory MUST be the largest total on the trace's device, or None if none is recorded."""
    line, silent = (Timeline.of(f"{STEP}, work 50-60", device) for _ in range(2))
    own, other = (0, 1) if device == "cpu" else (1, 0)
    for at, total in ((100, 500), (200, 9_000_000_000), (300, 100)):
        line.memory(at, total, device_type=own)
        line.memory(at, 3 * total, device_type=other)

    found = [observed(world, one)["peak_memory_bytes"] for one in (line, silent)]

    judge.equal([found], [9_000_000_000, None], quantity="peak memory with and without a record")
