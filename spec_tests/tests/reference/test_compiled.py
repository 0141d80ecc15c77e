"""The reference's Triton kernels compile for an H100, without spilled registers."""

import json

import pytest

from spec_tests.tests.reference import compiled
from spec_tests.tests.reference.launch import run


@pytest.mark.skipif(compiled.cuobjdump() is None, reason="needs Triton with its assembler")
def test_kernels_do_not_spill_and_use_the_tensor_cores(tmp_path):
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    words = ("bfloat16", 128)
    ended = run(compiled.__name__, *words, folder=tmp_path, environment=environment)
    found = json.loads(ended.out)
    assert found.pop("too large")["stack"] > 0
    assert found.keys() == {"forward", "dkdv", "dq", "delta"}
    for kernel, row in found.items():
        assert row["registers"] <= 255
        assert row["shared"] <= 227 * 1024
        assert (row["stack"], row["atomics"]) == (0, 0)
        assert (row["wgmma"] > 0) == (row["async_copies"] > 0) == (kernel != "delta"), kernel
