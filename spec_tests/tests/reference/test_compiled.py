"""The reference's Triton kernels compile for an H100, without spilled registers."""

import json
import os
import subprocess
import sys

import pytest

from spec_tests.tests.reference import compiled
from spec_tests.tests.reference.launch import ROOT


@pytest.mark.skipif(compiled.cuobjdump() is None, reason="needs Triton with its assembler")
def test_kernels_do_not_spill_and_use_the_tensor_cores(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", compiled.__name__, "bfloat16", "128"]
    found = json.loads(subprocess.check_output(command, env=environment, text=True, timeout=250))
    assert found.pop("too large")["stack"] > 0
    assert found.keys() == {"forward", "dkdv", "dq", "delta"}
    for kernel, row in found.items():
        assert row["registers"] <= 255
        assert row["shared"] <= 227 * 1024
        assert (row["stack"], row["atomics"]) == (0, 0)
        assert (row["wgmma"] > 0) == (row["async_copies"] > 0) == (kernel != "delta"), kernel
