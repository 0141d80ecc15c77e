"""Which tiles are fastest, measured on the GPU at hand: candidates for `solution.attention.tiles`.

    python -m spec_tests.bench.tune [--head-dim 64 128] [--dtype bfloat16] [--mask causal]
                                       [--length 4096]

For each kernel, head dim and mask all candidates are compiled at once, as
`spec_tests.bench.compile_report` does, and those that spill or do not fit fall out. The others
are first checked against attention in float64 (a compiler may get one shape of tile wrong and
another right), then timed: the median of Triton's `do_bench`, 16384 tokens and 2048 channels in
all. dK/dV and dQ are timed with the delta kernel, which both need. The fastest come first; the row
of the table bears a star. What wins here belongs into the table.

Exit status: 0, or 1 if the row of the table gives wrong values, 2 without a GPU and Triton.
"""

import argparse
import functools
import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from spec_tests.bench import compile_report
from spec_tests.bench.compile_report import Tiles, tiling

tiled: Any = importlib.import_module("solution.attention.tiled")
launch: Any = importlib.import_module("solution.attention.triton_launch")

NUM_TOKENS, NUM_CHANNELS = 16_384, 2048
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-11}  # of float32's TF32 parts

_SIDES = {  # queries, keys, warps, stages
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "dq": ((64, 128), (16, 32, 64, 128), (4, 8), (2, 3, 4)),
    "dkdv": ((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)),
}
CANDIDATES = {
    kernel: [tiling.Tiles(*row) for row in itertools.product(*sides)]
    for kernel, sides in _SIDES.items()
}


def measured(kernel: str, head_dim: int, dtype: str, *, causal: bool, length: int) -> list[str]:
    """Lines of the report, the fastest first."""
    shipped = tiling.choose(kernel, tiling.padded(head_dim), getattr(torch, dtype))
    candidates = list(dict.fromkeys([shipped, *CANDIDATES[kernel]]))
    candidates = fitting(kernel, head_dim, dtype, candidates, causal=causal)
    small = _inputs((1, 2, 515, head_dim), dtype)  # ragged, so that masks count
    heads = max(1, NUM_CHANNELS // head_dim)
    large = _inputs((max(1, NUM_TOKENS // length), heads, length, head_dim), dtype)
    rows, timed = [], importlib.import_module("triton.testing").do_bench
    for candidate in candidates:
        star = "*" if candidate == shipped else " "
        # In place of that row of the table, for all head dims.
        row = {(kernel, getattr(torch, dtype).itemsize): (candidate,) * 3}
        with mock.patch.dict(tiling.TABLE, row):
            try:
                error = _error(kernel, small, causal=causal) / UNIT[dtype]
                ms = timed(lambda: _run(kernel, large, causal=causal), return_mode="median")
            except Exception as problem:  # too much shared memory, or no compiler
                rows.append((float("inf"), f"{star} {candidate}: {type(problem).__name__}"))
                continue
        verdict = f"{ms:8.3f} ms" if error < 1 else "WRONG"
        rows.append((ms, f"{star} {verdict}  {candidate}  error {error:.2f} units"))
    return [line for _, line in sorted(rows, key=lambda row: row[0])]


def fitting(
    kernel: str, head_dim: int, dtype: str, candidates: Sequence[Tiles], *, causal: bool
) -> list[Tiles]:
    """Those that compile without a spilled register and fit into shared memory.

    All of them where this machine has no assembler.
    """
    if compile_report.missing() is not None:
        return list(candidates)
    row = compile_report.Row(kernel, dtype, head_dim, causal)
    found = compile_report.compiled([(row, candidate) for candidate in candidates])
    return [
        candidate
        for candidate, result in zip(candidates, found, strict=True)
        if isinstance(result, compile_report.Compiled)
        and result.stack_bytes == 0
        and result.shared_bytes <= compile_report.SHARED_BYTES
    ]


def _inputs(shape: tuple[int, ...], dtype: str) -> list[torch.Tensor]:
    """q, k, v and dO, with one channel far above the others, as real activations have."""
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randn(shape, device="cuda", generator=generator) for _ in range(4)]
    drawn[1][..., 3] *= 10
    return [tensor.to(getattr(torch, dtype)) for tensor in drawn]


def _run(kernel: str, given: Sequence[torch.Tensor], *, causal: bool) -> list[torch.Tensor]:
    """What `kernel` gives; the backward's need a forward, which is made once and kept."""
    q, k, v, dout = given
    scale = q.shape[-1] ** -0.5
    if kernel == "forward":
        return [launch.triton_forward(q, k, v, causal=causal, scale=scale)[0]]
    out, lse = _forward(q, k, v, causal=causal, scale=scale)
    wants = {"wants_q": kernel == "dq", "wants_kv": kernel == "dkdv"}
    found = launch.triton_backward(
        dout, None, q, k, v, out, lse, causal=causal, scale=scale, **wants
    )
    return [tensor for tensor in found if tensor.numel()]


_forward = functools.lru_cache(maxsize=1)(tiled.tiled_forward)


def _error(kernel: str, given: Sequence[torch.Tensor], *, causal: bool) -> float:
    """The relative error, in norm, of what `kernel` gives."""
    q, k, v, dout = (tensor.double() for tensor in given)
    scale = q.shape[-1] ** -0.5
    out, lse = tiled.tiled_forward(q, k, v, causal=causal, scale=scale)
    dq, dk, dv = tiled.tiled_backward(dout, None, q, k, v, out, lse, causal=causal, scale=scale)
    wanted = {"forward": [out], "dkdv": [dk, dv], "dq": [dq]}[kernel]
    found = _run(kernel, given, causal=causal)
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Time tiles on the GPU at hand.")
    parser.add_argument("--dtype", nargs="+", choices=UNIT, default=["bfloat16"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    flags = parser.parse_args(arguments)
    reason = launch.unavailable("cuda") if torch.cuda.is_available() else "there is no CUDA device"
    if reason is not None:
        sys.stderr.write(f"expected a GPU and Triton: {reason}\n")
        return 2
    is_wrong = False
    for dtype, head_dim, mask in itertools.product(flags.dtype, flags.head_dim, flags.mask):
        for kernel in CANDIDATES:
            sys.stdout.write(f"\n{kernel}, {dtype}, head dim {head_dim}, {mask}\n")
            lines = measured(kernel, head_dim, dtype, causal=mask == "causal", length=flags.length)
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()  # what is done stays, if the time is up
            is_wrong |= any(line.startswith("* WRONG") for line in lines)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
