"""Lightning gives an L40 and an L40S the peak of an L4: the name is searched for l4 alone.

Expected: 181 TFLOPS in bfloat16, Lightning's own number for the L40, or no peak
Got: the 121 TFLOPS of an L4: a utilization that is too high by half
Versions: lightning 2.6.6, torch 2.13.0, checked 2026-11-23
Clause: none (the clauses ask for A100, H100, H200 and H20)
Issue: none found (searched: lightning get_available_flops L40S treated as L4 chip name)
"""

import sys
import traceback
from unittest import mock

import torch
from lightning.fabric.utilities.throughput import get_available_flops


def _peak(name: str) -> float | None:
    with mock.patch("torch.cuda.get_device_name", return_value=name):
        return get_available_flops(torch.device("cuda", 0), torch.bfloat16)


def observe() -> tuple[object, object]:
    """Return Lightning's number for an L40, and what it gives for one by the name of CUDA."""
    peak = _peak("NVIDIA L40")
    return (181e12 if peak is not None else None), peak


def _main() -> int:
    expected, got = observe()
    print(f"expected: {expected}\ngot:      {got}")
    return int(expected != got)


if __name__ == "__main__":
    try:
        status = _main()  # 1: the fault is there
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
