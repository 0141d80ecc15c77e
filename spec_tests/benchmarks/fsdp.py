"""Step time and peak memory of fully sharded data parallelism, beside PyTorch's own.

Per size and setting, ranks with one thread each run the micro-batches of a step and SGD (fp32, 64
tokens per micro-batch and rank); every block is a unit, and so is the rest. Arms, all in the same
ranks, each with a model of its own:

    torch          torch.distributed.fsdp.fully_shard
    NAME           fully_shard of each --impl
    torch again    the first once more: the A/A arm (see paired.py)
    NAME alone     with one micro-batch: no gather runs ahead of its use (each unit's list of what
                   to prefetch is itself; without such lists there is no such arm)

Settings: `raf` is reshard_after_forward; with accumulation only the last micro-batch reduces.
Memory is what malloc has given out beyond the sharded model: the highest reading whenever a block
begins or ends, forward and backward; the median of some steps; the highest of all ranks. After
these steps, and before anything is timed, all arms must hold the same bits.

Bounds: time against torch .85, at 124M .7, for the upper end of the interval; against NAME alone 1
and 2 % for noise, for the median; peak memory 1.0 times torch's and 2 % for what malloc adds. The
exit status is 1 when one is missed, when bits differ, or when the A/A arm voids the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_tests.benchmarks import paired
from spec_tests.benchmarks.ddp import NUM_TOKENS, Block
from spec_tests.benchmarks.rounds import Timings, report, run_rounds, section, verdict
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import Implementation, load, parse

RESULTS = Path(__file__).with_name("results")
BASELINE, AGAIN = "torch", "torch again"
ALONE = " alone"
TIME_BOUNDS, AHEAD_BOUND, MEMORY_BOUND = {"1M": 0.85, "25M": 0.85, "124M": 0.7}, 1.02, 1.02


@dataclass(frozen=True)
class Case:
    """One table."""

    size: str
    width: int
    num_blocks: int
    num_steps: int
    num_rounds: int
    reshard_after_forward: bool
    accumulation: int

    @property
    def name(self) -> str:
        """As the table's heading shows it."""
        raf, number = self.reshard_after_forward, self.accumulation
        return f"{self.size}, raf {raf}, {number} micro-batch{'es' if number > 1 else ''}"


CASES = [
    Case(size, width, num_blocks, max(1, num_steps // accumulation), num_rounds, raf, accumulation)
    for size, width, num_blocks, num_steps, num_rounds, accumulations in (
        ("1M", 128, 8, 4, 400, (1, 4)),
        ("25M", 512, 12, 1, 80, (1, 4)),
        ("124M", 1024, 14, 1, 40, (1,)),
    )
    for raf in (True, False)
    for accumulation in accumulations
]


class Model(nn.Module):
    """Blocks, each a unit, and a last layer that is the outermost unit's own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(case.num_blocks))
        self.head = nn.Linear(case.width, case.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ------------------------------------------------------------------------------------- in the ranks


class Arm:
    """A sharded model with its optimizer, ready to step."""

    def __init__(self, ctx: Context, case: Case, impl: Implementation) -> None:
        torch.manual_seed(0)
        self.model: Any = Model(case)
        for block in self.model.blocks:
            impl.fully_shard(block, reshard_after_forward=case.reshard_after_forward)
        impl.fully_shard(self.model, reshard_after_forward=case.reshard_after_forward)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(ctx.rank)
        self.batches = [
            torch.randn(NUM_TOKENS, case.width, generator=generator)
            for _ in range(case.accumulation)
        ]

    def step(self) -> None:
        """What is timed."""
        for batch in self.batches:
            if len(self.batches) > 1:
                self.model.set_requires_gradient_sync(batch is self.batches[-1])
            self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gather_when_used(self) -> bool:
        """Let no gather run ahead; whether the implementation can be told so."""
        try:
            for unit in (*self.model.blocks, self.model):
                unit.set_modules_to_forward_prefetch([unit])
                unit.set_modules_to_backward_prefetch([unit])
        except (AttributeError, NotImplementedError):
            return False
        return True

    def peak_of_a_step(self) -> int:
        """Bytes above those before it."""
        before, readings = paired.allocated_bytes(), [0]

        def read(*_: Any) -> None:
            readings.append(paired.allocated_bytes() - before)

        handles = []
        for part in (*self.model.blocks, self.model.head):
            handles.append(part.register_forward_pre_hook(read))
            handles.append(part.register_forward_hook(read))
            handles.append(part.register_full_backward_pre_hook(read))
            handles.append(part.register_full_backward_hook(read))
        self.step()
        for handle in handles:
            handle.remove()
        return max(readings)

    def fingerprint(self) -> list[torch.Tensor]:
        """This rank's shards."""
        return [p.to_local().detach().clone() for p in self.model.parameters()]


def body(
    ctx: Context, case: Case, impls: list[str], num_rounds: int, seconds: float
) -> dict[str, Any]:
    """Rank body: all arms, all rounds. Times per arm and round, peak bytes, and who differs."""
    loaded = {name: load(parse(name)) for name in ("torch", *impls)}
    arms, peaks, bits = [], {}, {}
    for label in arm_labels(case, impls):
        name = BASELINE if label == AGAIN else label.removesuffix(ALONE)
        arm = Arm(ctx, case, loaded[name])
        if label.endswith(ALONE) and not arm.gather_when_used():
            continue
        for _ in range(3):
            arm.step()
        # When a message's memory is given back is up to the network: a step more or less.
        peaks[label] = statistics.median_low(arm.peak_of_a_step() for _ in range(5))
        bits[label] = arm.fingerprint()
        arms.append(arm)
    differing = [
        label
        for label in bits
        if any(not torch.equal(a, b) for a, b in zip(bits[label], bits[BASELINE], strict=True))
    ]
    rounds = run_rounds(ctx, arms, case.num_steps, num_rounds, seconds=seconds)
    return {"peaks": peaks, "rounds": rounds, "differing": differing}


def arm_labels(case: Case, impls: list[str]) -> list[str]:
    """Names of the arms, in the order of an even round: equal things far apart."""
    alone = [name + ALONE for name in impls] if case.accumulation == 1 else []
    return [BASELINE, *impls, *alone, AGAIN]


# ----------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class Result:
    """What one case showed."""

    case: str
    num_ranks: int
    labels: list[str]
    ms: dict[str, float]
    core_ms: dict[str, float]
    against: dict[str, paired.Ratio]
    peaks: dict[str, int]
    num_rounds: int
    num_dropped: int
    ahead: dict[str, paired.Ratio]
    verdicts: list[str]
    measured: str = ""


def earlier(folder: Path) -> list[Result]:
    """The tables that stand there, each with when and how it was measured."""
    page = folder / "fsdp.json"
    if not page.exists():
        raise FileNotFoundError(f"--add expected {page}, found no file; measure once without --add")
    record = json.loads(page.read_text())
    found = []
    for result in record["results"]:
        for name in ("against", "ahead"):
            result[name] = {key: paired.Ratio(**value) for key, value in result[name].items()}
        found.append(Result(**{**result, "measured": result.get("measured") or _how(record)}))
    return found


def _how(record: dict[str, Any]) -> str:
    return "{date}, {command}".format(**record["environment"])


def summarise(case: Case, impls: list[str], ranks: list[dict[str, Any]]) -> Result:
    """Times of the kept rounds, their paired ratios, and what they say about the bounds."""
    labels = list(ranks[0]["peaks"])
    timings = Timings.of(labels, ranks)
    against = timings.against(BASELINE)
    ahead = {name: timings.against(name + ALONE)[name] for name in impls if name + ALONE in labels}
    peaks = {label: max(rank["peaks"][label] for rank in ranks) for label in labels}
    differing = {label for rank in ranks for label in rank["differing"]}
    return Result(
        case=case.name,
        num_ranks=len(ranks),
        labels=labels,
        ms=timings.ms,
        core_ms=timings.core_ms,
        against=against,
        peaks=peaks,
        num_rounds=timings.num_kept,
        num_dropped=timings.num_dropped,
        ahead=ahead,
        verdicts=timings.voids(BASELINE, AGAIN)
        or _verdicts(case, impls, against, ahead, peaks, differing),
    )


def _verdicts(
    case: Case,
    impls: list[str],
    against: dict[str, paired.Ratio],
    ahead: dict[str, paired.Ratio],
    peaks: dict[str, int],
    differing: set[str],
) -> list[str]:
    said: list[str] = []
    bound = TIME_BOUNDS[case.size]
    for name in impls:
        high, share = against[name].high, peaks[name] / max(1, peaks[BASELINE])
        words = f"{name} takes at most {high:.3f} of torch's time, bound {bound}"
        said.append(verdict(high <= bound, words))
        if name in ahead:
            words = f"with gathers ahead {name} takes {ahead[name]} of its time without"
            said.append(verdict(ahead[name].median <= AHEAD_BOUND, f"{words}, bound {AHEAD_BOUND}"))
        words = f"{name} peaks at {share:.3f} of torch's bytes, bound {MEMORY_BOUND}"
        said.append(verdict(share <= MEMORY_BOUND, words))
        wrong = differing & {name, name + ALONE}
        said.append(verdict(not wrong, f"{name} has torch's bits"))
    return said


def sections(results: list[Result]) -> list[str]:
    """The tables as lines of Markdown."""
    lines = []
    for result in results:
        rows = [("arm", "ms", "core ms", "against torch", "peak MiB")]
        rows += [
            (
                label,
                f"{result.ms[label]:.1f}",
                f"{result.core_ms[label]:.1f}",
                str(result.against.get(label, 1)),
                f"{result.peaks[label] / 2**20:.1f}",
            )
            for label in result.labels
        ]
        lines += section(f"{result.case}, {result.num_ranks} ranks", rows, result)
        if result.measured:
            lines += [f"- measured: {result.measured}"]
    return lines


def main(argv: list[str]) -> int:
    """Measure, print, and write `fsdp.md` and `fsdp.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks fsdp")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--size", action="append", choices=list(TIME_BOUNDS), help="default: all")
    parser.add_argument("--case", default="", help="words of a table's heading; default: all")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--rounds", type=int, help="at most; default: 400 at 1M, 80, 40 at 124M")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the rounds of a table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for fsdp.md, fsdp.json")
    parser.add_argument("--add", action="store_true", help="keep --out's tables of other cases")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    results, kept = [], earlier(options.out) if options.add else []
    worlds = Worlds(max_pools=1)  # at 124M the ranks of one take half of 24 GiB
    try:
        for num_ranks in options.ranks or [2, 4]:
            for case in CASES:
                if case.size in (options.size or TIME_BOUNDS) and options.case in case.name:
                    rounds = options.rounds or case.num_rounds
                    world = worlds.world(num_ranks)
                    ranks = world.run(body, case, impls, rounds, options.seconds, timeout_s=3600.0)
                    results.append(summarise(case, impls, list(ranks)))
                    print(results[-1].case, num_ranks, *results[-1].verdicts, sep="\n  ")
    finally:  # who interrupts a long run keeps the tables that are done
        worlds.close()
        done = {(result.num_ranks, result.case) for result in results}
        results += [result for result in kept if (result.num_ranks, result.case) not in done]
        names = [case.name for case in CASES]
        results.sort(key=lambda result: (result.num_ranks, names.index(result.case)))
        status = report(
            options.out,
            "fsdp",
            "Fully sharded step, paired against torch.distributed.fsdp.fully_shard",
            f"gloo, 1 thread per rank, fp32, {NUM_TOKENS} tokens per micro-batch and rank, SGD, "
            "all defaults; ratios are paired medians with their 95 % interval",
            results,
            sections(results),
        )
    return status
