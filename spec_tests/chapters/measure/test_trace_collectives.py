"""Collectives of a trace, by kind and bytes, and the memory that it saw.

One collective leaves three traces of itself (an operator of c10d, perhaps one of
_c10d_functional, an annotation or a kernel) and two sizes. What was asked for counts, once, with
the larger size: gloo runs a reduce-scatter as an all-reduce, and says so.
"""

from __future__ import annotations

import pytest

from spec_tests.chapters.measure.timeline import DEVICES, TRACE, Timeline, observed
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


def step_of(device="cpu"):
    """A timeline of one step."""
    line = Timeline(device)
    line.step(0, 0, 1000)
    return line


def judge_collectives(found, expected):
    """Kind to count and bytes."""
    judge.equal([found["collectives"]], expected, quantity="collectives")


@clause(
    "measure.trace.collectives",
    source="contract: collectives, fallbacks; FSDP: gathers and reductions per step",
)
@pytest.mark.parametrize("device", DEVICES)
def test_collectives_are_counted_by_kind(world, subject, device):
    """Collectives MUST be counted by the kind that was asked for, each once."""
    line = step_of(device)
    for begin in (100, 200, 300):
        line.send(begin, begin + 50, "all_gather", takes=10, gives=20)
    line.send(400, 450, "reduce_scatter", takes=20, gives=10)
    line.send(500, 550, "all_reduce", takes=6, gives=6)

    found = observed(world, line)

    judge_collectives(
        found,
        {
            "all_gather": {"count": 3, "bytes": 3 * 80},
            "reduce_scatter": {"count": 1, "bytes": 80},
            "all_reduce": {"count": 1, "bytes": 24},
        },
    )


@clause("measure.trace.collective-bytes", source="contract: bytes, kernel-bytes, operator-bytes")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype"), ["float", "c10::BFloat16", "long int"])
def test_bytes_are_elements_times_their_size(world, subject, dtype, device):
    """Bytes MUST be elements times the size of their dtype."""
    line = step_of(device)
    line.send(100, 200, "all_gather", takes=50, gives=100, dtype=dtype)
    line.send(300, 400, "broadcast", takes=7, gives=7, dtype=dtype)

    found = observed(world, line)

    size = {"float": 4, "c10::BFloat16": 2, "long int": 8}[dtype]
    judge_collectives(
        found,
        {
            "all_gather": {"count": 1, "bytes": 100 * size},
            "broadcast": {"count": 1, "bytes": 7 * size},
        },
    )


@clause(
    "measure.trace.lists-of-tensors",
    source="contract: list-bytes; coalesced collectives; a list bears no dtype in a trace",
)
def test_all_tensors_of_a_list_count(world, subject):
    """Bytes of a collective over a list of tensors MUST be those of all of them."""
    line = step_of()
    of_list = {"Input Dims": [[[10], [3, 4]], []], "Input type": ["TensorList", ""]}
    line.add("cpu_op", "c10d::allreduce_coalesced_", 100, 110, **of_list)
    noted = {"Input Dims": [[10], [3, 4]], "Input type": ["double", "float"]}
    line.add("user_annotation", "gloo:all_reduce", 120, 300, thread=100, **noted)

    found = observed(world, line)

    judge_collectives(found, {"all_reduce": {"count": 1, "bytes": 80 + 48}})


@clause(
    "measure.trace.functional-collectives",
    source="contract: collective-ops; DTensor calls _c10d_functional, which calls c10d",
)
def test_a_functional_collective_is_one(world, subject):
    """A collective that an operator of _c10d_functional has asked for MUST count once."""
    line = step_of()
    line.add("cpu_op", "_c10d_functional::all_reduce", 90, 120)
    line.send(100, 300, takes=8, gives=8)
    line.add("cpu_op", "_c10d_functional::wait_tensor", 200, 300)

    found = observed(world, line)

    judge_collectives(found, {"all_reduce": {"count": 1, "bytes": 32}})


@clause("measure.trace.collectives-outside", source="contract: collectives")
@pytest.mark.parametrize("device", DEVICES)
def test_collectives_outside_of_steps_do_not_count(world, subject, device):
    """Collectives before the first step and after the last MUST NOT count."""
    line = Timeline(device)
    line.step(0, 200, 400)
    line.step(1, 400, 500)
    for begin in (50, 300, 450, 700):
        line.send(begin, begin + 20, takes=8, gives=8)

    found = observed(world, line)

    judge_collectives(found, {"all_reduce": {"count": 2, "bytes": 64}})


@clause("measure.trace.unknown-bytes", source="contract: no-bytes; record_shapes=False")
def test_bytes_that_the_trace_does_not_say_are_unknown(world, subject):
    """Where a trace has no sizes, bytes MUST be None: zero would be a measurement."""
    line = step_of()
    line.add("cpu_op", "c10d::allreduce_", 100, 110)
    line.add("user_annotation", "gloo:all_reduce", 120, 300, thread=100)
    line.send(400, 500, "all_gather", takes=2, gives=4)

    found = observed(world, line)

    judge_collectives(
        found,
        {"all_reduce": {"count": 1, "bytes": None}, "all_gather": {"count": 1, "bytes": 16}},
    )


@clause("measure.trace.no-collectives", source="contract: collectives")
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_of_one_rank_has_no_collectives(world, subject, device):
    """Without a collective there MUST be none: an empty dict."""
    line = step_of(device)
    line.work(100, 200)

    judge_collectives(observed(world, line), {})


@clause(
    "measure.trace.peak-memory",
    source="contract: peak-memory; "
    "profile_memory=True; a course prints what is allocated at the end",
)
@pytest.mark.parametrize("device", DEVICES)
def test_peak_memory_is_the_largest_total(world, subject, device):
    """Peak memory MUST be the largest total on the trace's device, or None if none is recorded."""
    line, silent = step_of(device), step_of(device)
    own, other = (0, 1) if device == "cpu" else (1, 0)
    for at, total in ((100, 500), (200, 9_000_000_000), (300, 100)):
        line.memory(at, total, device_type=own)
        line.memory(at, 3 * total, device_type=other)
    for one in (line, silent):
        one.work(50, 60)

    found = [observed(world, one)["peak_memory_bytes"] for one in (line, silent)]

    judge.equal([found], [9_000_000_000, None], quantity="peak memory with and without a record")
