"""Step time and state memory of sharded optimizers, beside PyTorch's own.

Per model size, two ranks with one thread each step AdamW (fp32, gradients that stay as they are):
update and exchange, nothing else. Arms, all in the same ranks, each with a model of its own:

    torch          ZeroRedundancyOptimizer() with its defaults: a broadcast for each parameter
    torch views    ZeroRedundancyOptimizer(parameters_as_bucket_view=True): one for each rank
    torch again    the first once more: the A/A arm (see paired.py)
    NAME           sharded_optimizer of each --impl

State is the bytes of all tensors in the state of one rank's optimizer, the largest over ranks. Time
on the cores (`core ms`), all threads of both ranks, is what noise disturbs least. malloc keeps what
is freed: by default it returns the temporaries of a step to the system or not, as the heap happens
to lie, and one and the same arm takes a fifth longer or less from run to run.

Bounds: against torch .9 at 25M and .7 at 1M, against torch views 1.05; state at most half of the
unsharded optimizer's and one parameter's.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from spec_tests.bench import blocks, paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import Case, mebibytes, times, verdict
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import load

BASE, VIEWS, AGAIN = "torch", "torch views", "torch again"
LIMITS = {"1M": {BASE: 0.7, VIEWS: 1.05}, "25M": {BASE: 0.9, VIEWS: 1.05}}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Arm(paired.Arm):
    """A sharded AdamW of a model whose parameters all have a gradient, after two steps."""

    def __init__(self, case: Case, shard: Callable[..., Any], **options: Any) -> None:
        model = blocks.stack(case.size)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer = shard(model.parameters(), torch.optim.AdamW, lr=1e-3, **options)
        self.take(2)  # state is made, parameters move into flat buffers
        # PyTorch's keeps its state one level down.
        inner = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for entry in inner.state.values() for value in entry.values())
        self.facts["state"] = sum(v.nbytes for v in values if isinstance(v, torch.Tensor))

    def step(self) -> None:
        """What is timed."""
        self.optimizer.step()


def sizes(case: Case) -> list[int]:
    """Return the bytes of each parameter."""
    return [p.nbytes for p in blocks.stack(case.size).parameters()]


class Zero1(runner.Comparison):
    """Sharded optimizers, by what they are called with."""

    name = "zero1"
    title = "AdamW step of ZeRO-1, paired against PyTorch's ZeroRedundancyOptimizer"
    note = (
        "2 ranks on gloo, 1 thread each, fp32, update and exchange only, malloc keeps what is "
        "freed; ratios are paired medians with their 95 % interval; state is of the rank that has "
        "most"
    )
    all_cases = (
        Case("1M (1,055,744 parameters)", "1M", 2, 8, 120, LIMITS["1M"]),
        Case("25M (25,208,832 parameters)", "25M", 2, 2, 40, LIMITS["25M"]),
    )
    bases, again = (BASE, VIEWS), AGAIN
    columns = {
        **times(".2f", BASE, VIEWS),
        "state MiB": mebibytes("state", ".2f"),
        "of unsharded": lambda found, label: (
            f"{found.most(label, 'state') / (2 * sum(sizes(found.case))):.3f}"
        ),
    }

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """PyTorch's in two ways, and those under test."""
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
        if mallopt is not None:
            for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
                mallopt(option, 2**30)
        return {
            BASE: Arm(case, ZeroRedundancyOptimizer),
            **{name: Arm(case, load(parse(name)).sharded_optimizer) for name in impls},
            VIEWS: Arm(case, ZeroRedundancyOptimizer, parameters_as_bucket_view=True),
            AGAIN: Arm(case, ZeroRedundancyOptimizer),
        }

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Yield time, and half of the state."""
        yield from super().bounds(found, name)
        # Two moments, and a counter of four bytes for each parameter.
        each, kept = sizes(found.case), found.most(name, "state")
        allowed = 2 * sum(each) // found.case.num_ranks + 2 * max(each) + 4 * len(each)
        words = f"{name} keeps {kept:,} bytes of state on a rank, bound {allowed:,}"
        yield verdict(kept <= allowed, words)


BENCHMARK = Zero1()
