"""How much memory a rank has used at most.

On a GPU: the peak of what PyTorch allocated (not what it reserved, and not what is allocated now).
On the CPU: the peak resident set of this process, interpreter and libraries included.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes(device: torch.device) -> int:
    """The peak so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage inherits the peak of the process that started this one, torchrun's for instance; the
    # kernel's own line does not.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
