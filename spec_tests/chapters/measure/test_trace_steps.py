"""Steps of a trace: all that were recorded, each with what was done in it, the last one too.

An analysis that leaves out the last step (Holistic Trace Analysis by default) or ends a
step on a GPU with the host's mark loses the work that matters: the optimizer's, and what had been
launched and not done yet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from spec_tests.chapters.measure.timeline import (
    TRACE,
    Timeline,
    judged,
    numbers,
    observed,
    times,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=TRACE, level="correct", worlds=(1,))


@clause(
    "measure.trace.every-step",
    source="contract: steps, begins; Holistic Trace Analysis drops the last one by default",
)
def test_every_recorded_step_counts_the_last_one_too(world, subject):
    """Every ProfilerStep MUST be a step with its number and its own times, the last one too."""
    line, steps = Timeline(), {}
    for number, (begin, end) in {8: (0, 100), 9: (100, 300), 10: (300, 600)}.items():
        worked = 10 * (number - 7)
        line.play(f"step {number} {begin}-{end}, work {begin}-{begin + worked}")
        idle = end - begin - worked
        steps[number] = {"duration_us": end - begin, "compute_us": worked, "idle_us": idle}

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


def judge_recorded(ranks, device):
    """What must be true of a real trace, whatever it took."""
    for rank, found in enumerate(ranks):
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


@clause(
    "measure.trace.of-a-run",
    source="contract: steps, collectives; torch.profiler with gloo, as it is",
    worlds=(2,),
    transports=("gloo",),
)
def test_a_real_trace_says_what_was_done(world, subject):
    """A trace that torch.profiler has just recorded MUST say what was done in it."""
    judge_recorded(world.run(recorded, "cpu"), "cpu")


@clause(
    "measure.trace.of-a-run-on-a-gpu",
    source="contract: kernels, communication; torch.profiler with nccl, as it is",
    transports=("cuda",),
    no_impostor="seen on a GPU alone; what it judges is judged on synthetic traces, too",
)
def test_a_real_trace_of_a_gpu_says_what_was_done(world, subject):
    """A trace that torch.profiler has just recorded on a GPU MUST say what was done in it."""
    judge_recorded(world.run(recorded, "cuda"), "cuda")
