"""Step time and gradient memory of data-parallel wrappers, beside PyTorch's own.

Per model size, two ranks with one thread each run forward, backward, `finish` and SGD (fp32, 64
tokens per rank). Arms, all in the same ranks, each with a model of its own:

    torch          DistributedDataParallel() with its defaults (first bucket 1 MiB, then 25)
    torch views    DistributedDataParallel(gradient_as_bucket_view=True)
    torch again    the first once more: the A/A arm (see paired.py)
    NAME bucketed  ddp_bucketed(bucket_size_mb=25) of each --impl
    NAME ddp       ddp of each --impl

Gradient memory is what malloc has given out, PyTorch's C++ reducer and gloo included: bytes that
wrapping and four steps added and that are in use after the last backward (gradients and buckets),
and the highest reading whenever a gradient was complete, activations included. `core ms` is time
on the cores, all threads of both ranks: what noise disturbs least.

Bounds: bucketed against torch .95 at 25M and 1.05 at 1M, against torch views 1.05 at 25M; gradient
memory at most torch's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from spec_tests.bench import blocks, machine, paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import Case, mebibytes, times, verdict
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import load

BUCKET_MB = 25
BASE, VIEWS, AGAIN = "torch", "torch views", "torch again"
SMALL = Case("1M (1,055,744 parameters)", "1M", 2, 12, 200, {BASE: 1.05})
LARGE = Case("25M (25,208,832 parameters)", "25M", 2, 2, 60, {BASE: 0.95, VIEWS: 1.05})


class Arm(paired.Arm):
    """A wrapped model with its optimizer after four steps (torch rebuilds its buckets after one).

    Its facts are the bytes that wrapping and the steps added to the bare model: `live` after the
    last backward, `peak` at the most.
    """

    def __init__(
        self,
        ctx: Context,
        case: Case,
        wrap: Callable[[nn.Module], nn.Module],
        finish: Callable[[nn.Module], object],
    ) -> None:
        model = blocks.stack(case.size)
        [self.batch] = blocks.batches(case.size, ctx.rank)
        ctx.barrier()
        before, readings = machine.allocated_bytes(), [0]
        self.model, self.finish = wrap(model), finish
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda _: readings.append(machine.allocated_bytes() - before)
            )
            for parameter in model.parameters()
        ]
        self.take(3)
        self.backward()
        ctx.barrier()
        self.facts = {"live": machine.allocated_bytes() - before, "peak": max(readings)}
        for handle in handles:
            handle.remove()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        """Forward, backward, mean gradients."""
        self.model(self.batch).square().mean().backward()
        self.finish(self.model)

    def step(self) -> None:
        """What is timed."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ddp(runner.Comparison):
    """Wrappers, each with the finish of its implementation."""

    name = "ddp"
    title = "Data-parallel step, paired against PyTorch's DistributedDataParallel"
    note = (
        f"2 ranks on gloo, 1 thread each, fp32, {blocks.NUM_TOKENS} tokens per rank, SGD, "
        f"buckets of {BUCKET_MB} MiB; ratios are paired medians with their 95 % interval"
    )
    all_cases = (SMALL, LARGE)
    bases, again = (BASE, VIEWS), AGAIN
    judged = "{name} bucketed"
    columns = {
        **times(".1f", BASE, VIEWS),
        "live MiB": mebibytes("live", ".1f"),
        "peak MiB": mebibytes("peak", ".1f"),
    }

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """All are kept: what one frees late is no gain of the next."""

        def theirs(case: Case, **options: Any) -> Arm:
            wrap = partial(nn.parallel.DistributedDataParallel, **options)
            return Arm(ctx, case, wrap, lambda _: None)

        warm = theirs(SMALL)  # whatever is allocated once and for all
        arms: dict[str, paired.Arm] = {BASE: theirs(case)}
        for name in impls:
            impl = load(parse(name))
            finish = impl.finish_gradient_synchronization
            bucketed = partial(impl.ddp_bucketed, bucket_size_mb=BUCKET_MB)
            arms[f"{name} bucketed"] = Arm(ctx, case, bucketed, finish)
            arms[f"{name} ddp"] = Arm(ctx, case, impl.ddp, finish)
        arms[VIEWS] = theirs(case, gradient_as_bucket_view=True)
        arms[AGAIN] = theirs(case)
        del warm
        return arms

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Yield time and gradient memory of the bucketed one."""
        yield from super().bounds(found, name)
        if not machine.can_count_allocations():
            yield "holds: gradient memory was not measured, glibc 2.33 or newer tells it"
            return
        label = self.judged.format(name=name)
        live, allowed = (found.facts[arm][0]["live"] for arm in (label, BASE))
        yield verdict(live <= allowed, f"{label} keeps {live:,} bytes, torch {allowed:,}")


BENCHMARK = Ddp()
