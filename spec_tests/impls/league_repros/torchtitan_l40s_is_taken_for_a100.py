"""torchtitan gives an L40S the peak of an A100: it looks for "l40s" in a name in capitals.

Expected: 362 TFLOPS, torchtitan's own number for the L40S
Got: 312 TFLOPS, its guess for unknown devices
Versions: torchtitan 0.3.0, torch 2.13.0, checked 2026-11-23
Clause: none (the clauses ask for A100, H100, H200 and H20)
Issue: https://github.com/pytorch/torchtitan/pull/4299
"""

from torchtitan.tools.utils import get_peak_flops


def observe() -> tuple[object, object]:
    """Return the peak by the name that the code looks for, and by the name that CUDA reports."""
    return get_peak_flops("l40s"), get_peak_flops("NVIDIA L40S")


def main() -> int:
    """Return 1 where the fault holds and 0 where it does not."""
    expected, got = observe()
    print(f"expected: {expected}\ngot:      {got}")
    return int(expected != got)
