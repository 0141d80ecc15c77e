"""Compile the reference's attention kernels for an H100, and print what came out, as JSON.

    python -m spec_tests.tests.reference.compiled bfloat16 128

No GPU is needed: on Linux Triton brings the assembler and `cuobjdump`, which reads its result. A
kernel is compiled as its launcher would compile it, under a causal mask: rows aligned to 16 bytes,
the last stride 1. By kernel: registers and bytes of stack per thread (stack is spilled registers),
bytes of shared memory, and instructions in the program text. `too large` is a tile that four warps
cannot hold: it shows that spilled registers are counted.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FLOATS = {"lse", "lse2", "dlse", "delta"}  # float32 whatever the inputs are
COUNTED = {
    "wgmma": r"wgmma\.mma_async",
    "async_copies": r"\bcp\.async\.(?:c[ag]|bulk)",
    # An instruction begins its line, after its predicate: a file's name may hold the word, too.
    "atomics": r"^\s*(?:@!?%p\d+\s+)?(?:atom|red)\.",
}


def cuobjdump() -> Path | None:
    """Return the program that Triton brings, if it is installed and brings it."""
    spec = find_spec("triton")
    folder = Path(spec.origin or "").parent if spec is not None else Path()
    path = folder / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if path.is_file() else None


def compiled(kernel: str, dtype: str, head_dim: int, tiles: Any) -> dict[str, int]:
    """Return what a kernel compiles to with these tiles."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    module = "triton_kernels" if kernel == "forward" else "triton_backward"
    function = getattr(importlib.import_module(f"solution.attention.{module}"), f"{kernel}_kernel")
    fixed = {"GROUP": 1, "HEAD_DIM": head_dim, "DIMS": head_dim, "CAUSAL": True, "HAS_DLSE": False}
    fixed |= {"TILE_Q": tiles.queries, "TILE_K": tiles.keys}
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
        elif name in ("scale", "scale_log2"):
            signature[name] = "fp32"
        elif name in ("heads", "num_queries", "num_keys"):
            signature[name] = "i32"
        else:
            is_stride = name.endswith(("_batch", "_head", "_row"))
            element = "fp32" if name in FLOATS else TYPES[dtype]
            signature[name] = "i32" if is_stride else f"*{element}"
            aligned[(index,)] = [["tt.divisibility", 16]]
    fixed = {name: value for name, value in fixed.items() if name in function.arg_names}
    source = ASTSource(function, signature, fixed, aligned)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    target = GPUTarget("cuda", 90, 32)
    return counted(compile(source, target=target, options={**options, "enable_fp_fusion": True}))


def counted(binary: Any) -> dict[str, int]:
    """Return what PTX and `cuobjdump` say of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(cuobjdump()), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    found = {"registers": numbers["REG"], "stack": numbers["STACK"]}
    found["shared"] = binary.metadata.shared
    for name, pattern in COUNTED.items():
        found[name] = len(re.findall(pattern, binary.asm["ptx"], re.MULTILINE))
    return found


def main(dtype: str, head_dim: int) -> dict[str, dict[str, int]]:
    """Return what each kernel compiles to with the tiles that are shipped."""
    # Loaded at run time: the suite never imports the reference.
    tiling: Any = importlib.import_module("solution.attention.tiles")
    kernels = dict.fromkeys(kernel for kernel, _ in tiling.TABLE)
    tiles = {each: tiling.choose(each, head_dim, getattr(torch, dtype)) for each in kernels}
    tiles["delta"] = tiling.Tiles(tiling.delta_queries(head_dim), 0, 4, 1)
    found = {kernel: compiled(kernel, dtype, head_dim, of) for kernel, of in tiles.items()}
    too_large = tiling.Tiles(128, 128, 4, 2)
    return {**found, "too large": compiled("forward", dtype, head_dim, too_large)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dtype", choices=TYPES)
    parser.add_argument("head_dim", type=int)
    options = parser.parse_args()
    if cuobjdump() is None:
        parser.error("needs Triton with its assembler: pip install -e '.[triton]'")
    sys.stdout.write(json.dumps(main(**vars(options)), indent=1) + "\n")
