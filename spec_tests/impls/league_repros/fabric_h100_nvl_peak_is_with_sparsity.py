"""Lightning's peak of an H100 NVL is that with sparsity, unlike those of the other H100s.

Expected: the dense 835.5 TFLOPS in bfloat16 of the data sheet
Got: 1978.8 TFLOPS, more than a dense H100 SXM's 989.4
Versions: lightning 2.6.6, torch 2.13.0, checked 2026-11-23
Clause: none (the clauses ask for other devices)
Issue: https://github.com/Lightning-AI/pytorch-lightning/issues/21677
"""

from unittest import mock

import torch
from lightning.fabric.utilities.throughput import get_available_flops


def _peak(name: str) -> float | None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        return get_available_flops(torch.device("cuda", 0), torch.bfloat16)


def observe() -> tuple[object, object]:
    """Return whether the slower NVL has no more than the SXM, and whether Lightning says so."""
    return True, _peak("NVIDIA H100 NVL") <= _peak("NVIDIA H100 80GB HBM3")


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    expected, got = observe()
    print(f"expected: {expected}\ngot:      {got}")
    return int(expected != got)
