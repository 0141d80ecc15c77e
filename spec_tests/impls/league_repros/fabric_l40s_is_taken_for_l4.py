"""Lightning gives an L40S the peak of an L4: the name is searched for "l4".

Expected: no peak, or the 362 TFLOPS in bfloat16 that NVIDIA states for an L40S
Got: the 121 TFLOPS of an L4: a utilization three times too high
Versions: lightning 2.6.6, torch 2.13.0, checked 2026-11-23
Clause: none (the clauses ask for A100, H100, H200 and H20)
Issue: none found (searched: lightning get_available_flops L40S L4 chip; neighbouring: https://github.com/Lightning-AI/pytorch-lightning/issues/21677)
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
    """Return whether an L40S has no peak or its own, and the peak that is given."""
    peak = _peak("NVIDIA L40S")
    return (peak if peak in (None, 362e12) else 362e12), peak


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
