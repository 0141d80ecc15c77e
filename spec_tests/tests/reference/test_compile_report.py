"""`python -m spec_tests.bench.compile_report` and `.tune`: the kernels, for an H100."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spec_tests.tests.reference.launch import ROOT, run

# Three kernels as shipped, delta, and one of the other kind: a tile that four warps cannot hold.
PROGRAM = """
import json

from spec_tests.bench.compile_report import Row, compiled, main, problems
from solution.attention.tiles import Tiles

if __name__ == "__main__":
    status = main(["--dtype", "bfloat16", "--head-dim", "128", "--mask", "causal"])
    row = Row("forward", "bfloat16", 128, True)
    [found] = compiled([(row, Tiles(128, 128, 4, 2))])
    said = problems(row, found)
    print(json.dumps({"status": status, "stack": found.stack_bytes, "problems": said}))
"""


def assembler_is_missing():
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return True
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return not all((folder / name).is_file() for name in ("ptxas", "cuobjdump"))


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """Lines of the report, and what the program says of itself."""
    if assembler_is_missing():
        pytest.skip("needs Triton with its assembler, which is not installed")
    folder = tmp_path_factory.mktemp("compiled")
    surroundings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    surroundings |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", PROGRAM]  # it starts processes, which a daemon may not
    output = subprocess.check_output(command, env=surroundings, text=True, timeout=250)
    *lines, last = output.splitlines()
    return lines, json.loads(last)


def test_shipped_kernels_do_not_spill_and_use_the_tensor_cores(report):
    (*lines, verdict), said = report
    assert (verdict, said["status"]) == ("all is well", 0)
    names, _, *cells = (re.split(r"\s*\|\s*", line)[1:-1] for line in lines)
    found = {row[0]: dict(zip(names, row, strict=True)) for row in cells}
    assert found.keys() == {"forward", "dkdv", "dq", "delta"}
    for kernel, row in found.items():
        assert int(row["registers"]) <= 255
        assert int(row["shared_bytes"]) <= 227 * 1024
        assert (row["stack_bytes"], row["atomics"]) == ("0", "0")
        assert (int(row["wgmma"]) > 0) == (kernel != "delta")
        assert (int(row["async_copies"]) > 0) == (kernel != "delta")


def test_a_tile_that_spills_is_a_problem(report):
    said = report[1]
    assert said["stack"] > 0
    assert said["problems"] == [
        f"expected no spilled registers, got {said['stack']} bytes per thread"
    ]


def test_what_cannot_be_compiled_here_is_said(tmp_path):
    module, interpreted = "spec_tests.bench.compile_report", {"TRITON_INTERPRET": "1"}
    is_missing = find_spec("triton") is None
    says = "Triton, which is not installed" if is_missing else "TRITON_INTERPRET"
    run(module, folder=tmp_path, environment=interpreted, status=2, says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be used for a while")
def test_tuning_without_a_gpu_says_what_it_needs(tmp_path):
    says = "there is no CUDA device"
    run("spec_tests.bench.tune", folder=tmp_path, status=2, says=says)
