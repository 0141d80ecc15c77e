"""TFLOP/s of attention on a GPU, beside PyTorch's kernels, ratios first.

bfloat16, 16384 tokens and 2048 channels in all (as the papers have it), head dim 64 and 128, full
and causal, sequences of 512 to 16384. Arms, in one process, a little of each in turn:

    flash         SDPA restricted to FlashAttention-2
    flash again   the first once more: the A/A arm (see paired.py)
    cudnn         SDPA restricted to cuDNN; left out where it does not run
    NAME          flash_attention_triton of each --impl

Counted as the papers count: 4 B H N N D operations forward, 2.5 times that backward, half of both
if causal. An atomics-free backward executes seven products and not five, so 1.4 times what is
counted; both are shown. A time is that of one pass between two events on the stream, and a round is
as many passes as fill `ROUND_MS`.

Bounds, against flash, from 2048 tokens on: forward at least as fast, backward 0.8 times as fast.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spec_tests.bench import paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import Section, bullets, pivot, verdict
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import load

NUM_TOKENS, NUM_CHANNELS = 16_384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
HEAD_DIMS = (64, 128)
ROUND_MS = 8.0
BOUNDS = {"forward": 1.0, "backward": 0.8}  # of flash's speed
LONG = 2048
FLASH, AGAIN = "flash", "flash again"

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case(runner.Case):
    """One shape, in one direction."""

    length: int = 0
    head_dim: int = 0
    is_causal: bool = False
    direction: str = "forward"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`[batch, heads, seq, head_dim]`."""
        heads = NUM_CHANNELS // self.head_dim
        return NUM_TOKENS // self.length, heads, self.length, self.head_dim

    @property
    def flops(self) -> float:
        """Operations, as the papers count them."""
        batch, heads, length, head_dim = self.shape
        forward = 4.0 * batch * heads * length**2 * head_dim / (2 if self.is_causal else 1)
        return forward if self.direction == "forward" else 2.5 * forward


def sdpa(backend: SDPBackend | None = None) -> Attention:
    """Return PyTorch's attention by that kernel and no other; None leaves PyTorch the choice."""

    def attention(q: Any, k: Any, v: Any, *, causal: bool) -> torch.Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attention


class Arm(paired.Arm):
    """One attention on tensors of its own; a block is as many passes as fill `ROUND_MS`."""

    def __init__(self, attention: Attention, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(case.length)
        drawn = [
            torch.randn(case.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        ]
        self.q, self.k, self.v = (tensor.requires_grad_() for tensor in drawn[:3])
        self.upstream, self.attention, self.case = drawn[3], attention, case
        self.out = attention(self.q, self.k, self.v, causal=case.is_causal)
        self.step()
        self.num_passes = max(1, int(ROUND_MS / max(self.milliseconds(3), 1e-3)))

    def step(self) -> None:
        """One pass in the case's direction."""
        if self.case.direction == "forward":
            with torch.no_grad():
                self.attention(self.q, self.k, self.v, causal=self.case.is_causal)
        else:  # no accumulation: that is not attention's
            inputs = (self.q, self.k, self.v)
            torch.autograd.grad(self.out, inputs, self.upstream, retain_graph=True)

    def milliseconds(self, num_passes: int) -> float:
        """Return the time of one pass, by the device's own clock."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.take(num_passes)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / num_passes

    def block(self, num_steps: int) -> tuple[float, float]:
        """Return seconds of a pass; the device's clock counts for both."""
        seconds = 1e-3 * self.milliseconds(num_steps * self.num_passes)
        return seconds, seconds


class AttentionOnGpu(runner.Comparison):
    """Attention by shape and direction, in this process."""

    name = "attention_gpu"
    title = "Attention on a GPU, paired against SDPA's FlashAttention-2"
    note = (
        f"bfloat16, {NUM_TOKENS} tokens, {NUM_CHANNELS} channels; ratios are paired medians with "
        "their 95 % interval, above 1 is faster; TFLOP/s as the papers count (a backward of seven "
        "products executes 1.4 times that)"
    )
    bases, again = (FLASH,), AGAIN
    attentions: dict[str, Attention]

    def arms(self, ctx: Context | None, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """An arm that does not run a shape is left out."""
        ready: dict[str, paired.Arm] = {}
        for label, attention in self.attentions.items():
            try:
                ready[label] = Arm(attention, case)
            except RuntimeError as error:  # no kernel for this shape or device
                if label != "cudnn":
                    raise
                print(f"{case.heading}: without {label}: {str(error).splitlines()[0]}")
        return ready

    def run(self, worlds: Worlds, case: Any, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """Measure in this process, which has the device."""
        return [runner.measured(None, *arguments)]

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """Speeds against flash and TFLOP/s, forward and backward, then all verdicts."""
        self.device = torch.cuda.get_device_name()
        options.max_others = float("inf")  # other processes do not use the device
        self.attentions = {  # in the order of an even round: equal things far apart
            FLASH: sdpa(SDPBackend.FLASH_ATTENTION),
            **{name: load(parse(name)).flash_attention_triton for name in options.impl},
            "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
            AGAIN: sdpa(SDPBackend.FLASH_ATTENTION),
        }
        of: dict[str, list[Found]] = {direction: [] for direction in BOUNDS}
        for head_dim, causal, length in itertools.product(HEAD_DIMS, (False, True), LENGTHS):
            shape = f"D={head_dim} {'causal' if causal else 'full'} N={length}"
            for direction, found in of.items():
                case = Case(shape, "", 1, 1, 20, {}, length, head_dim, causal, direction)
                found.append(self.compare(worlds, case, options))
            torch.cuda.empty_cache()
        verdicts = {id(one): self.verdicts(one) for one in itertools.chain(*of.values())}
        for direction, found in of.items():
            for title, cell in (("times flash's speed", _speed), ("TFLOP/s", _tflops)):
                records = [self.record(one, verdicts[id(one)]) for one in found]
                record = {"direction": direction, "cases": records} if cell is _speed else None
                table = pivot(title, found, list(self.attentions), cell)
                yield Section(f"{direction}, {title}", [table], record)
        by_shape = zip(*of.values(), strict=True)
        said = [line for pair in by_shape for one in pair for line in verdicts[id(one)]]
        yield Section("", [bullets(said)])

    def verdicts(self, found: Found) -> list[str]:
        """Of short sequences only that they are not void."""
        case, said = found.case, found.voids(FLASH, AGAIN)
        if case.length >= LONG:
            said = super().verdicts(found)
        return [line.replace(": ", f": {case.heading} {case.direction}, ", 1) for line in said]

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Speed beside flash's."""
        low, bound = found.ratio(FLASH, name).low, BOUNDS[found.case.direction]
        words = f"{name} at least {low:.3f} times as fast as flash, bound {bound}"
        yield verdict(low >= bound, words)


def _speed(found: Found, label: str) -> str:
    return str(found.ratio(FLASH, label))


def _tflops(found: Found, label: str) -> str:
    counted = found.case.flops / found.ms()[label] / 1e9
    is_split = found.case.direction == "backward" and label not in (FLASH, AGAIN, "cudnn")
    return f"{counted:.0f} ({1.4 * counted:.0f} executed)" if is_split else f"{counted:.0f}"


BENCHMARK = AttentionOnGpu()
