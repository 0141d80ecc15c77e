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
unsharded optimizer's and one parameter's. The exit status is 1 when one is missed or the A/A arm
voids the run.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from spec_tests.benchmarks import paired
from spec_tests.benchmarks.ddp import Block
from spec_tests.benchmarks.rounds import Timings, report, run_rounds, section, verdict
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import Implementation, load, parse

RESULTS = Path(__file__).with_name("results")
BASELINE, VIEWS, AGAIN = "torch", "torch views", "torch again"
NUM_RANKS = 2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """A stack of residual feed-forward blocks, and how much of it to measure."""

    name: str
    width: int
    num_blocks: int
    steps_per_block: int
    num_rounds: int
    bounds: dict[str, float]

    def build(self) -> nn.Module:
        """The model, with a gradient for every parameter."""
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(self.width) for _ in range(self.num_blocks)])
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return model


SIZES = {
    "1M": Size("1M", 128, 8, 8, 120, {BASELINE: 0.7, VIEWS: 1.05}),
    "25M": Size("25M", 512, 12, 2, 40, {BASELINE: 0.9, VIEWS: 1.05}),
}


# ------------------------------------------------------------------------------------- in the ranks


def body(ctx: Context, size: Size, impls: list[str], num_rounds: int) -> dict[str, Any]:
    """Rank body: all arms, all rounds. Times per arm and round, this rank's and the machine's."""
    _keep_freed_memory()
    loaded = {name: load(parse(name)) for name in impls}
    arms = [_arm(size, label, loaded) for label in arm_labels(impls)]
    for arm in arms:
        arm.step()  # state is made, parameters move into flat buffers
        arm.step()
    rounds = run_rounds(ctx, arms, size.steps_per_block, num_rounds)
    return {"state": [_state_bytes(arm) for arm in arms], "rounds": rounds}


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, 2**30)


def arm_labels(impls: list[str]) -> list[str]:
    """Names of the arms, in the order of an even round: equal things far apart."""
    return [BASELINE, *impls, VIEWS, AGAIN]


def _arm(size: Size, label: str, loaded: dict[str, Implementation]) -> torch.optim.Optimizer:
    parameters = size.build().parameters()
    if label in (BASELINE, VIEWS, AGAIN):
        views = label == VIEWS
        return ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, parameters_as_bucket_view=views, lr=RATE
        )
    made: torch.optim.Optimizer = loaded[label].sharded_optimizer(
        parameters, torch.optim.AdamW, lr=RATE
    )
    return made


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    inner = getattr(optimizer, "optim", optimizer)  # PyTorch's keeps it one floor down
    return sum(
        value.nbytes
        for entry in inner.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )


# ----------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class Result:
    """What one size showed."""

    size: str
    num_parameters: int
    labels: list[str]
    ms: dict[str, float]
    core_ms: dict[str, float]
    against: dict[str, dict[str, paired.Ratio]]
    state: dict[str, int]
    unsharded_state: int
    num_rounds: int
    num_dropped: int
    verdicts: list[str]


def summarise(
    size: Size, impls: list[str], ranks: list[dict[str, Any]], max_others: float
) -> Result:
    """Times of the kept rounds, their paired ratios, and what they say about the bounds."""
    labels = arm_labels(impls)
    timings = Timings.of(labels, ranks, max_others=max_others)
    against = {base: timings.against(base) for base in (BASELINE, VIEWS)}
    state = {label: max(rank["state"][n] for rank in ranks) for n, label in enumerate(labels)}
    sizes = [p.nbytes for p in size.build().parameters()]
    return Result(
        size=size.name,
        num_parameters=sum(sizes) // 4,
        labels=labels,
        ms=timings.ms,
        core_ms=timings.core_ms,
        against=against,
        state=state,
        unsharded_state=2 * sum(sizes),
        num_rounds=timings.num_kept,
        num_dropped=timings.num_dropped,
        verdicts=timings.voids(BASELINE, AGAIN) or _verdicts(size, impls, against, state, sizes),
    )


def _verdicts(
    size: Size,
    impls: list[str],
    against: dict[str, dict[str, paired.Ratio]],
    state: dict[str, int],
    sizes: list[int],
) -> list[str]:
    said: list[str] = []
    for name in impls:
        for base, bound in size.bounds.items():
            high = against[base][name].high
            words = f"{name} against {base} at most {high:.3f}, bound {bound}"
            said.append(verdict(high <= bound, words))
        # Two moments, and a counter of four bytes for each parameter.
        allowed = 2 * sum(sizes) // NUM_RANKS + 2 * max(sizes) + 4 * len(sizes)
        words = f"{name} keeps {state[name]:,} bytes of state on a rank, bound {allowed:,}"
        said.append(verdict(state[name] <= allowed, words))
    return said


def sections(results: list[Result]) -> list[str]:
    """The tables as lines of Markdown."""
    lines = []
    for result in results:
        rows = [
            (
                "arm",
                "ms",
                "core ms",
                "against torch",
                "against torch views",
                "state MiB",
                "of unsharded",
            )
        ]
        for label in result.labels:
            of_torch, of_views = (result.against[base].get(label) for base in (BASELINE, VIEWS))
            kept = result.state[label]
            rows.append(
                (
                    label,
                    f"{result.ms[label]:.2f}",
                    f"{result.core_ms[label]:.2f}",
                    str(of_torch or "1"),
                    str(of_views or "1"),
                    f"{kept / 2**20:.2f}",
                    f"{kept / result.unsharded_state:.3f}",
                )
            )
        lines += section(f"{result.size} ({result.num_parameters:,} parameters)", rows, result)
    return lines


def main(argv: list[str]) -> int:
    """Measure, print, and write `zero1.md` and `zero1.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks zero1")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 120 at 1M, 40 at 25M")
    parser.add_argument("--max-others", type=float, default=paired.MAX_OTHERS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of zero1.md, zero1.json")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    results = []
    worlds = Worlds()
    try:
        for name in options.size or list(SIZES):
            size = SIZES[name]
            rounds = options.rounds or size.num_rounds
            ranks = worlds.world(NUM_RANKS).run(body, size, impls, rounds, timeout_s=3600.0)
            results.append(summarise(size, impls, list(ranks), options.max_others))
    finally:
        worlds.close()
    return report(
        options.out,
        "zero1",
        "AdamW step of ZeRO-1, paired against PyTorch's ZeroRedundancyOptimizer",
        "2 ranks on gloo, 1 thread each, fp32, update and exchange only, malloc keeps what is "
        "freed; ratios are paired medians with their 95 % interval; state is of the rank that has "
        "most",
        results,
        sections(results),
    )
