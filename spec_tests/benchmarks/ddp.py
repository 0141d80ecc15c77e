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
memory at most torch's. The exit status is 1 when one is missed or the A/A arm voids the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_tests.benchmarks import paired
from spec_tests.benchmarks.rounds import Timings, report, run_rounds, section, verdict
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import Implementation, load, parse

RESULTS = Path(__file__).with_name("results")
BUCKET_MB = 25
NUM_TOKENS = 64
BASELINE, VIEWS, AGAIN = "torch", "torch views", "torch again"


@dataclass(frozen=True)
class Size:
    """A stack of residual feed-forward blocks, and how much of it to measure."""

    name: str
    width: int
    num_blocks: int
    steps_per_block: int
    num_rounds: int
    bounds: dict[str, float]


SIZES = {
    "1M": Size("1M", 128, 8, 12, 200, {BASELINE: 1.05}),
    "25M": Size("25M", 512, 12, 2, 60, {BASELINE: 0.95, VIEWS: 1.05}),
}


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)): the greater part of a transformer's parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


# ------------------------------------------------------------------------------------- in the ranks


@dataclass
class Arm:
    """A wrapped model with its optimizer, ready to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[nn.Module], None]
    batch: torch.Tensor

    def backward(self) -> None:
        """Forward, backward, mean gradients."""
        self.model(self.batch).square().mean().backward()
        self.finish(self.model)

    def step(self) -> None:
        """What is timed."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def body(ctx: Context, size: Size, impls: list[str], num_rounds: int) -> dict[str, Any]:
    """Rank body: all arms, all rounds. Times per arm and round, this rank's and the machine's."""
    loaded = {name: load(parse(name)) for name in impls}
    labels = arm_labels(impls)
    warm, _ = _arm(ctx, SIZES["1M"], AGAIN, loaded)  # whatever is allocated once and for all
    arms, memory = [], {}
    for label in labels:  # all are kept: what one frees late is no gain of the next
        arm, memory[label] = _arm(ctx, size, label, loaded)
        arms.append(arm)
    del warm
    rounds = run_rounds(ctx, arms, size.steps_per_block, num_rounds)
    return {"memory": memory, "rounds": rounds}


def arm_labels(impls: list[str]) -> list[str]:
    """Names of the arms, in the order of an even round: equal things far apart."""
    ours = [f"{name} {kind}" for name in impls for kind in ("bucketed", "ddp")]
    return [BASELINE, *ours, VIEWS, AGAIN]


def _arm(
    ctx: Context, size: Size, label: str, loaded: dict[str, Implementation]
) -> tuple[Arm, dict[str, int]]:
    """An arm after four steps (torch rebuilds its buckets after the first), and its memory.

    Memory is bytes that wrapping and the steps add to the bare model: `live` after the last
    backward, `peak` at the most.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(size.width) for _ in range(size.num_blocks)])
    batch = torch.randn(NUM_TOKENS, size.width, generator=torch.Generator().manual_seed(ctx.rank))
    ctx.barrier()
    before, readings = paired.allocated_bytes(), [0]
    wrapped, finish = _wrap(model, label, loaded)
    arm = Arm(wrapped, torch.optim.SGD(model.parameters(), lr=1e-3), finish, batch)
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _: readings.append(paired.allocated_bytes() - before)
        )
        for parameter in model.parameters()
    ]
    for _ in range(3):
        arm.step()
    arm.backward()
    ctx.barrier()
    live = paired.allocated_bytes() - before
    for handle in handles:
        handle.remove()
    arm.optimizer.zero_grad()
    return arm, {"live": live, "peak": max(readings)}


def _wrap(
    model: nn.Module, label: str, loaded: dict[str, Implementation]
) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    if label in (BASELINE, VIEWS, AGAIN):
        views = label == VIEWS
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=views
        )
        return wrapped, lambda _: None
    name, kind = label.rsplit(" ", 1)
    impl = loaded[name]
    if kind == "ddp":
        return impl.ddp(model), impl.finish_gradient_synchronization
    wrapped = impl.ddp_bucketed(model, bucket_size_mb=BUCKET_MB)
    return wrapped, impl.finish_gradient_synchronization


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
    memory: dict[str, dict[str, int]]
    num_rounds: int
    num_dropped: int
    verdicts: list[str]


def summarise(size: Size, impls: list[str], ranks: list[dict[str, Any]]) -> Result:
    """Times of the kept rounds, their paired ratios, and what they say about the bounds."""
    labels = arm_labels(impls)
    timings = Timings.of(labels, ranks)
    against = {base: timings.against(base) for base in (BASELINE, VIEWS)}
    memory = ranks[0]["memory"]
    return Result(
        size=size.name,
        num_parameters=size.num_blocks * sum(p.numel() for p in Block(size.width).parameters()),
        labels=labels,
        ms=timings.ms,
        core_ms=timings.core_ms,
        against=against,
        memory=memory,
        num_rounds=timings.num_kept,
        num_dropped=timings.num_dropped,
        verdicts=timings.voids(BASELINE, AGAIN) or _verdicts(size, impls, against, memory),
    )


def _verdicts(
    size: Size,
    impls: list[str],
    against: dict[str, dict[str, paired.Ratio]],
    memory: dict[str, dict[str, int]],
) -> list[str]:
    said: list[str] = []
    for name in impls:
        label = f"{name} bucketed"
        for base, bound in size.bounds.items():
            high = against[base][label].high
            words = f"{label} against {base} at most {high:.3f}, bound {bound}"
            said.append(verdict(high <= bound, words))
        if not paired.can_count_allocations():
            said.append("holds: gradient memory was not measured, glibc 2.33 or newer tells it")
            continue
        live, allowed = memory[label]["live"], memory[BASELINE]["live"]
        said.append(verdict(live <= allowed, f"{label} keeps {live:,} bytes, torch {allowed:,}"))
    return said


def sections(results: list[Result]) -> list[str]:
    """The tables as lines of Markdown."""
    lines = []
    for result in results:
        head = (
            "arm",
            "ms",
            "core ms",
            "against torch",
            "against torch views",
            "live MiB",
            "peak MiB",
        )
        rows = [head]
        for label in result.labels:
            of_torch, of_views = (result.against[base].get(label) for base in (BASELINE, VIEWS))
            used = result.memory[label]
            rows.append(
                (
                    label,
                    f"{result.ms[label]:.1f}",
                    f"{result.core_ms[label]:.1f}",
                    str(of_torch or "1"),
                    str(of_views or "1"),
                    f"{used['live'] / 2**20:.1f}",
                    f"{used['peak'] / 2**20:.1f}",
                )
            )
        lines += section(f"{result.size} ({result.num_parameters:,} parameters)", rows, result)
    return lines


def main(argv: list[str]) -> int:
    """Measure, print, and write `ddp.md` and `ddp.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks ddp")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 200 at 1M, 60 at 25M")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for ddp.md and ddp.json")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    results = []
    worlds = Worlds()
    try:
        for name in options.size or list(SIZES):
            size = SIZES[name]
            rounds = options.rounds or size.num_rounds
            ranks = worlds.world(2).run(body, size, impls, rounds, timeout_s=3600.0)
            results.append(summarise(size, impls, list(ranks)))
    finally:
        worlds.close()
    return report(
        options.out,
        "ddp",
        "Data-parallel step, paired against PyTorch's DistributedDataParallel",
        f"2 ranks on gloo, 1 thread each, fp32, {NUM_TOKENS} tokens per rank, SGD, "
        f"buckets of {BUCKET_MB} MiB; ratios are paired medians with their 95 % interval",
        results,
        sections(results),
    )
