"""Lightning takes an A1000 for an A100 and an L40 for an L4: a part of the name is enough.

Expected: no peak for an RTX A1000; for an L40 the 181 TFLOPS in bfloat16 of Lightning's own table
Got: the 312 TFLOPS of an A100 and the 121 of an L4
Versions: lightning 2.6.6, torch 2.13.0, checked 2026-11-23
Clause: measure.mfu.unknown-is-none
Issue: none found (searched: lightning get_available_flops L40S treated as L4 chip name)
"""

from unittest import mock

import torch
from lightning.fabric.utilities.throughput import get_available_flops


def _peak(name: str) -> float | None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        return get_available_flops(torch.device("cuda", 0), torch.bfloat16)


def observe() -> tuple[object, object]:
    """Return the peaks that the table has under these names, and those that are given."""
    names = ("NVIDIA RTX A1000 Laptop GPU", "NVIDIA L40")
    return [None, 181e12], [_peak(name) for name in names]


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    expected, got = observe()
    print(f"expected: {expected}\ngot:      {got}")
    return int(expected != got)
