"""Time and memory of attention, beside its definition and PyTorch's own kernels.

On a CPU (float32, one thread, one head of 64, forward and backward together) the arms are

    plain         the definition: all scores in memory
    sdpa          torch.nn.functional.scaled_dot_product_attention
    plain again   the first once more: the A/A arm (see paired.py)
    NAME          flash_attention of each --impl

Peak memory is what the allocator gave out at the most, inputs and outputs included, as its events
tell: no noise. It is fitted as a power of the sequence length. Bounds: memory grows with an
exponent of at most 1.1 from 512 to 8192, and is at most a tenth of plain's at 4096; time is at most
plain's from 2048 on. The exit status is 1 when a bound is missed or the A/A arm voids its row.

On a GPU: `spec_tests.benchmarks.attention_gpu`, which this command runs where there is one.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from spec_tests.benchmarks import attention_gpu, paired, runner
from spec_tests.benchmarks.runner import Found, Section, bullets, table, verdict
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import load, parse

HEAD_DIM = 64
LENGTHS = (512, 1024, 2048, 4096)  # that are timed
MEASURED = (*LENGTHS, 8192)  # whose memory is
EXPONENT, PART_OF_PLAIN, AGAINST_PLAIN, LONG = 1.1, 0.1, 1.0, 2048
PLAIN, SDPA, AGAIN = "plain", "sdpa", "plain again"

Attention = Callable[..., Any]


@dataclass(frozen=True)
class Case(runner.Case):
    """A length with a mask or without."""

    length: int = 0
    is_causal: bool = False


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v on `[batch, heads, seq, D]`, queries and keys equally many."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """PyTorch's choice of kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    """q, k, v that want gradients, and dO."""
    generator = torch.Generator().manual_seed(length)
    drawn = [torch.randn(1, 1, length, HEAD_DIM, generator=generator) for _ in range(4)]
    return *(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]


def step(attention: Attention, tensors: tuple[torch.Tensor, ...], *, causal: bool) -> None:
    """Forward and backward, without accumulating: what is timed."""
    q, k, v, upstream = tensors
    torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), upstream)


def peak_bytes(attention: Attention, length: int, *, causal: bool) -> int:
    """The most that was in use at once during a step, with its four inputs."""
    tensors = inputs(length)
    step(attention, tensors, causal=causal)  # whatever is allocated once and for all
    gc.collect()  # what a former arm left in cycles must not be freed, and counted, here
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step(attention, tensors, causal=causal)
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    in_use = highest = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        in_use += change
        highest = max(highest, in_use)
    return highest + sum(tensor.nbytes for tensor in tensors)


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The p of `values ~ lengths ** p`: least squares of the logarithms.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    logarithms = [math.log(n) for n in lengths], [math.log(value) for value in values]
    return statistics.linear_regression(*logarithms).slope


class Arm(paired.Arm):
    """One attention at one length; its fact is its peak memory."""

    def __init__(self, attention: Attention, case: Case, *, counts_memory: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = attention, case.is_causal
        if counts_memory:
            self.facts["peak"] = peak_bytes(attention, case.length, causal=case.is_causal)
        self.tensors = inputs(case.length)

    def step(self) -> None:
        """What is timed."""
        step(self.attention, self.tensors, causal=self.is_causal)


class AttentionOnCpu(runner.Comparison):
    """Attention by implementation, mask and length; on a GPU another comparison takes over."""

    name = "attention"
    title = "Attention on a CPU, paired against its definition"
    note = (
        f"1 thread, float32, batch 1, one head of {HEAD_DIM}, forward and backward; ratios are "
        "paired medians with their 95 % interval"
    )
    bases, again = (PLAIN,), AGAIN

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Where to measure."""
        super().declare(parser)
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
        )

    def chosen(self, options: argparse.Namespace) -> runner.Benchmark:
        """Return the comparison on a GPU where that is asked for, or where there is one."""
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return attention_gpu.BENCHMARK if device == "cuda" else self

    def arms(self, ctx: Context | None, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """The definition only where its scores fit: 8192 x 8192, several times, are GBs."""
        attentions = {name: load(parse(name)).flash_attention for name in impls}
        attentions = {PLAIN: plain, **attentions, SDPA: sdpa}
        if case.length not in LENGTHS:
            del attentions[PLAIN]
        arms = {
            label: Arm(attention, case, counts_memory=True)
            for label, attention in attentions.items()
        }
        if case.length in LENGTHS:
            arms[AGAIN] = Arm(plain, case, counts_memory=False)
        for arm in arms.values():
            arm.step()
        return dict(arms)

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """A mask after the other, each with all its lengths."""
        for mask in ("full", "causal"):
            found = {}
            for length in MEASURED:
                # Plain's time depends on whether malloc finds 16 MiB again.
                steps = max(1, 8192 // length)
                rounds = 20 if length in LENGTHS else 0
                case = Case(mask, "", 1, steps, rounds, length, mask == "causal")
                found[length] = self.compare(worlds, case, options)
            yield self.section_of(mask, found)

    def section_of(self, mask: str, found: dict[int, Found]) -> Section:
        """Return both tables of a mask."""
        peak = {
            label: {n: of.most(label, "peak") for n, of in found.items() if label in of.labels}
            for label in (PLAIN, *found[LONG].impls, SDPA)
        }
        exponents = {label: exponent(list(of), list(of.values())) for label, of in peak.items()}
        timed = {n: of.timings for n, of in found.items() if n in LENGTHS and of.timings.num_rounds}
        rows = [["peak MiB", *(f"N={n}" for n in MEASURED), "grows as"]]
        for label, of in peak.items():
            cells = [f"{of[n] / 2**20:.1f}" if n in of else "-" for n in MEASURED]
            rows.append([label, *cells, f"N^{exponents[label]:.2f}"])
        blocks = [table(rows)]
        if timed:
            labels, others = list(peak), [*list(peak)[1:], AGAIN]
            head = ["time against plain", *(f"N={n}" for n in timed)]
            ratios = [[a, *(str(of.ratio(a, PLAIN)) for of in timed.values())] for a in others]
            ms = [[f"{a}, ms", *(f"{of.ms()[a]:.1f}" for of in timed.values())] for a in labels]
            dropped = sum(of.num_dropped for of in timed.values())
            blocks += [table([head, *ratios, *ms]), f"{dropped} rounds dropped as noisy."]
        verdicts = [
            said
            for name in found[LONG].impls
            for said in self.verdicts_of(name, peak, exponents, timed)
        ]
        against = {length: of.against(PLAIN) for length, of in timed.items()}
        ms_of = {length: of.ms() for length, of in timed.items()}
        record = {"mask": mask, "peak": peak, "exponents": exponents, "ms": ms_of}
        record |= {"against": against, "verdicts": verdicts}
        return Section(mask, [*blocks, bullets(verdicts)], record)

    def verdicts_of(
        self,
        name: str,
        peak: dict[str, dict[int, int]],
        exponents: dict[str, float],
        timed: dict[int, paired.Timings],
    ) -> Iterator[str]:
        """Yield each bound in words; void lengths are void for themselves."""
        grows, part = exponents[name], peak[name][4096] / peak[PLAIN][4096]
        words = f"memory of {name} grows as N^{grows:.2f}, bound {EXPONENT}"
        yield verdict(grows <= EXPONENT, words)
        words = f"{name} has {part:.3f} of plain's peak at 4096, bound {PART_OF_PLAIN}"
        yield verdict(part <= PART_OF_PLAIN, words)
        for length, timings in timed.items():
            if length < LONG:
                continue  # nothing is asked there
            for void in timings.voids(PLAIN, AGAIN):
                yield void.replace("void: ", f"void: N={length}, ")
                break
            else:
                words = f"{name} at N={length} takes at most {{}} of plain's time"
                yield runner.at_most(timings.ratio(name, PLAIN), AGAINST_PLAIN, words)


BENCHMARK = AttentionOnCpu()
