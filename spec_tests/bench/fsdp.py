"""Step time and peak memory of fully sharded data parallelism, beside PyTorch's own.

Per size and setting, ranks with one thread each run the micro-batches of a step and SGD (fp32, 64
tokens per micro-batch and rank); every block is a unit, and so is the rest. Arms, all in the same
ranks, each with a model of its own:

    torch          torch.distributed.fsdp.fully_shard
    NAME           fully_shard of each --impl
    torch again    the first once more: the A/A arm (see paired.py)
    NAME alone     with one micro-batch: no gather runs ahead of its use (each unit's list of what
                   to prefetch is itself; without such lists there is no such arm)

Settings: `raf` is reshard_after_forward; with accumulation only the last micro-batch reduces;
`compiled` blocks are compiled before they are sharded, by `inductor` where there is a C++ compiler.
Memory is what malloc has given out beyond the sharded model: the highest reading whenever a block
(of compiled ones: the last layer) begins or ends, forward and backward; the median of some steps;
the highest of all ranks. After these steps, and before anything is timed, all arms must hold the
same bits.

Bounds: time against torch .85, at 124M .7, for the upper end of the interval; against NAME alone 1
and 2 % for noise, for the median; peak memory 1.0 times torch's and 2 % for what malloc adds.
"""

import argparse
import dataclasses
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spec_tests.bench import blocks, machine, paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import mebibytes, times, verdict
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import Implementation, load

BASE, AGAIN, ALONE = "torch", "torch again", " alone"
TIME_BOUNDS, AHEAD_BOUND, MEMORY_BOUND = {"1M": 0.85, "25M": 0.85, "124M": 0.7}, 1.02, 1.02


@dataclass(frozen=True)
class Case(runner.Case):
    """A size and a setting; the heading names the number of ranks when that is known."""

    reshard_after_forward: bool = True
    accumulation: int = 1
    is_compiled: bool = False


CASES = [
    Case(
        f"{size}, raf {raf}, {accumulation} micro-batch{'es' if accumulation > 1 else ''}",
        size,
        num_steps=max(1, num_steps // accumulation),
        num_rounds=num_rounds,
        limits={BASE: TIME_BOUNDS[size]},
        reshard_after_forward=raf,
        accumulation=accumulation,
    )
    for size, num_steps, num_rounds, accumulations in (
        ("1M", 4, 400, (1, 4)),
        ("25M", 1, 80, (1, 4)),
        ("124M", 1, 40, (1,)),
    )
    for raf in (True, False)
    for accumulation in accumulations
]
CASES += [
    Case(
        f"25M, raf {raf}, compiled",
        "25M",
        num_steps=1,
        num_rounds=80,
        limits={BASE: TIME_BOUNDS["25M"]},
        reshard_after_forward=raf,
        is_compiled=True,
    )
    for raf in (True, False)
]


class Model(nn.Module):
    """Blocks, each a unit, and a last layer that is the outermost unit's own."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.blocks, (width, _) = blocks.stack(size), blocks.SIZES[size]
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        return self.head(self.blocks(x))


class Arm(paired.Arm):
    """A sharded model with its optimizer after some steps; its facts are peak bytes and bits."""

    def __init__(
        self, ctx: Context, case: Case, impl: Implementation, *, is_alone: bool = False
    ) -> None:
        self.model: Any = Model(case.size)
        self.observed: list[nn.Module] = [self.model.head]
        for block in self.model.blocks:
            if case.is_compiled:
                block.compile(backend="inductor" if shutil.which("g++") else "aot_eager")
            else:
                self.observed.append(block)  # a hook is a graph of its own
            impl.fully_shard(block, reshard_after_forward=case.reshard_after_forward)
        impl.fully_shard(self.model, reshard_after_forward=case.reshard_after_forward)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batches = blocks.batches(case.size, ctx.rank, case.accumulation)
        if is_alone:
            for unit in (*self.model.blocks, self.model):
                unit.set_modules_to_forward_prefetch([unit])
                unit.set_modules_to_backward_prefetch([unit])
        self.take(3)
        # When a message's memory is given back is up to the network: a step more or less.
        self.facts["peak"] = statistics.median_low(self.peak_of_a_step() for _ in range(5))
        parameters: list[Any] = list(self.model.parameters())
        self.shards = [parameter.to_local().detach().clone() for parameter in parameters]

    def step(self) -> None:
        """What is timed."""
        for batch in self.batches:
            if len(self.batches) > 1:
                self.model.set_requires_gradient_sync(batch is self.batches[-1])
            self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_of_a_step(self) -> int:
        """Return the bytes above those before it."""
        before, readings = machine.allocated_bytes(), [0]

        def read(*_: Any) -> None:
            readings.append(machine.allocated_bytes() - before)

        handles = [
            getattr(part, f"register_{moment}_hook")(read)
            for part in self.observed
            for moment in ("forward_pre", "forward", "full_backward_pre", "full_backward")
        ]
        self.step()
        for handle in handles:
            handle.remove()
        return max(readings)


class Fsdp(runner.Comparison):
    """`fully_shard` by each implementation, PyTorch's among them."""

    name = "fsdp"
    title = "Fully sharded step, paired against torch.distributed.fsdp.fully_shard"
    note = (
        f"gloo, 1 thread per rank, fp32, {blocks.NUM_TOKENS} tokens per micro-batch and rank, SGD, "
        "all defaults; ratios are paired medians with their 95 % interval"
    )
    all_cases = CASES
    bases, again = (BASE,), AGAIN
    seconds = 60.0
    options = {"--ranks": {"type": int, "action": "append", "help": "default: 2 and 4"}}
    columns = {**times(".1f", BASE), "peak MiB": mebibytes("peak", ".1f")}

    def cases(self, options: argparse.Namespace) -> Iterator[Case]:
        """Every case on every number of ranks."""
        for num_ranks in options.ranks or [2, 4]:
            for case in super().cases(options):
                heading = f"{case.heading}, {num_ranks} ranks"
                yield dataclasses.replace(case, heading=heading, num_ranks=num_ranks)

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """Those alone only where one micro-batch is a step, and where lists can be set."""
        torchs = load(parse("torch"))
        arms = {BASE: Arm(ctx, case, torchs)}
        for name in impls:
            arms[name] = Arm(ctx, case, load(parse(name)))
        for name in impls if case.accumulation == 1 else ():
            try:
                arms[name + ALONE] = Arm(ctx, case, load(parse(name)), is_alone=True)
            except (AttributeError, NotImplementedError):
                continue
        arms[AGAIN] = Arm(ctx, case, torchs)
        for arm in arms.values():
            arm.facts["differs"] = not all(map(torch.equal, arm.shards, arms[BASE].shards))
        return dict(arms)

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Time, what gathers ahead are worth, memory, bits."""
        yield from super().bounds(found, name)
        both = {name, name + ALONE} & set(found.labels)
        if name + ALONE in both:
            ahead = found.ratio(name, name + ALONE)
            words = f"with gathers ahead {name} takes {ahead} of its time without"
            yield verdict(ahead.median <= AHEAD_BOUND, f"{words}, bound {AHEAD_BOUND}")
        share = found.most(name, "peak") / max(1, found.most(BASE, "peak"))
        words = f"{name} peaks at {share:.3f} of torch's bytes, bound {MEMORY_BOUND}"
        yield verdict(share <= MEMORY_BOUND, words)
        wrong = any(found.most(label, "differs") for label in both)
        yield verdict(not wrong, f"{name} has torch's bits")


BENCHMARK = Fsdp()
