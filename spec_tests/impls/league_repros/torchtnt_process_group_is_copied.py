"""TorchTNT's prepare_ddp copies the process group of its strategy, which raises.

Expected: a module that is replicated over the group
Got: TypeError: a process group cannot be pickled, so it cannot be copied
Versions: torchtnt 0.2.4, torch 2.13.0, checked 2026-11-23
Clause: ddp.group.divides-by-its-size, ddp.group.keeps-to-itself, ddp.group.starts-from-its-first-rank
Issue: none found (searched: torchtnt prepare_ddp DDPStrategy process_group asdict deepcopy pickle)
"""

import torch
import torch.distributed as dist
from torch import nn
from torchtnt.utils.prepare_module import DDPStrategy, prepare_ddp

RANKS = 2


def observe(rank: int) -> tuple[object, object]:
    """Return what should come of it, and what does."""
    group = dist.new_group([0, 1])
    try:
        prepare_ddp(nn.Linear(1, 1), torch.device("cpu"), DDPStrategy(process_group=group))
    except TypeError as error:
        return "a module", f"TypeError: {error}"
    return "a module", "a module"
