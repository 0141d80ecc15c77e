"""TorchTNT's prepare_ddp copies the process group of its strategy, which raises.

Expected: a module that is replicated over the group
Got: TypeError: a process group cannot be pickled, so it cannot be copied
Versions: torchtnt 0.2.4, torch 2.13.0, checked 2026-11-23
Clause: ddp.group.divides-by-its-size, ddp.group.keeps-to-itself, ddp.group.starts-from-its-first-rank
Issue: none found (searched: torchtnt prepare_ddp DDPStrategy process_group asdict deepcopy pickle)
"""

import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(observe(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (folder,), nprocs=RANKS)
        expected, got = zip(*(torch.load(f"{folder}/{r}") for r in range(RANKS)), strict=True)
    print(f"expected on each rank: {expected}\ngot:                   {got}")
    return int(expected != got)


if __name__ == "__main__":
    try:
        status = _main()  # 1: the fault is there
    except Exception:  # neither shown nor refuted
        traceback.print_exc()
        status = 2
    sys.exit(status)
