"""Steps of a trace: all that were recorded, each with what was done in it, the last one too.

An analysis that leaves out the last step (Holistic Trace Analysis by default) or ends a
step on a GPU with the host's mark loses the work that matters: the optimizer's, and what had been
launched and not done yet.

Also judged here are collectives, by kind and bytes, and the memory that a trace saw. One collective
leaves three traces of itself (an operator of c10d, perhaps one of _c10d_functional, an annotation
or a kernel) and two sizes. What was asked for counts, once, with the larger size: gloo runs a
reduce-scatter as an all-reduce, and says so.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from spec_tests.chapters.measure.timeline import (
    DEVICES,
    TRACE,
    Timeline,
    judged,
    numbers,
    observed,
    times,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


@clause(
    "measure.trace.every-step",
    source="contract: steps, begins; Holistic Trace Analysis drops the last one by default",
)
def test_every_recorded_step_counts_the_last_one_too(world, subject):
    """Every ProfilerStep MUST be a step with its number and its own times, the last one too."""
    works = "work 0-10, work 100-120, work 300-330"
    steps = {
        8: {"duration_us": 100, "compute_us": 10, "idle_us": 90},
        9: {"duration_us": 200, "compute_us": 20, "idle_us": 180},
        10: {"duration_us": 300, "compute_us": 30, "idle_us": 270},
    }
    line = Timeline.of(f"step 8 0-100, step 9 100-300, step 10 300-600, {works}")
    judged(world, line, steps=steps, duration_us=600, compute_us=60)


@clause(
    "measure.trace.late-kernels",
    source="contract: ends, launched; a host runs ahead of its device by whole steps",
)
def test_a_step_ends_with_the_last_kernel_launched_in_it(world, subject):
    """A step MUST last until the kernels that were launched in it are done.

    A host that does not wait has left its last step before most of it has run.
    """
    script = (
        "step 0 0-100, step 1 100-200, work 50-300 <20, work 300-700 <150, all_reduce 600-900 <160"
    )
    line = Timeline.of(script, "cuda")
    line.play("work 900-1000 <250")  # after both: the next, which was not recorded
    steps = {
        0: {"duration_us": 300, "compute_us": 250, "communication_us": 0, "idle_us": 50},
        1: {"duration_us": 600, "compute_us": 400, "overlap_us": 100, "exposed_us": 200},
    }
    judged(world, line, steps=steps, duration_us=900, compute_us=650, communication_us=300)


@clause(
    "measure.trace.optimizer-steps",
    source="contract: optimizer-steps; a course calls profiler.step() once per micro-batch",
)
def test_updates_are_counted_in_each_step(world, subject):
    """Each step MUST say how many updates of the optimizer begin in it.

    Where the profiler was stepped per micro-batch, some hold none: traces of different work.
    """
    steps = "step 0 0-100, step 1 100-200, step 2 200-300, step 3 300-400"
    found = observed(world, Timeline.of(f"{steps}, update 160-190, update 360-390"))

    counts = [step["optimizer_steps"] for step in found["steps"]]
    judge.equal([counts], [0, 1, 0, 1], quantity="updates per step")


@clause(
    "measure.trace.rank",
    source="contract: rank; without distributedInfo another tool overwrites the other ranks",
)
def test_the_rank_is_what_the_trace_says(world, subject):
    """Rank and world size MUST be those of distributedInfo, or 0 and 1 where there is none."""
    script = "step 0 0-10, work 1-2"
    known = Timeline.of(script, rank=3, world_size=8)
    found = [observed(world, line) for line in (known, Timeline.of(script, "cuda"))]

    said = [(one["rank"], one["world_size"], one["device"]) for one in found]
    judge.equal([said], [(3, 8, "cpu"), (0, 1, "cuda")], quantity="rank, world size, device")


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


def recorded(ctx, device):
    """The summary of a real trace: two steps, in each one matmul and one reduction."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    weight = torch.ones(64, 64, device=ctx.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    path = ctx.scratch / f"recorded{ctx.rank}.json"
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3):
            (weight @ weight).sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return ctx.impl.summarize_trace(path)


def judge_recorded(world, subject, device):
    """What must be true of a real trace, whatever it took."""
    __tracebackhide__ = True
    for rank, found in enumerate(world.run(recorded, device)):
        where = f"rank {rank} on {device}: "
        judge.equal([found["rank"]], rank, quantity=f"{where}rank")
        judge.equal([found["device"]], device, quantity=f"{where}device")
        judge.equal([numbers(found)], [1, 2], quantity=f"{where}steps")
        sent = {"all_reduce": {"count": 2, "bytes": 2 * 4 * 64 * 64}}
        if device == "cuda":  # one rank alone sends nothing, and nccl may say so in several ways
            judge.equal([found["collectives"]["all_reduce"]["count"]], 2, quantity=f"{where}calls")
        else:
            judge.equal([found["collectives"]], sent, quantity=f"{where}collectives")
        for step in found["steps"]:
            judge.equal([step["optimizer_steps"]], 1, quantity=f"{where}updates")
            total = step["compute_us"] + step["exposed_us"] + step["idle_us"]
            times(step, {"duration_us": total}, what=f"{where}compute + exposed + idle")
            names = ["compute_us", *(["communication_us"] if device == "cpu" else [])]
            judge.holds(
                all(step[name] > 0 for name in names), f"{where}expected {names} > 0, got {step}"
            )


recorded_on = rows(clause, judge_recorded)

test_of_a_run = recorded_on(
    "measure.trace.of-a-run",
    "A trace that torch.profiler has just recorded MUST say what was done in it.",
    "cpu",
    source="contract: steps, collectives; torch.profiler with gloo, as it is",
    worlds=(2,),
    transports=("gloo",),
)

test_of_a_run_on_a_gpu = recorded_on(
    "measure.trace.of-a-run-on-a-gpu",
    "A trace that torch.profiler has just recorded on a GPU MUST say what was done in it.",
    "cuda",
    source="contract: kernels, communication; torch.profiler with nccl, as it is",
    transports=("cuda",),
    no_impostor="seen on a GPU alone; what it judges is judged on synthetic traces, too",
)
