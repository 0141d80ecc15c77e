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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from spec_tests.benchmarks import attention_gpu, paired
from spec_tests.target import load, parse

RESULTS = Path(__file__).with_name("results")
HEAD_DIM = 64
LENGTHS = (512, 1024, 2048, 4096)  # that are timed
MEASURED = (512, 1024, 2048, 4096, 8192)  # whose memory is
EXPONENT, PART_OF_PLAIN, AGAINST_PLAIN, LONG = 1.1, 0.1, 1.0, 2048
PLAIN, SDPA, AGAIN = "plain", "sdpa", "plain again"

Attention = Callable[..., Any]


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


def arms(impls: Sequence[str]) -> dict[str, Attention]:
    """By label, in the order of an even round: equal things far apart."""
    ours = {name: load(parse(name)).flash_attention for name in impls}
    return {PLAIN: plain, **ours, SDPA: sdpa, AGAIN: plain}


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    """q, k, v that want gradients, and dO."""
    generator = torch.Generator().manual_seed(length)
    drawn = [torch.randn(1, 1, length, HEAD_DIM, generator=generator) for _ in range(4)]
    return *(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]


def step(attention: Attention, tensors: tuple[torch.Tensor, ...], *, causal: bool) -> None:
    """Forward and backward, without accumulating: what is timed."""
    q, k, v, upstream = tensors
    torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), upstream)


# ------------------------------------------------------------------------------------------ memory


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
    xs, ys = [math.log(n) for n in lengths], [math.log(value) for value in values]
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


# -------------------------------------------------------------------------------------------- time


def times(
    attentions: dict[str, Attention], length: int, *, causal: bool, num_rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds of a step, per arm and kept round; how many rounds were dropped as noisy."""
    tensors, labels = inputs(length), list(attentions)
    for attention in attentions.values():
        step(attention, tensors, causal=causal)
    kept: dict[str, list[float]] = {label: [] for label in labels}
    num_steps = max(1, 8192 // length)  # plain's time depends on whether malloc finds 16 MiB again
    for index in range(num_rounds):
        seconds = [0.0] * len(labels)
        began, busy, own = time.perf_counter(), paired.busy_s(), time.process_time()
        for number in paired.order(len(labels), index):
            start = time.perf_counter()
            for _ in range(num_steps):
                step(attentions[labels[number]], tensors, causal=causal)
            seconds[number] = (time.perf_counter() - start) / num_steps
        now = paired.busy_s()
        others = paired.share_of_others(
            None if busy is None or now is None else now - busy,
            time.process_time() - own,
            time.perf_counter() - began,
        )
        if others > paired.MAX_OTHERS:
            continue
        for label, taken in zip(labels, seconds, strict=True):
            kept[label].append(taken)
    return kept, num_rounds - len(kept[PLAIN])


# ----------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Result:
    """What one mask showed. `ms` and `against` (plain) by length, then label; None: not timed."""

    mask: str
    peak: dict[str, dict[int, int]]
    exponents: dict[str, float]
    ms: dict[int, dict[str, float]]
    against: dict[int, dict[str, paired.Ratio]]
    num_dropped: int
    verdicts: list[str]


def measure(impls: Sequence[str], *, causal: bool, num_rounds: int) -> Result:
    """Memory at all lengths, and time at those that are timed unless `num_rounds` is 0."""
    attentions = arms(impls)
    peak = {
        label: {n: peak_bytes(attention, n, causal=causal) for n in _lengths(label)}
        for label, attention in attentions.items()
        if label != AGAIN
    }
    exponents = {label: exponent(list(of), list(of.values())) for label, of in peak.items()}
    ms, against, num_dropped = {}, {}, 0
    for length in LENGTHS if num_rounds else ():
        kept, dropped = times(attentions, length, causal=causal, num_rounds=num_rounds)
        num_dropped += dropped
        if len(kept[PLAIN]) < paired.FEWEST_ROUNDS:
            raise SystemExit(
                f"N={length}: {len(kept[PLAIN])} of {num_rounds} rounds were quiet enough, "
                f"expected at least {paired.FEWEST_ROUNDS}; let nothing else run, or give more "
                "--rounds"
            )
        ms[length] = {label: 1e3 * statistics.median(taken) for label, taken in kept.items()}
        against[length] = {
            label: paired.ratio(taken, kept[PLAIN])
            for label, taken in kept.items()
            if label != PLAIN
        }
    return Result(
        mask="causal" if causal else "full",
        peak=peak,
        exponents=exponents,
        ms=ms,
        against=against,
        num_dropped=num_dropped,
        verdicts=verdicts(impls, peak, exponents, against),
    )


def _lengths(label: str) -> tuple[int, ...]:
    return MEASURED if label != PLAIN else LENGTHS  # 8192 x 8192 scores, several times, are GBs


def verdicts(
    impls: Sequence[str],
    peak: dict[str, dict[int, int]],
    exponents: dict[str, float],
    against: dict[int, dict[str, paired.Ratio]],
) -> list[str]:
    """Each bound in words: "holds", "missed" or "void"."""
    said = []
    for name in impls:
        grows, part = exponents[name], peak[name][4096] / peak[PLAIN][4096]
        word = "holds" if grows <= EXPONENT else "missed"
        said.append(f"{word}: memory of {name} grows as N^{grows:.2f}, bound {EXPONENT}")
        word = "holds" if part <= PART_OF_PLAIN else "missed"
        said.append(f"{word}: {name} has {part:.3f} of plain's peak at 4096, bound {PART_OF_PLAIN}")
        for length, of in against.items():
            if length < LONG:
                continue  # nothing is asked there
            if paired.is_void(of[AGAIN]):
                said.append(f"void: N={length}, plain against itself {of[AGAIN].median:.3f}")
            else:
                high = of[name].high
                word = "holds" if high <= AGAINST_PLAIN else "missed"
                said.append(
                    f"{word}: {name} at N={length} takes at most {high:.3f} of plain's time, "
                    f"bound {AGAINST_PLAIN}"
                )
    return said


def render(results: list[Result], environment: dict[str, str]) -> str:
    """The results as Markdown."""
    lines = ["# Attention on a CPU, paired against its definition", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines.append(
        f"- 1 thread, float32, batch 1, one head of {HEAD_DIM}, forward and backward; ratios are "
        "paired medians with their 95 % interval"
    )
    for result in results:
        labels = list(result.peak)
        head = ["peak MiB", *(f"N={n}" for n in MEASURED), "grows as"]
        rows = [head]
        for label in labels:
            cells = [f"{of / 2**20:.1f}" for of in result.peak[label].values()]
            cells += ["-"] * (len(MEASURED) - len(cells))
            rows.append([label, *cells, f"N^{result.exponents[label]:.2f}"])
        lines += ["", f"## {result.mask}", "", paired.table(rows), ""]
        if result.ms:
            rows = [["time against plain", *(f"N={n}" for n in result.ms)]]
            rows += [[label, *(str(of[label]) for of in result.against.values())]
                     for label in (*labels[1:], AGAIN)]  # fmt: skip
            rows += [[f"{label}, ms", *(f"{of[label]:.1f}" for of in result.ms.values())]
                     for label in labels]  # fmt: skip
            lines += [paired.table(rows), "", f"{result.num_dropped} rounds dropped as noisy.", ""]
        lines += [f"- {verdict}" for verdict in result.verdicts]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Measure, print, and write `attention.md` and `.json`; on a GPU that one's instead."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks attention")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--rounds", type=int, default=20, help="0: memory only (CPU)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        return attention_gpu.run(impls, num_rounds=options.rounds, out=options.out)
    torch.set_num_threads(1)
    results = [measure(impls, causal=c, num_rounds=options.rounds) for c in (False, True)]
    environment = paired.environment()
    text = render(results, environment)
    print(text)
    record = {"environment": environment, "results": [asdict(result) for result in results]}
    paired.write(options.out, "attention", text, record)
    return int(any(not v.startswith("holds") for result in results for v in result.verdicts))
