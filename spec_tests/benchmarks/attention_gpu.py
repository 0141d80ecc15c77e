"""TFLOP/s of attention on a GPU, beside PyTorch's kernels, ratios first.

bfloat16, 16384 tokens and 2048 channels in all (as the papers have it), head dim 64 and 128, full
and causal, sequences of 512 to 16384. Arms, in one process, a little of each in turn:

    flash         SDPA restricted to FlashAttention-2
    flash again   the first once more: the A/A arm (see paired.py)
    cudnn, flex   SDPA restricted to cuDNN; FlexAttention, compiled, at two lengths only, since it
                  compiles for each. Left out where they do not run.
    NAME          flash_attention_triton of each --impl

Counted as the papers count: 4 B H N N D operations forward, 2.5 times that backward, half of both
if causal. An atomics-free backward executes seven products and not five, so 1.4 times what is
counted; both are shown. A time is that of one pass between two events on the stream, and a round is
as many passes as fill `ROUND_MS`.

Bounds, against flash, from 2048 tokens on: forward at least as fast, backward 0.8 times as fast.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spec_tests.benchmarks import paired
from spec_tests.target import load, parse

NUM_TOKENS, NUM_CHANNELS = 16_384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
FLEX_LENGTHS = (2048, 8192)
HEAD_DIMS = (64, 128)
ROUND_MS = 8.0
BOUNDS = {"forward": 1.0, "backward": 0.8}  # of flash's speed
LONG = 2048
FLASH, AGAIN = "flash", "flash again"

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One shape."""

    length: int
    head_dim: int
    is_causal: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, seq, head_dim]."""
        heads = NUM_CHANNELS // self.head_dim
        return NUM_TOKENS // self.length, heads, self.length, self.head_dim

    def flops(self, direction: str) -> float:
        """As the papers count."""
        batch, heads, length, head_dim = self.shape
        forward = 4.0 * batch * heads * length**2 * head_dim / (2 if self.is_causal else 1)
        return forward if direction == "forward" else 2.5 * forward

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        return f"D={self.head_dim} {mask} N={self.length}"


def sdpa(backend: SDPBackend) -> Attention:
    """PyTorch's attention by that kernel and no other."""

    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


def flex() -> Attention:
    """FlexAttention, compiled; its block mask is made once per length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> torch.Tensor:
        length = q.shape[2]
        if causal and length not in masks:
            masks[length] = create_block_mask(visible, None, None, length, length, device="cuda")
        return compiled(q, k, v, block_mask=masks[length] if causal else None)

    return attention


def arms(impls: Sequence[str]) -> dict[str, Attention]:
    """By label, in the order of an even round: equal things far apart."""
    ours = {name: load(parse(name)).flash_attention_triton for name in impls}
    return {
        FLASH: sdpa(SDPBackend.FLASH_ATTENTION),
        **ours,
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flex": flex(),
        AGAIN: sdpa(SDPBackend.FLASH_ATTENTION),
    }


def passes(attention: Attention, case: Case) -> dict[str, Callable[[], Any]]:
    """The two things to time, on tensors of their own."""
    generator = torch.Generator("cuda").manual_seed(case.length)
    drawn = [
        torch.randn(case.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    q, k, v = (tensor.requires_grad_() for tensor in drawn[:3])
    out = attention(q, k, v, causal=case.is_causal)

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v, causal=case.is_causal)

    def backward() -> None:  # no accumulation: that is not attention's
        torch.autograd.grad(out, (q, k, v), drawn[3], retain_graph=True)

    return {"forward": forward, "backward": backward}


def milliseconds(run: Callable[[], Any], num_passes: int) -> float:
    """Of one pass, by the device's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_passes):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_passes


@dataclass(frozen=True)
class Result:
    """One shape, one direction. `speed` is flash's time over the arm's; both by label."""

    case: str
    direction: str
    tflops: dict[str, float]
    speed: dict[str, paired.Ratio]
    verdicts: list[str]


def measure(
    attentions: dict[str, Attention], impls: Sequence[str], case: Case, num_rounds: int
) -> list[Result]:
    """Both directions of one shape; an arm that does not run it is left out."""
    ready: dict[str, dict[str, Callable[[], Any]]] = {}
    for label, attention in attentions.items():
        if label == "flex" and case.length not in FLEX_LENGTHS:
            continue
        try:
            ready[label] = passes(attention, case)
            for run in ready[label].values():
                run()
        except RuntimeError as error:  # no kernel for this shape or device, or none compiles
            if label not in ("cudnn", "flex"):
                raise
            ready.pop(label, None)
            print(f"{case}: without {label}: {str(error).splitlines()[0]}")
    results = []
    for direction in BOUNDS:
        runs = [one[direction] for one in ready.values()]
        num_passes = [max(1, int(ROUND_MS / max(milliseconds(run, 3), 1e-3))) for run in runs]
        taken: dict[str, list[float]] = {label: [] for label in ready}
        labels = list(ready)
        for index in range(num_rounds):
            for number in paired.order(len(runs), index):
                one = milliseconds(runs[number], num_passes[number])
                taken[labels[number]].append(one)
        speed = {label: paired.ratio(taken[FLASH], times) for label, times in taken.items()}
        results.append(
            Result(
                case=str(case),
                direction=direction,
                tflops={
                    label: case.flops(direction) / statistics.median(times) / 1e9
                    for label, times in taken.items()
                },
                speed=speed,
                verdicts=_verdicts(impls, case, direction, speed),
            )
        )
    return results


def _verdicts(
    impls: Sequence[str], case: Case, direction: str, speed: dict[str, paired.Ratio]
) -> list[str]:
    where, bound = f"{case} {direction}", BOUNDS[direction]
    if paired.is_void(speed[AGAIN]):
        return [f"void: {where}, flash against itself {speed[AGAIN].median:.3f}"]
    if case.length < LONG:
        return []
    return [
        f"{'holds' if speed[name].low >= bound else 'missed'}: {where}, {name} at least "
        f"{speed[name].low:.3f} times as fast as flash, bound {bound}"
        for name in impls
    ]


def render(results: list[Result], labels: Sequence[str], environment: dict[str, str]) -> str:
    """The results as Markdown: speeds against flash, then TFLOP/s."""
    lines = ["# Attention on a GPU, paired against SDPA's FlashAttention-2", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines.append(
        f"- bfloat16, {NUM_TOKENS} tokens, {NUM_CHANNELS} channels; ratios are paired medians with "
        "their 95 % interval, above 1 is faster; TFLOP/s as the papers count (a backward of seven "
        "products executes 1.4 times that)"
    )
    for direction in BOUNDS:
        of_direction = [result for result in results if result.direction == direction]
        for title, cell in (("times flash's speed", _speed), ("TFLOP/s", _tflops)):
            rows = [[title, *labels]]
            rows += [[one.case, *(cell(one, label) for label in labels)] for one in of_direction]
            lines += ["", f"## {direction}, {title}", "", paired.table(rows)]
    lines += ["", *(f"- {verdict}" for result in results for verdict in result.verdicts)]
    return "\n".join(lines) + "\n"


def _speed(result: Result, label: str) -> str:
    return str(result.speed[label]) if label in result.speed else "-"


def _tflops(result: Result, label: str) -> str:
    if label not in result.tflops:
        return "-"
    counted = result.tflops[label]
    is_split = result.direction == "backward" and label not in (FLASH, AGAIN, "cudnn")
    return f"{counted:.0f} ({1.4 * counted:.0f} executed)" if is_split else f"{counted:.0f}"


def run(impls: Sequence[str], *, num_rounds: int, out: Path) -> int:
    """Measure, print, and write `attention_gpu.md` and `.json`; 1 when a bound is missed."""
    if num_rounds < paired.FEWEST_ROUNDS:
        raise SystemExit(f"expected --rounds of at least {paired.FEWEST_ROUNDS}, got {num_rounds}")
    attentions, results = arms(impls), []
    for head_dim, causal, length in itertools.product(HEAD_DIMS, (False, True), LENGTHS):
        torch.compiler.reset()  # or flex falls back when it has seen too many shapes
        results += measure(attentions, impls, Case(length, head_dim, causal), num_rounds)
        torch.cuda.empty_cache()
    environment = {**paired.environment(), "device": torch.cuda.get_device_name()}
    text = render(results, list(attentions), environment)
    print(text)
    record = {"environment": environment, "results": [asdict(result) for result in results]}
    paired.write(out, "attention_gpu", text, record)
    return int(any(not v.startswith("holds") for result in results for v in result.verdicts))
