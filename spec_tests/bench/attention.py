"""Time and memory of attention, beside its definition and PyTorch's own kernels.

On a CPU (float32, one thread, one head of 64, forward and backward together) the arms are

    plain         the definition: all scores in memory
    sdpa          torch.nn.functional.scaled_dot_product_attention
    plain again   the first once more: the A/A arm (see paired.py)
    NAME          flash_attention of each --impl

Peak memory is what the allocator gave out at the most, inputs and outputs included, as its events
tell: no noise. It is fitted as a power of the sequence length. Bounds: memory grows with an
exponent of at most 1.1 from 512 to 8192, and is at most a tenth of plain's at 4096; time is at most
plain's from 2048 on.

On a GPU: `spec_tests.bench.attention_gpu`, which this command runs where there is one.
"""

import argparse
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_tests.bench import attention_gpu, paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import (
    Section,
    against,
    bullets,
    mebibytes,
    milliseconds,
    pivot,
    verdict,
)
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import load

HEAD_DIM = 64
LENGTHS = (512, 1024, 2048, 4096)  # that are timed
MEASURED = (*LENGTHS, 8192)  # whose memory is
EXPONENT, PART_OF_PLAIN, LONG = 1.1, 0.1, 2048
PLAIN, SDPA, AGAIN = "plain", "sdpa", "plain again"

Attention = Callable[..., Any]


@dataclass(frozen=True)
class Case(runner.Case):
    """A length with a mask or without."""

    length: int = 0
    is_causal: bool = False


# Plain's time depends on whether malloc finds 16 MiB again, so a block of short ones is many steps.
CASES = [
    Case(
        f"{mask} N={length}",
        num_ranks=1,
        num_steps=max(1, 8192 // length),
        num_rounds=20 if length in LENGTHS else 0,
        limits={PLAIN: 1.0} if length in LENGTHS and length >= LONG else {},
        length=length,
        is_causal=mask == "causal",
    )
    for mask in ("full", "causal")
    for length in MEASURED
]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v on `[batch, heads, seq, D]`, queries and keys equally many."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The p of `values ~ lengths ** p`: least squares of the logarithms.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    logarithms = [math.log(n) for n in lengths], [math.log(value) for value in values]
    return statistics.linear_regression(*logarithms).slope


class Arm(paired.Arm):
    """One attention at one length; its fact is its peak memory."""

    def __init__(self, attention: Attention, case: Case) -> None:
        self.attention, self.is_causal = attention, case.is_causal
        draw = torch.Generator().manual_seed(case.length)
        shape = (1, 1, case.length, HEAD_DIM)
        *self.inputs, self.upstream = (torch.randn(shape, generator=draw) for _ in range(4))
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.step()  # whatever is allocated once and for all
        self.facts["peak"] = self.peak_bytes()

    def step(self) -> None:
        """Run forward and backward, without accumulating: what is timed."""
        out = self.attention(*self.inputs, causal=self.is_causal)
        torch.autograd.grad(out, self.inputs, self.upstream)

    def peak_bytes(self) -> int:
        """Return the most that was in use at once during a step, with its four inputs."""
        gc.collect()  # what a former arm left in cycles must not be freed, and counted, here
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            self.step()
        recorded: Any = profile.profiler
        events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        in_use = itertools.accumulate(event.nbytes() for event in events)
        return max(0, *in_use) + sum(tensor.nbytes for tensor in (*self.inputs, self.upstream))


class AttentionOnCpu(runner.Comparison):
    """Attention by implementation, mask and length; on a GPU another comparison takes over."""

    name = "attention"
    title = "Attention on a CPU, paired against its definition"
    note = (
        f"1 thread, float32, batch 1, one head of {HEAD_DIM}, forward and backward; ratios are "
        "paired medians with their 95 % interval"
    )
    all_cases = CASES
    bases, again = (PLAIN,), AGAIN
    options = {"--device": {"choices": ("cpu", "cuda"), "help": "default: cuda where there is one"}}

    def chosen(self, options: argparse.Namespace) -> runner.Benchmark:
        """Return the comparison on a GPU where that is asked for, or where there is one."""
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return attention_gpu.BENCHMARK if device == "cuda" else self

    def arms(self, ctx: Context | None, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """The definition only where its scores fit: 8192 x 8192, several times, are GBs."""
        attentions = {name: load(parse(name)).flash_attention for name in impls}
        attentions[SDPA] = attention_gpu.sdpa()
        if case.length in LENGTHS:
            attentions = {PLAIN: plain, **attentions, AGAIN: plain}
        arms: dict[str, paired.Arm] = {a: Arm(attend, case) for a, attend in attentions.items()}
        for arm in arms.values():
            arm.step()
        return arms

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """A mask after the other: what was taken at each length, and how memory grows."""
        labels = (PLAIN, *options.impl, SDPA)
        for mask in ("full", "causal"):
            cases = [case for case in self.cases(options) if case.heading.startswith(mask)]
            found = [self.compare(worlds, case, options) for case in cases]
            timed = [one for one in found if one.case.num_rounds]
            tables = [
                pivot("peak MiB", found, labels, mebibytes("peak", ".1f")),
                pivot("ms", timed, labels, milliseconds(".1f")),
                pivot("time against plain", timed, (*labels, AGAIN), against(PLAIN)),
            ]
            said = [line for one in timed for line in self.verdicts(one)]
            peaks = {a: {of.case.length: of.most(a, "peak") for of in found if a in of.labels}
                     for a in labels}  # fmt: skip
            for name in options.impl if len(found) > 1 else ():
                grows = exponent(list(peaks[name]), list(peaks[name].values()))
                words = f"{mask}, memory of {name} grows as N^{grows:.2f}, bound {EXPONENT}"
                said.append(verdict(grows <= EXPONENT, words))
                largest = max(peaks[PLAIN])
                part = peaks[name][largest] / peaks[PLAIN][largest]
                words = f"{mask} N={largest}, {name} has {part:.3f} of plain's peak"
                said.append(verdict(part <= PART_OF_PLAIN, f"{words}, bound {PART_OF_PLAIN}"))
            cases = [self.record(one, self.verdicts(one)) for one in timed]
            record = {"mask": mask, "peak": peaks, "cases": cases, "verdicts": said}
            yield Section(mask, [*tables, bullets(said)], record)

    def verdicts(self, found: Found) -> list[str]:
        """Of long sequences only: of short ones nothing is asked."""
        said = super().verdicts(found) if found.case.limits else []
        return [line.replace(": ", f": {found.case.heading}, ", 1) for line in said]


BENCHMARK = AttentionOnCpu()
