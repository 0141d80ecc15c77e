"""What the kernels compile to on an H100 or H200, without one: registers, spills, shared memory.

    python -m spec_tests.bench.compile_report [--dtype bfloat16] [--head-dim 128]
                                                   [--mask causal]

Each row of `solution.attention.tiles.TABLE` is compiled for `sm_90a` as the launcher would compile
it: rows aligned to 16 bytes, the last stride 1. On Linux Triton brings the assembler (`ptxas`) and
what reads its result (`cuobjdump`); no GPU is needed. One process per kernel, since a compiler that
gives up ends its process.

Columns: registers per thread (at most 255), bytes of stack per thread, which are spilled registers,
shared memory of a program (an H100 has 227 KiB), tensor-core instructions (`wgmma`, or `mma` where
a tile is small), asynchronous copies, atomics. Counts are of instructions in the program text.

Exit status: 0 if all is well, 1 if a row breaks what `problems` says, 2 if nothing can be compiled
here.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from spec_tests.rig.report.text import grid

# Loaded at run time: this instrument is of the reference alone, which the suite never imports.
tiling: Any = importlib.import_module("solution.attention.tiles")
Tiles = Any  # solution.attention.tiles.Tiles

SHARED_BYTES = 232_448  # of one program on compute capability 9.0
TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FLOATS = {"lse", "lse2", "dlse", "delta"}  # float32 whatever the inputs are
# Three TF32 products of tiles 256 wide need more than there is; the smallest tile spills the least.
SPILLING = {("dkdv", "float32", 256), ("dq", "float32", 256)}


@dataclass(frozen=True)
class Row:
    """One kernel as it is shipped: what it is compiled for."""

    kernel: str
    dtype: str
    head_dim: int
    is_causal: bool
    group: int = 1

    @property
    def tiles(self) -> Tiles:
        """Its tiles; the delta kernel has queries only."""
        dims = tiling.padded(self.head_dim)
        if self.kernel == "delta":
            return tiling.Tiles(tiling.delta_queries(dims), 0, 4, 1)
        return tiling.choose(self.kernel, dims, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Compiled:
    """What came out, as counted in PTX and by `cuobjdump`."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    async_copies: int
    atomics: int


def rows(dtypes: Sequence[str], head_dims: Sequence[int], masks: Sequence[bool]) -> list[Row]:
    """Every shipped kernel of these dtypes, head dims and masks; delta knows no mask."""
    kernels = dict.fromkeys(kernel for kernel, _ in tiling.TABLE)
    found = []
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        found += [Row(k, dtype, head_dim, causal) for causal in masks for k in kernels]
        found += [Row("delta", dtype, head_dim, False)]
    return found


def problems(row: Row, found: Compiled) -> list[str]:
    """What is not as it should be, in words."""
    said = []
    if found.stack_bytes and (row.kernel, row.dtype, tiling.padded(row.head_dim)) not in SPILLING:
        said.append(f"expected no spilled registers, got {found.stack_bytes} bytes per thread")
    if found.shared_bytes > SHARED_BYTES:
        said.append(f"expected at most {SHARED_BYTES} bytes shared, got {found.shared_bytes}")
    if found.atomics:
        said.append(f"expected no atomics, got {found.atomics}")
    if row.kernel != "delta" and not found.wgmma + found.mma:
        said.append("expected tensor-core instructions, got none")
    is_half, dims = row.dtype != "float32", tiling.padded(row.head_dim)
    if row.kernel != "delta" and is_half and dims <= 128 and not found.wgmma:
        said.append(f"expected wgmma, Hopper's widest product, got {found.mma} mma")
    if row.tiles.num_stages > 1 and not found.async_copies:
        said.append("expected tiles to be fetched ahead, got no asynchronous copies")
    return said


def compiled(jobs: Sequence[tuple[Row, Tiles]]) -> list[Compiled | str]:
    """Return each job's result, or why there is none; as many at once as there are CPUs."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(_in_a_process, jobs))


def _in_a_process(job: tuple[Row, Tiles]) -> Compiled | str:
    context = multiprocessing.get_context("fork")  # Triton is loaded once, by the parent
    try:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_compile, *job).result()
    except Exception as error:  # the compiler's, or that its process has ended
        said = f"{type(error).__name__}: {error}"
        return f"{job[0]}: expected a compiled kernel, got {said}"


def _compile(row: Row, tiles: Tiles) -> Compiled:
    return _counted(_binary(row, tiles))


def _binary(row: Row, tiles: Tiles) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    name = "triton_kernels" if row.kernel == "forward" else "triton_backward"
    kernel = getattr(importlib.import_module(f"solution.attention.{name}"), f"{row.kernel}_kernel")
    fixed = {
        "GROUP": row.group,
        "HEAD_DIM": row.head_dim,
        "DIMS": tiling.padded(row.head_dim),
        "TILE_Q": tiles.queries,
        "TILE_K": tiles.keys,
        "CAUSAL": row.is_causal,
        "HAS_DLSE": False,
    }
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name in ("scale", "scale_log2"):
            signature[name] = "fp32"
        elif name in ("heads", "num_queries", "num_keys"):
            signature[name] = "i32"
        else:
            is_stride = name.endswith(("_batch", "_head", "_row"))
            element = "fp32" if name in FLOATS else TYPES[row.dtype]
            signature[name] = "i32" if is_stride else f"*{element}"
            aligned[(index,)] = [["tt.divisibility", 16]]
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    source = ASTSource(kernel, signature, fixed, aligned)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    options["enable_fp_fusion"] = True
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _counted(binary: Any) -> Compiled:
    ptx = binary.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(_tool("cuobjdump")), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Compiled(
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        shared_bytes=binary.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        async_copies=len(re.findall(r"\bcp\.async\.(?:c[ag]|bulk)", ptx)),
        # An instruction begins its line, after its predicate: a file's name may hold the word, too.
        atomics=len(re.findall(r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.", ptx, re.MULTILINE)),
    )


def _tool(name: str) -> Path | None:
    """One of the programs that Triton brings."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    return path if path.is_file() else None


def missing() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if find_spec("triton") is None:
        return "expected Triton, which is not installed"
    for name in ("ptxas", "cuobjdump"):
        if _tool(name) is None:
            return f"expected {name} beside Triton, which did not bring it"
    from triton.runtime import JITFunction

    kernels = importlib.import_module("solution.attention.triton_kernels")
    if not isinstance(kernels.forward_kernel, JITFunction):
        return "expected to compile, got TRITON_INTERPRET in the environment; unset it"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description="What the kernels compile to on an H100 or H200.")
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=list(tiling.DIMS))
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    flags = parser.parse_args(arguments)
    reason = missing()
    if reason is not None:
        sys.stderr.write(f"{reason}\n")
        return 2
    lines: list[list[str]] = []
    said: list[str] = []
    shipped = rows(flags.dtype, flags.head_dim, [name == "causal" for name in flags.mask])
    results = compiled([(row, row.tiles) for row in shipped])
    for row, found in zip(shipped, results, strict=True):
        if not isinstance(found, Compiled):
            said.append(found)
            continue
        cells = _cells(row, found)
        lines = [*(lines or [list(cells)]), [str(cell) for cell in cells.values()]]
        said += [f"{' '.join(lines[-1][:4])}: {problem}" for problem in problems(row, found)]
    if lines:
        sys.stdout.write(grid(lines) + "\n")
    sys.stdout.write("\n".join(said or ["all is well"]) + "\n")
    return 1 if said else 0


def _cells(row: Row, found: Compiled) -> dict[str, object]:
    tiles = row.tiles
    return {
        "kernel": row.kernel,
        "dtype": row.dtype,
        "D": row.head_dim,
        "mask": "causal" if row.is_causal else "full",
        "tile": f"{tiles.queries}x{tiles.keys}",
        "warps": tiles.num_warps,
        "stages": tiles.num_stages,
        **vars(found),
    }


if __name__ == "__main__":
    sys.exit(main())
